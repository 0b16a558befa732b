"""The HTTP server: uvicorn, its graceful end, its JSON log, and clients that stall or half-close."""

import asyncio
import errno
import gc
import json
import logging
import signal
import socket
import sys
import time
from asyncio import BaseTransport, TimerHandle
from typing import Any, TextIO

import h11
import uvicorn
from fastapi import FastAPI

from regard.errors import RegardError
from regard.serve.load_shedding import SheddingProtocol
from regard.serve.scheduler import SWITCH_INTERVAL
from regard.serve.service import Service

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


class HttpServer(uvicorn.Server):
    """A server that is not ready any more from the first signal on; accepted requests are finished.

    >>> server = HttpServer(make_application(ModelRegistry(["model"])), port=0)  # doctest: +SKIP
    >>> server.run(sockets=[server.bind()])  # doctest: +SKIP
    """

    def __init__(self, app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
        service: Service = app.state.service
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(service.limits.timeout) + 5,
            ws="none",
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)

    def bind(self) -> ListeningSocket:
        """The socket to listen on."""
        host, port = self.config.host, self.config.port
        # asyncio sets TCP_NODELAY only on connections of a socket that names its protocol. Without it, a response on
        # a connection that stays open waits for 40 ms.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        except (OSError, OverflowError) as error:
            sock.close()
            reason = getattr(error, "strerror", None) or str(error)
            message = f"The address {host}:{port} is not available: {reason}."
            raise RegardError(message, "Choose another --host or --port.") from None
        return sock

    def handle_exit(self, sig: int, frame: Any) -> None:
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        if not service.is_stopping:
            service.is_stopping = True
            logger.info("shutting down", extra={"fields": {"signal": signal.Signals(sig).name}})
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(handle_loop_error)
        await super().startup(sockets)
        if self.started and sockets:
            address, port = sockets[0].getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            models = self.config.app.state.service.registry.names  # type: ignore[union-attr]
            logger.info("listening", extra={"fields": {"url": f"http://{shown}:{port}", "models": models}})


def run_server(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve an application until SIGTERM or SIGINT; then finish what was accepted.

    >>> run_server(make_application(ModelRegistry(["model"])))  # doctest: +SKIP
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # what is loaded now stays: looking for garbage among it takes long, and everything waits
    server = HttpServer(app, host, port)
    sock = server.bind()
    # uvicorn raises a signal again when it has shut down: it has been handled by then.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, event, and the fields of the record.

    >>> record = logging.LogRecord("regard.serve", logging.INFO, "", 0, "request", None, None)
    >>> record.fields = {"status": 200}
    >>> json.loads(JsonFormatter().format(record))["status"]
    200
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_json_log(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Write the logs of Regard and of uvicorn as JSON, to stderr by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("regard", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], False
        logger.setLevel(level)
    logging.getLogger("regard").addHandler(handler)
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("uvicorn.error").propagate = True
