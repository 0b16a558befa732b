"""The live page: a small server on this machine, for this machine, whose page can ask the model again.

It listens on the loopback address. Other programs of this machine, and any page in the browser, can send requests there
too; so every request needs a token, which only the printed address holds, and a Host that is ours (a name of somebody
else's that leads here, which is DNS rebinding, is not). What changes anything, POST, must besides come from the page
itself, and be JSON. There are no headers that would let another page read an answer.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.viewer.page.html_page import live_page
from regard.viewer.page.text_requests import Answer, Desk
from regard.viewer.page.text_scene import Scene

LOOPBACK = "127.0.0.1"
# Bytes of a request at most, seconds that a silent connection is kept, answers whose blobs are kept.
LARGEST, PATIENCE, KEPT = 1 << 20, 60, 8
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the page's own, which cannot say this
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
JSON, HTML, BYTES = "application/json", "text/html; charset=utf-8", "application/octet-stream"

_LOG = logging.getLogger("regard")


class Live(ThreadingHTTPServer):
    """The server. It has its port when it is made, and answers while `serve_forever` runs.

    Under its address are: the page itself, `scene` (the newest, JSON), `blob/N` (bytes), `ask` (POST, JSON).
    """

    daemon_threads = True

    def __init__(self, desk: Desk, scene: Scene | None = None, port: int = 0) -> None:
        self.desk, self.token = desk, secrets.token_urlsafe(24)
        scene = scene or desk.blank()
        self.newest = Answer({"scene": scene.header}, scene.blobs)
        self.lock = Lock()
        self.kept: tuple[tuple[int, list[bytes]], ...] = ()
        self.count = 0
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise RegardError(
                f"The port {port} cannot be had: {error}.", "Choose another, or let one be found."
            ) from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """What a browser may call this server."""
        return f"{LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}"

    def ask(self, request: Any) -> dict[str, Any]:
        """What the model answers."""
        answer = self.desk.answer(request)
        if "scene" in answer.told:
            self.newest = answer
        return self.publish(answer)

    def publish(self, answer: Answer) -> dict[str, Any]:
        """An answer as JSON. Its blobs have numbers of their own, from "blobs" on: several pages may be open."""
        with self.lock:
            first = self.count
            self.count += len(answer.blobs)
            self.kept = (*self.kept, (first, answer.blobs))[-KEPT:]
        return {**answer.told, "blobs": first}

    def blob(self, number: int) -> bytes | None:
        found = (blobs[number - first] for first, blobs in self.kept if first <= number < first + len(blobs))
        return next(found, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that went away: nobody needs to know.
        _LOG.debug("a connection broke", exc_info=True)


class _Refused(Exception):
    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


class _Reply(NamedTuple):
    kind: str
    content: bytes


class _Handler(BaseHTTPRequestHandler):
    server: Live
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _get(self, place: str) -> _Reply:
        if place == "":
            return _Reply(HTML, live_page(self.server.newest.told["scene"]["title"]))
        self._need_own_page()
        if place == "scene":
            told = self.server.publish(self.server.newest)
            return _json({**told, "asks": self.server.desk.fields})
        if found := re.fullmatch(r"blob/([0-9]{1,12})", place):
            blob = self.server.blob(int(found[1]))
            if blob is None:
                raise _Refused(404, "These numbers are no longer kept. Load the page again.")
            return _Reply(BYTES, blob)
        raise _Refused(404, "There is nothing here. Use the address that was printed.")

    def _post(self, place: str) -> _Reply:
        self._need_own_page()
        if place != "ask":
            raise _Refused(404, "Nothing can be asked here. Ask under ask.")
        if self.headers.get_content_type() != JSON:
            raise _Refused(415, f"A request is JSON. Send it as {JSON}.")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch("[0-9]{1,12}", length):
            raise _Refused(411, "The request does not say how long it is. Send a Content-Length.")
        if int(length) > LARGEST:
            raise _Refused(413, f"The request has more than {LARGEST >> 20} MB. Ask for a shorter text.")
        content = self.rfile.read(int(length))
        try:
            request = json.loads(content)
        except (ValueError, RecursionError):
            raise _Refused(400, "The request is not JSON. Correct it.") from None
        return _json(self.server.ask(request))

    def _reply(self, do: Callable[[str], _Reply]) -> None:
        try:
            self._send(200, do(self._place()))
            return
        except _Refused as refused:
            status, says = refused.status, str(refused)
        except RegardError as error:
            status, says = 422, str(error)
        except ConnectionError:
            raise
        except Exception:
            _LOG.exception("The live page asked for what failed.")
            status, says = 500, "Something went wrong inside Regard. Its terminal says what."
        self._refuse(status, says)

    def _place(self) -> str:
        """What is asked for, if whoever asks may."""
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            raise _Refused(403, "This server answers under its own address alone. Use the one that was printed.")
        empty, _, rest = self.path.partition("?")[0].partition("/")
        token, slash, place = rest.partition("/")
        right = secrets.compare_digest(token.encode("latin-1"), self.server.token.encode())
        if empty or not slash or not right:
            raise _Refused(403, "The address lacks the right token. Use the one that was printed.")
        return place

    def _need_own_page(self) -> None:
        """Browsers say which page a request comes from; other programs, which have the token, say nothing."""
        origins = [f"http://{host}" for host in self.server.hosts]
        from_page = self.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")
        if not from_page or self.headers.get("Origin", origins[0]) not in origins:
            raise _Refused(403, "Another page sent this request. Use the page under the address that was printed.")

    def _send(self, status: int, reply: _Reply) -> None:
        self.send_response_only(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.content)

    def _refuse(self, status: int, says: str) -> None:
        """An error as JSON. What else the request holds is not read any more."""
        self.close_connection = True
        self._send(status, _json({"error": says}))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library finds wrong by itself."""
        self._refuse(code, "The request cannot be read. Send GET or POST, as browsers do.")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what people look at, and the token, stay out of logs."""


def _json(told: dict[str, Any]) -> _Reply:
    return _Reply(JSON, json.dumps(told, separators=(",", ":"), allow_nan=False).encode())
