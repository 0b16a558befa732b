"""The HTTP protocol of the server: uvicorn's, with clients that stall, half-close or exhaust the file descriptors."""

import errno
import logging
import socket
import time
from asyncio import BaseTransport, TimerHandle
from typing import Any

import h11

from regard.serve.load_shedding import SheddingProtocol

logger = logging.getLogger("regard.serve")

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# asyncio accepts no connection for a second after one of these errors; then it tries again.
_PAUSE_SECONDS = 0.9
_LOG_SECONDS = 60.0


class HttpProtocol(SheddingProtocol):
    """A connection. It is closed if headers take too long; a client that half-closes it gets its response."""

    header_timeout = 10.0
    """seconds in which the headers of a request must arrive"""
    check_interval = 0.05
    """seconds between checks whether a client that half-closed its connection is still there"""

    _header_timer: TimerHandle | None = None
    _is_half_closed = False

    def connection_made(self, transport: BaseTransport) -> None:  # type: ignore[override]
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_header_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: while the response to a complete request is missing."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self.loop.call_later(self.check_interval, self._probe_client)
        return True

    def on_response_complete(self) -> None:
        self._stop_header_timer()
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self.transport.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _probe_client(self) -> None:
        """Find out whether a client closed the whole connection: that looks the same, until it is sent something."""
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            # All clients accept this response before the final one (RFC 9110, section 15.2).
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self._check_client()

    def _check_client(self) -> None:
        """Stop the work of a client that left; asyncio reads no more from the connection, so it does not notice."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(self.check_interval, self._check_client)


class ListeningSocket(socket.socket):
    """A listening socket that accepts nothing for a second, and logs one line, if descriptors run out.

    asyncio alone would try again, and log, once per place in the queue of connections.
    """

    _paused_until = 0.0
    _silent_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        now = time.monotonic()
        if now < self._paused_until:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._paused_until = now + _PAUSE_SECONDS
                if now >= self._silent_until:
                    self._silent_until = now + _LOG_SECONDS
                    fields = {"error": error.strerror, "hint": "Raise the limit of open files: ulimit -n"}
                    logger.error("cannot accept connections", extra={"fields": fields})
            raise


def handle_loop_error(loop: Any, context: dict[str, Any]) -> None:
    """Log errors of the event loop, except those that a `ListeningSocket` logged."""
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS and "socket" in context):
        loop.default_exception_handler(context)
