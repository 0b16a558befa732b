"""What routes share: the model and the time limit of a request, long JSON, and server-sent events."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from regard.serve.error_responses import exception_response
from regard.serve.registry import ServedModel
from regard.serve.service import Service


def find_model(service: Service, request: Request, name: str | None, task: str) -> tuple[ServedModel, float]:
    """The model of a request, noted for the log, and the time limit of the request."""
    model = service.registry.find(name, task)
    request.scope["state"]["model"] = model.name
    return model, service.limits.request_timeout(request.headers.get("x-request-timeout"))


# Characters of a response that are written in the event loop, and values of a piece of JSON.
_INLINE_CHARACTERS = 1 << 15
_PIECE = 1000


async def json_response(content: Any) -> Response:
    """A response with JSON, in which lists may be arrays. Long ones are written in another thread.

    They are written in pieces: the interpreter runs nothing else while a piece is written, in any thread.
    """
    rest, written, size = json_pieces(content), [], 0
    for piece in rest:
        written.append(piece)
        size += len(piece)
        if size > _INLINE_CHARACTERS:
            written.append(await asyncio.to_thread("".join, rest))
            break
    return Response("".join(written).encode(), media_type="application/json")


def json_pieces(value: Any) -> Iterator[str]:
    """The JSON of a value in pieces of bounded size; lists may be arrays.

    >>> "".join(json_pieces({"a": np.ones((2, 2)), "b": [[1, 2], ["x"]], "c": None}))
    '{"a":[[1.0,1.0],[1.0,1.0]],"b":[[1,2],["x"]],"c":null}'
    """
    if isinstance(value, dict):
        for i, (key, entry) in enumerate(value.items()):
            yield f"{',' if i else '{'}{json.dumps(key)}:"
            yield from json_pieces(entry)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple | np.ndarray) and len(value):
        is_flat = value.ndim == 1 if isinstance(value, np.ndarray) else not any(map(_is_nested, value))
        step = _PIECE if is_flat else 1
        for start in range(0, len(value), step):
            yield "," if start else "["
            if is_flat:
                part = value[start : start + step]
                yield _dump(part.tolist() if isinstance(part, np.ndarray) else list(part))[1:-1]
            else:
                yield from json_pieces(value[start])
        yield "]"
    else:
        yield _dump(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | np.ndarray)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # JSON has no infinite numbers
        is_finite = lambda value: not isinstance(value, float) or math.isfinite(value)  # noqa: E731
        return _dump([item if is_finite(item) else None for item in value] if isinstance(value, list) else None)


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
    return f"data: {_dump(value)}\n\n"
