"""The HTTP server: uvicorn, which ends gracefully on SIGTERM and SIGINT."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI

from regard.errors import RegardError
from regard.serve.http_protocol import HttpProtocol, ListeningSocket, handle_loop_error
from regard.serve.scheduling.scheduler import SWITCH_INTERVAL
from regard.serve.service import Service

logger = logging.getLogger("regard.serve")


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
