"""Requests in front of the event loop: they start one by one, and those beyond the capacity are refused unparsed.

The schedulers know how long the work of the models takes. A short request costs more in the event loop (parsing,
validation, tokenization, the response) than in the model, and there it would wait unseen: in the buffers of sockets and
among the tasks of the loop. Here it is counted, and a refusal costs a small part of what a request costs.
"""

import asyncio
import re
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.serve.error_responses import exception_response
from regard.serve.errors import Overloaded
from regard.serve.scheduler import ThroughputMeter

if TYPE_CHECKING:
    from regard.serve.service import Service

# Connections of a server. Those beyond it are refused as soon as they are made.
MAX_CONNECTIONS = 1000
# Bytes of the body of a refused request that are read, so that its connection can be used again.
MAX_SKIPPED = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*\r\n")


class RequestQueue:
    """Requests that were received and wait for the event loop. Each iteration of the loop starts one of them.

    The loop reads from sockets once per iteration; so new requests are seen, and refused, between any two others.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._meter = ThroughputMeter()
        self._started: float | None = None
        """when the latest request started, until the next one may"""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def seconds_per_request(self) -> float:
        """Measured while requests start one after another; 0 before the first."""
        return self._meter.seconds_per_unit or 0.0

    async def wait_for_turn(self, limit: float) -> None:
        """Wait for the requests before this one; raises `Overloaded` if that took longer than `limit` seconds."""
        loop, arrival = asyncio.get_running_loop(), time.perf_counter()
        if self._started is not None:
            future = loop.create_future()
            self._waiting.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled():  # it was its turn already
                    self._start_next()
                raise
            self._note_start()
        self._started = time.perf_counter()
        loop.call_soon(self._start_next)
        if self._started - arrival > limit:
            raise Overloaded(len(self._waiting) * self.seconds_per_request)

    def _start_next(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._note_start()
        self._started = None

    def _note_start(self) -> None:
        """Another request starts, or could: the time since the last is what that cost, with all else in the loop."""
        assert self._started is not None
        self._meter.add(time.perf_counter() - self._started, 1)


class SheddingProtocol(H11Protocol):
    """A connection. At the capacity of the server, a simple request is refused without parsing it."""

    _skipped = 0
    """bytes of the body of a refused request that are still to come"""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(b"", 1, is_last=True)

    def data_received(self, data: bytes) -> None:
        if self._skipped:
            count = min(self._skipped, len(data))
            self._skipped, data = self._skipped - count, data[count:]
            if not data:
                return
        if data.startswith(b"POST ") and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # Tasks that have not reached the application wait too.
            excess = self._service.excess_seconds(len(self.tasks) - self._service.running)
            if excess and (head := head_of_simple_request(data)) is not None:
                self._skipped = head.missing
                self._refuse(data, Overloaded(excess).retry_after, is_last=head.is_last)
                return
        super().data_received(data)

    @property
    def _service(self) -> "Service":
        return self.config.app.state.service  # type: ignore[union-attr, no-any-return]

    def _refuse(self, data: bytes, retry_after: int, *, is_last: bool) -> None:
        self._service.metrics.observe("other", 429, 0.0)
        self.transport.write(_refusal(data.startswith(b"POST /v1/"), retry_after, is_last))
        if is_last or self.flow.write_paused:  # the client does not read its responses
            self.transport.close()
        else:
            self.on_response_complete()


class RequestHead(NamedTuple):
    """What the head of a request states about what follows."""

    missing: int
    """bytes of its body that have not arrived"""
    is_last: bool
    """whether the connection ends with it"""


def head_of_simple_request(data: bytes) -> RequestHead | None:
    """The head of a request, if nothing about it needs the parser; None also if more than one has arrived.

    Requests of pages have an Origin, and their responses need headers for it.

    >>> head_of_simple_request(b"POST / HTTP/1.1\\r\\nContent-Length: 3\\r\\n\\r\\n{}")
    RequestHead(missing=1, is_last=False)
    """
    end = data.find(b"\r\n\r\n")
    head = data[: end + 2].lower()
    lengths = _LENGTH.findall(head)
    if len(lengths) != 1 or head.count(b"content-length") > 1 or b" http/1.1\r\n" not in head:
        return None
    if any(name in head for name in (b"transfer-encoding", b"\r\norigin:", b"\r\nexpect:")):
        return None
    missing = end + 4 + int(lengths[0]) - len(data)
    if not 0 <= missing <= MAX_SKIPPED:
        return None
    return RequestHead(missing, b"\r\nconnection: close" in head)


@lru_cache
def _refusal(is_openai: bool, retry_after: int, is_last: bool) -> bytes:
    """The bytes of a response with status 429."""
    response = exception_response("/v1/" if is_openai else "/", Overloaded(retry_after))
    headers = [*response.raw_headers, *([(b"connection", b"close")] if is_last else [])]
    lines = [b"HTTP/1.1 429 Too Many Requests", *(name + b": " + value for name, value in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
