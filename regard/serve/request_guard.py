"""ASGI middleware around all routes: size and time limits of requests, tokens, disconnects, metrics and logs."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import Response

from regard.serve.routes.error_responses import error_response, exception_response
from regard.serve.serve_errors import ShuttingDown
from regard.serve.service import Service

logger = logging.getLogger("regard.serve")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Paths without a token: the pages ask for it or need none, and LibreTranslate's clients send it in the body.
PUBLIC_PATHS = ("/", "/docs", "/health", "/ready")
API_KEY_PATHS = ("/translate", "/detect", "/languages")
_WRONG_TOKEN = "The token is missing or wrong. Send the header: Authorization: Bearer TOKEN"


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestGuard:
    """Reads the whole request within limits, runs the application, and cancels it when the client leaves."""

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, start, status = scope["path"], time.perf_counter(), 499  # 499: the client left
        method = scope["method"]
        # The response to HEAD is that to GET, without its body.
        scope = {**scope, "method": "GET" if method == "HEAD" else method, "state": scope.get("state", {})}

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if method == "HEAD" and "body" in message:
                message = {**message, "body": b""}
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        request_id = uuid.uuid4().hex
        try:
            self._check_token(scope, path)
            body = await self._read_body(scope, receive)
            if body is not None:
                await self._run(scope, body, receive, send_and_note)
        except _Refused as refusal:
            response = error_response(path, refusal.status, str(refusal))
            if refusal.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await self._refuse(scope, receive, send_and_note, response)
        except ShuttingDown as error:
            await self._refuse(scope, receive, send_and_note, exception_response(path, error))
        finally:
            seconds = time.perf_counter() - start
            route = scope.get("route")
            pattern = getattr(route, "path", "other")
            self.service.metrics.observe(pattern, status, seconds)
            fields = {"method": method, "path": pattern, "status": status, "seconds": round(seconds, 4)}
            model = scope["state"].get("model")
            extra = {**fields, "request": request_id, **({"model": model} if model else {})}
            logger.info("request", extra={"fields": extra})

    def _check_token(self, scope: Any, path: str) -> None:
        if path in PUBLIC_PATHS or path in API_KEY_PATHS:
            return
        if not self.service.authentication.accepts(_header(scope, b"authorization")):
            raise _Refused(401, _WRONG_TOKEN)

    async def _read_body(self, scope: Any, receive: Receive) -> bytes | None:
        """The body of a request; None if the client left."""
        limits = self.service.limits
        too_large = f"The request has more than {limits.max_body_bytes} bytes. Send a smaller one."
        length = _header(scope, b"content-length")
        if length is not None and _header(scope, b"transfer-encoding") is not None:
            # Servers that differ about the end of such a request can be made to take its rest for another one.
            raise _Refused(400, "Content-Length and Transfer-Encoding exclude each other. Send one of them.")
        length = length or "0"
        if not length.isdecimal():
            raise _Refused(400, "The header Content-Length is invalid. Send the number of bytes.")
        if int(length) > limits.max_body_bytes:
            raise _Refused(413, too_large)
        chunks, size = [], 0
        try:
            async with asyncio.timeout(limits.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limits.max_body_bytes:
                        raise _Refused(413, too_large)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            seconds = limits.receive_timeout
            raise _Refused(408, f"The request did not arrive within {seconds:g} s. Send it faster.") from None

    async def _run(self, scope: Any, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application; cancel it if the client leaves first."""
        is_sent, has_left = False, asyncio.Event()

        async def replay() -> Message:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left.set()

        work = asyncio.ensure_future(self.app(scope, replay, send))
        watcher = asyncio.ensure_future(watch())
        try:
            await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled() and (error := work.exception()) is not None:
                raise error
        finally:
            watcher.cancel()
            work.cancel()

    async def _refuse(self, scope: Any, receive: Receive, send: Send, response: Response) -> None:
        response.headers["Connection"] = "close"  # the rest of the request is not read
        await response(scope, receive, send)


def _header(scope: Any, name: bytes) -> str | None:
    value = next((value for key, value in scope["headers"] if key == name), None)
    return None if value is None else value.decode("latin-1")
