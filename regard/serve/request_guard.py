"""ASGI middleware around all routes: source, size and time of requests, load, tokens, disconnects, metrics and logs."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi.responses import Response

from regard.serve.authentication import is_loopback
from regard.serve.error_responses import error_response, exception_response
from regard.serve.errors import Overloaded, RequestError
from regard.serve.service import Service
from regard.viewer.page.request_checks import FORM, JSON, RefusedRequest, check_content_type, check_host, check_origin

logger = logging.getLogger("regard.serve")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Paths without a token: the pages ask for it or need none, and LibreTranslate's clients send it in the body.
PUBLIC_PATHS = ("/", "/docs", "/health", "/ready")
API_KEY_PATHS = ("/translate", "/detect", "/languages")
FORM_PATHS = ("/translate", "/detect")
# The bodies of all requests together, as a multiple of the largest one.
MAX_BODIES = 32
_WRONG_TOKEN = "The token is missing or wrong. Send the header: Authorization: Bearer TOKEN"


class RequestGuard:
    """Reads the whole request within limits, runs the application, and cancels it when the client leaves."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], service: Service, trusted_origins: Sequence[str] = ()
    ) -> None:
        self.app, self.service, self.trusted_origins = app, service, trusted_origins
        self._trusted_hosts = [origin.partition("://")[2] for origin in trusted_origins]
        self._body_bytes = 0
        """of all requests"""

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
        body = bytearray()
        self.service.running += 1
        try:
            self._check_source(scope, path)
            self._check_token(scope, path)
            if scope["method"] == "POST" and (excess := self.service.excess_seconds()):
                raise Overloaded(excess)
            if await self._read_body(scope, receive, body):
                if scope["method"] == "POST":
                    await self.service.queue.wait_for_turn(self.service.registry.latency_target)
                await self._run(scope, bytes(body), receive, send_and_note)
        except RefusedRequest as refusal:
            response = error_response(path, refusal.status, str(refusal))
            if refusal.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await self._refuse(scope, receive, send_and_note, response)
        except RequestError as error:
            await self._refuse(scope, receive, send_and_note, exception_response(path, error))
        finally:
            self.service.running -= 1
            self._body_bytes -= len(body)
            seconds = time.perf_counter() - start
            route = scope.get("route")
            pattern = getattr(route, "path", "other")
            self.service.metrics.observe(pattern, status, seconds)
            fields = {"method": method, "path": pattern, "status": status, "seconds": round(seconds, 4)}
            model = scope["state"].get("model")
            extra = {**fields, "request": request_id, **({"model": model} if model else {})}
            logger.info("request", extra={"fields": extra})

    def _check_source(self, scope: Any, path: str) -> None:
        """Refuse requests that pages of other sites send to a server on the loopback address."""
        hosts = _headers(scope, b"host")
        if is_loopback((scope.get("server") or ("",))[0]):
            check_host(hosts, lambda host: is_loopback(_without_port(host)) or host in self._trusted_hosts)
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):  # a link may lead here; other pages cannot read the response
            return
        own = f"{scope.get('scheme', 'http')}://{hosts[0] if hosts else ''}"
        check_origin(_header(scope, b"origin"), _header(scope, b"sec-fetch-site"), own, self.trusted_origins)
        check_content_type(_header(scope, b"content-type"), (JSON, FORM) if path in FORM_PATHS else (JSON,))

    def _check_token(self, scope: Any, path: str) -> None:
        if path in PUBLIC_PATHS or path in API_KEY_PATHS:
            return
        if not self.service.authentication.accepts(_header(scope, b"authorization")):
            raise RefusedRequest(401, _WRONG_TOKEN)

    async def _read_body(self, scope: Any, receive: Receive, body: bytearray) -> bool:
        """Read the body of a request; False if the client left."""
        limits = self.service.limits
        too_large = f"The request has more than {limits.max_body_bytes} bytes. Send a smaller one."
        length = _header(scope, b"content-length")
        if length is not None and _header(scope, b"transfer-encoding") is not None:
            # Servers that differ about the end of such a request can be made to take its rest for another one.
            raise RefusedRequest(400, "Content-Length and Transfer-Encoding exclude each other. Send one of them.")
        length = length or "0"
        if not length.isdecimal():
            raise RefusedRequest(400, "The header Content-Length is invalid. Send the number of bytes.")
        if int(length) > limits.max_body_bytes:
            raise RefusedRequest(413, too_large)
        try:
            async with asyncio.timeout(limits.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    chunk = message.get("body", b"")
                    body += chunk
                    self._body_bytes += len(chunk)
                    if len(body) > limits.max_body_bytes:
                        raise RefusedRequest(413, too_large)
                    if self._body_bytes > MAX_BODIES * limits.max_body_bytes:
                        raise Overloaded(1)
                    if not message.get("more_body", False):
                        limits.check_values(body)
                        return True
        except TimeoutError:
            seconds = limits.receive_timeout
            raise RefusedRequest(408, f"The request did not arrive within {seconds:g} s. Send it faster.") from None

    async def _run(self, scope: Any, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application; cancel it if the client leaves first."""
        work, is_sent, has_left = asyncio.current_task(), False, asyncio.Event()
        assert work is not None

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
            work.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await self.app(scope, replay, send)
        except asyncio.CancelledError:
            if not has_left.is_set() or work.cancelling() > 1:  # the server cancels it
                raise
        finally:
            watcher.cancel()
            if has_left.is_set():
                work.uncancel()

    async def _refuse(self, scope: Any, receive: Receive, send: Send, response: Response) -> None:
        response.headers["Connection"] = "close"  # the rest of the request is not read
        await response(scope, receive, send)


def _headers(scope: Any, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _header(scope: Any, name: bytes) -> str | None:
    return next(iter(_headers(scope, name)), None)


def _without_port(host: str) -> str:
    """The name or address in a Host header.

    >>> _without_port("localhost:8000"), _without_port("[::1]:8000")
    ('localhost', '::1')
    """
    name = host[: host.rfind(":")] if re.search(r":[0-9]*$", host) and not host.endswith("]") else host
    return name.removeprefix("[").removesuffix("]")
