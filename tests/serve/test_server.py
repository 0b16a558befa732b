"""HTTP beyond valid requests: stalling, half-closed and ambiguous clients, exhausted descriptors, the page /docs."""

import contextlib
import json
import os
import resource
import socket
import urllib.request

import pytest

from regard.serve.server import HttpProtocol, ListeningSocket
from tests.serve.test_robustness import CONTINUE, LONG, connection, http, send_raw
from tests.serve.test_scheduler import wait_until
from tests.viewer.conftest import browser as browser  # a fixture


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while chunk := sock.recv(65536):
        received += chunk
    return received


def test_a_length_and_chunks_are_refused(server):
    body = b'{"texts": ["one"]}'
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    both = http("/api/translate", chunks, Content_Length=str(len(body)), Transfer_Encoding="chunked")
    response = send_raw(server, both)
    assert b" 400 " in response.splitlines()[0]
    assert b"Content-Length and Transfer-Encoding exclude each other." in response
    assert b" 200 " in send_raw(server, http("/api/translate", chunks, Transfer_Encoding="chunked")).splitlines()[0]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/docs", "/languages", "/nothing", "/translate"])
def test_head_is_get_without_a_body(server, path):
    head, get = (
        send_raw(server, b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % (m, path.encode())) for m in (b"HEAD", b"GET")
    )
    headers, _, body = head.partition(b"\r\n\r\n")
    assert body == b""

    def comparable(response: bytes) -> list[bytes]:
        lines = response.partition(b"\r\n\r\n")[0].splitlines()
        return [line for line in lines if not line.startswith((b"date", b"x-request-id"))]

    assert comparable(head) == comparable(get)
    assert b"content-length: 0" not in headers


def test_slow_headers_close_the_connection(server, monkeypatch):
    monkeypatch.setattr(HttpProtocol, "header_timeout", 0.2)
    with connection(server) as silent, connection(server) as slow, connection(server) as reused:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: 127")
        reused.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        response = b""
        while not response.endswith(b"}"):  # headers and content are sent separately
            response += reused.recv(65536)
        assert b"200 OK" in response
        reused.sendall(b"GET /health HTTP/1.1\r\nHost: 127")
        for sock in (silent, slow, reused):
            assert read_all(sock) == b""
    # A connection that waits between two requests, or for its response, is not closed.
    body = json.dumps({"model": "letters", "prompts": ["Un"] * 8, "options": LONG}).encode()
    with connection(server) as sock:
        sock.sendall(http("/api/generate", body, Content_Length=str(len(body)), Connection="close"))
        assert b"200 OK" in read_all(sock)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_half_closed_clients_get_their_response(server, version):
    body = json.dumps({"model": "letters", "prompts": ["Un"] * 8, "options": LONG}).encode()
    request = http("/api/generate", body, Content_Length=str(len(body))).replace(
        b"HTTP/1.1", f"HTTP/{version}".encode()
    )
    scheduler = next(model for model in server.service.registry.models if model.name == "letters").scheduler
    with connection(server) as sock:
        sock.sendall(request)
        wait_until(lambda: scheduler.outstanding > 0)
        sock.shutdown(socket.SHUT_WR)
        response = read_all(sock)
    response = response.removeprefix(CONTINUE) if version == "1.1" else response
    assert b" 200 " in response.splitlines()[0]
    assert len(json.loads(response.partition(b"\r\n\r\n")[2])["continuations"]) == 8


def test_half_closed_pipelines_and_incomplete_bodies(server):
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert send_raw(server, health * 3).count(b'{"status":"ok"') == 3
    assert send_raw(server, http("/api/generate", b"{", Content_Length="100")) == b""


def test_out_of_descriptors(server, caplog, monkeypatch):
    """Connections wait, one line is logged, and the server responds when there are descriptors again."""
    failures = []
    accept = ListeningSocket.accept

    def counting_accept(self):
        try:
            return accept(self)
        except BlockingIOError:
            raise
        except OSError as error:
            failures.append(error)
            raise

    monkeypatch.setattr(ListeningSocket, "accept", counting_accept)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as clients:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    clients.enter_context(connection(server))
            wait_until(lambda: len(failures) >= 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(failures) < 10
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["cannot accept connections"]
    assert server.request("/health")[0] == 200


def test_the_docs_page_needs_no_other_address(server, browser):
    """It describes every route and field, with scripts disabled and without a single further request."""
    context = browser.new_context()
    requests = []
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{server.url}/docs")
    text = page.inner_text("main")
    context.close()
    assert requests == [f"{server.url}/docs"]
    schema = server.request("/openapi.json")[1]
    for path, operations in schema["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in text
    for name in ("options.beam", "messages.content", "forced beginning of each translation"):
        assert name in text
    with urllib.request.urlopen(f"{server.url}/docs") as response:
        content = response.read().decode()
    assert "<script" not in content
    assert "http" not in content.replace("http-equiv", "")
    assert server.request("/redoc")[0] == 404


def test_redirects_never_repeat_a_host(server):
    response = send_raw(server, b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert b" 404 " in response.splitlines()[0]
    assert b"location" not in response.lower()
