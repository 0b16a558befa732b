"""The FastAPI application of a server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from regard.serve.authentication import Authentication
from regard.serve.error_responses import add_error_handlers
from regard.serve.limits import ServeLimits
from regard.serve.registry import ModelRegistry
from regard.serve.request_guard import RequestGuard
from regard.serve.routes.libretranslate import make_libretranslate_router
from regard.serve.routes.native import make_native_router
from regard.serve.routes.openai import make_openai_router
from regard.serve.routes.pages import make_docs_router, make_page_router
from regard.serve.routes.status import make_status_router
from regard.serve.service import Service
from regard.version import __version__

_DESCRIPTION = "Models of Regard with the APIs of OpenAI (/v1) and LibreTranslate, and native routes (/api)."


def make_application(
    registry: ModelRegistry,
    *,
    limits: ServeLimits | None = None,
    tokens: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """An ASGI application that serves the models of a registry. The registry is closed with the application.

    >>> app = make_application(ModelRegistry(["model"]))  # doctest: +SKIP
    """
    service = Service(registry, limits or ServeLimits(), Authentication(tokens))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        registry.close(timeout=service.limits.timeout)

    app = FastAPI(
        title="Regard",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for make in (
        make_openai_router,
        make_libretranslate_router,
        make_native_router,
        make_status_router,
        make_page_router,
        make_docs_router,
    ):
        app.include_router(make(service))
    add_error_handlers(app)
    app.add_middleware(RequestGuard, service=service, trusted_origins=allowed_origins)
    if allowed_origins:
        headers = ["Authorization", "Content-Type", "X-Request-Timeout"]
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["GET", "POST"], allow_headers=headers
        )
    return app
