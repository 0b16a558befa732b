"""The live page: a local HTTP server whose page sends requests to the model.

It listens on the loopback address. Other local programs, and any web page in the browser, can send requests there too;
therefore every request needs the token in the printed address and a Host header of this server (which stops DNS
rebinding). POST requests must also be JSON and come from the page itself. No CORS headers are sent, so other pages
cannot read a response. Only `/open` needs no token: it returns no data, and opens the page in the user's own browser.
"""

import errno
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.viewer.page.html import render_live_page
from regard.viewer.page.request_checks import JSON, RefusedRequest, check_content_type, check_host, check_origin
from regard.viewer.page.requests import Response, TextRequestHandler
from regard.viewer.page.text_scene import Scene

LOOPBACK = "127.0.0.1"
# Bytes per request, seconds until an idle connection is closed, responses whose blobs are kept.
MAX_REQUEST_BYTES, IDLE_TIMEOUT, KEPT_RESPONSES = 1 << 20, 60, 8
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # not supported in the page's meta tag
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
HTML, TEXT, BYTES = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/octet-stream"
OPEN = "/open"
# Seconds after which a connection is accepted again that no file descriptor was left for.
PAUSE = 0.5

_LOG = logging.getLogger("regard")


class LiveServer(ThreadingHTTPServer):
    """The server of a live page. The constructor binds the port; `serve_forever` responds to requests.

    Paths: the page itself, `scene` (the initial scene, JSON), `blob/N` (bytes), `request` (requests: POST, JSON).
    Only `/open`, to which a page links whose server was restarted, needs no token.
    """

    daemon_threads = True
    open_browser: Callable[[str], Any] | None = None
    """opens an address in the browser of the user, if there is a display"""

    def __init__(self, handler: TextRequestHandler, scene: Scene | None = None, port: int = 0) -> None:
        self.handler, self.token = handler, secrets.token_urlsafe(24)
        scene = scene or handler.initial_scene()
        self.initial = Response({"scene": scene.header}, scene.blobs)
        self.lock = Lock()
        self.kept: tuple[tuple[int, list[bytes]], ...] = ()
        """first index and blobs of recent responses"""
        self.blob_count = 0
        self.is_exhausted = False
        """whether the last connection found no file descriptor"""
        try:
            super().__init__((LOOPBACK, port), _HttpHandler)
        except (OSError, OverflowError) as error:
            raise RegardError(
                f"The port {port} is not available: {error}.", "Choose another port, or leave it out."
            ) from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """Accepted values of the Host header."""
        return f"{LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}"

    def respond(self, request: Any) -> dict[str, Any]:
        """Handle a request of the page; returns the response as JSON."""
        return self.publish(self.handler.handle(request))

    def publish(self, response: Response) -> dict[str, Any]:
        """Keep the blobs of a response and return its JSON. Blob indices are unique: several pages may be open."""
        with self.lock:
            first = self.blob_count
            self.blob_count += len(response.blobs)
            self.kept = (*self.kept, (first, response.blobs))[-KEPT_RESPONSES:]
        return {**response.header, "blobs": first}

    def blob(self, index: int) -> bytes | None:
        matches = (blobs[index - first] for first, blobs in self.kept if first <= index < first + len(blobs))
        return next(matches, None)

    def get_request(self) -> Any:
        try:
            accepted = super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                if not self.is_exhausted:
                    _LOG.warning("The live page cannot accept a connection (%s); it tries again.", error.strerror)
                self.is_exhausted = True
                time.sleep(PAUSE)  # the connection waits: the server would try again at once
            raise
        self.is_exhausted = False
        return accepted

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("connection closed by the browser", exc_info=True)


class _HttpResponse(NamedTuple):
    content_type: str
    content: bytes


class _HttpHandler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT
    disable_nagle_algorithm = True  # headers and content are written separately: the second would wait for 40 ms

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def _open(self) -> _HttpResponse:
        """Open the page, with its token, in the browser of the user: who follows the link does not get the address."""
        self._require_own_page()
        if self.server.open_browser is None:
            return _HttpResponse(TEXT, b"The address has a new token. Open the address that the server printed.")
        self.server.open_browser(self.server.address)
        return _HttpResponse(TEXT, b"The live page opens in a new tab. This tab can be closed.")

    def _get(self, path: str) -> _HttpResponse:
        if path == "":
            return _HttpResponse(HTML, render_live_page(self.server.initial.header["scene"]["title"]))
        self._require_own_page()
        if path == "scene":
            header = self.server.publish(self.server.initial)
            return _json({**header, "fields": self.server.handler.fields})
        if match := re.fullmatch(r"blob/([0-9]{1,12})", path):
            blob = self.server.blob(int(match[1]))
            if blob is None:
                raise RefusedRequest(404, "This data is no longer available. Reload the page.")
            return _HttpResponse(BYTES, blob)
        raise RefusedRequest(404, "Unknown path. Use the printed address.")

    def _post(self, path: str) -> _HttpResponse:
        self._require_own_page()
        if path != "request":
            raise RefusedRequest(404, "Unknown path. Send requests to the path request.")
        check_content_type(self.headers.get("Content-Type"))
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch("[0-9]{1,12}", length):
            raise RefusedRequest(411, "The length of the request is missing or invalid. Send a Content-Length.")
        if int(length) > MAX_REQUEST_BYTES:
            raise RefusedRequest(413, f"The request has more than {MAX_REQUEST_BYTES >> 20} MB. Send a shorter text.")
        content = self.rfile.read(int(length))
        try:
            request = json.loads(content)
        except (ValueError, RecursionError):
            raise RefusedRequest(400, "The request is not valid JSON. Fix its syntax.") from None
        return _json(self.server.respond(request))

    def _respond(self, handle: Callable[[str], _HttpResponse]) -> None:
        try:
            check_host(self.headers.get_all("Host", []), self.server.hosts.__contains__)
            is_open = self.command == "GET" and self.path == OPEN
            self._send(200, self._open() if is_open else handle(self._checked_path()))
            return
        except RefusedRequest as error:
            status, message = error.status, str(error)
        except RegardError as error:
            status, message = 422, str(error)
        except ConnectionError:
            raise
        except Exception:
            _LOG.exception("A request of the live page failed.")
            status, message = 500, "Internal error in Regard. See its terminal for details."
        self._send_failure(status, message)

    def _checked_path(self) -> str:
        """The path after the token; raises an error for a wrong token."""
        empty, _, rest = self.path.partition("?")[0].partition("/")
        token, slash, path = rest.partition("/")
        is_valid = secrets.compare_digest(token.encode("latin-1"), self.server.token.encode())
        if empty or not slash or not is_valid:
            raise RefusedRequest(403, "The token is missing or invalid. Use the printed address.")
        return path

    def _require_own_page(self) -> None:
        """Refuse requests of other web pages. Programs that are not browsers send no origin; they need the token."""
        own = f"http://{self.headers['Host']}"
        check_origin(self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site"), own)

    def _send(self, status: int, response: _HttpResponse) -> None:
        self.send_response_only(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(response.content)

    def _send_failure(self, status: int, message: str) -> None:
        """Send an error as JSON and close the connection: the rest of the request is not read."""
        self.close_connection = True
        self._send(status, _json({"error": message}))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors that http.server detects itself."""
        self._send_failure(code, "The request is malformed or its method unsupported. Use GET or POST.")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: texts and the token are private."""


def _json(value: dict[str, Any]) -> _HttpResponse:
    return _HttpResponse(JSON, json.dumps(value, separators=(",", ":"), allow_nan=False).encode())
