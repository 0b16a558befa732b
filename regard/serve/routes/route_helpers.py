"""What routes share: the model and the time limit of a request, and server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from regard.serve.model_registry import ServedModel
from regard.serve.routes.error_responses import exception_response
from regard.serve.service import Service


def find_model(service: Service, request: Request, name: str | None, task: str) -> tuple[ServedModel, float]:
    """The model of a request, noted for the log, and the time limit of the request."""
    model = service.registry.find(name, task)
    request.scope["state"]["model"] = model.name
    return model, service.limits.request_timeout(request.headers.get("x-request-timeout"))


async def event_stream(request: Request, events: AsyncIterator[Any]) -> StreamingResponse:
    """Server-sent events. Errors before the first event are errors of the request; later ones are events."""
    first = await anext(events, None)

    async def lines() -> AsyncIterator[str]:
        try:
            if first is not None:
                yield _event(first)
            async for event in events:
                yield _event(event)
        except Exception as error:
            yield f"data: {bytes(exception_response(request.scope['path'], error).body).decode()}\n\n"
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
