"""Routes for operators: /health, /ready and /metrics."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from regard.serve.metrics import CONTENT_TYPE, render_schedulers
from regard.serve.service import Service
from regard.version import __version__


def make_status_router(service: Service) -> APIRouter:
    """The routes for operators."""
    router = APIRouter(tags=["Status"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process runs."""
        return {"status": "ok", "version": __version__}

    @router.get("/ready", responses={503: {"description": "shutting down"}})
    async def ready() -> JSONResponse:
        """Whether requests are accepted; a folder that could not be reloaded is named, the old model is used."""
        status: dict[str, Any] = {"status": "ready", "models": service.registry.names}
        if service.registry.reload_errors:
            status["reload_errors"] = dict(service.registry.reload_errors)
        if service.is_stopping:
            return JSONResponse({**status, "status": "shutting down"}, 503)
        return JSONResponse(status)

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Metrics in the text format of Prometheus."""
        schedulers = [(model.name, model.scheduler) for model in service.registry.models]
        return PlainTextResponse(service.metrics.render() + render_schedulers(schedulers), media_type=CONTENT_TYPE)

    return router
