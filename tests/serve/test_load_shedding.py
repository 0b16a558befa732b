"""Overload with requests that cost more in the event loop than in the model; keep-alive without delays."""

import asyncio
import itertools
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from regard.serve import load_shedding
from regard.serve.errors import Overloaded
from regard.serve.load_shedding import RequestQueue
from regard.serve.registry import ModelRegistry
from regard.serve.routes import native
from regard.serve.server import HttpProtocol
from tests.serve.conftest import run_in_thread
from tests.serve.test_request_source import post
from tests.serve.test_robustness import connection, send_raw
from tests.serve.test_scheduler import wait_until

BODY = json.dumps({"texts": ["one"]}).encode()


def request(path: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
    return head.encode() + b"\r\n\r\n" + BODY


def read_response(sock: socket.socket) -> bytes:
    response = b""
    while True:
        head, separator, body = response.partition(b"\r\n\r\n")
        if separator and len(body) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            return response
        response += sock.recv(65536)


@pytest.fixture
def busy(folders):
    """A server whose latency target is short."""
    registry = ModelRegistry([folders["numbers"]], device="cpu", latency_target=0.05, workers=1)
    with run_in_thread(registry) as server:
        yield server


def test_responses_are_not_delayed(server, monkeypatch):
    """Without TCP_NODELAY, a response on a connection that stays open waits for 40 ms."""
    options = []
    made = HttpProtocol.connection_made

    def connection_made(self, transport):
        made(self, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    assert server.request("/health")[0] == 200
    assert options == [1]


def test_requests_start_one_per_iteration_in_order():
    async def run() -> None:
        queue, order = RequestQueue(), []

        async def request(number: int) -> None:
            await queue.wait_for_turn(10)
            order.append(number)

        tasks = [asyncio.ensure_future(request(i)) for i in range(5)]
        await asyncio.sleep(0)
        assert order == [0]
        assert len(queue) == 4
        tasks[2].cancel()
        counts = []
        while len(queue) or order[-1] != 4:
            await asyncio.sleep(0)
            counts.append(len(order))
        assert all(after - before <= 1 for before, after in itertools.pairwise(counts))
        assert order == [0, 1, 3, 4]
        assert queue.seconds_per_request > 0
        # One that is cancelled at its turn passes it on.
        tasks = [asyncio.ensure_future(request(i)) for i in (5, 6, 7)]
        while len(queue) != 1:
            await asyncio.sleep(0)
        tasks[1].cancel()
        await tasks[2]
        assert order[-2:] == [5, 7]
        # One that waited too long is refused, and those behind it start.
        late = [asyncio.ensure_future(queue.wait_for_turn(limit)) for limit in (10, -1, 10)]
        results = await asyncio.gather(*late, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), Overloaded, type(None)]

    asyncio.run(run())


def test_requests_beyond_the_capacity_are_refused_unparsed(busy, monkeypatch):
    """While requests wait for the event loop, others are refused; health and the connection stay."""
    parsed = []
    handle_events = HttpProtocol.handle_events
    monkeypatch.setattr(HttpProtocol, "handle_events", lambda self: (parsed.append(1), handle_events(self))[1])
    monkeypatch.setattr(RequestQueue, "__len__", lambda self: 100)
    monkeypatch.setattr(RequestQueue, "seconds_per_request", 0.03)
    whole = {path: request(path) for path in ("/api/translate", "/v1/completions", "/api/translate")}
    with connection(busy) as sock:
        for path, content in whole.items():
            # The body may arrive after the response to the headers.
            for parts in (
                (content,),
                (content[: -len(BODY)], BODY),
                (content[:-5], content[-5:-2], content[-2:]),
            ):
                for part in parts:
                    sock.sendall(part)
                response = read_response(sock)
                assert response.startswith(b"HTTP/1.1 429 ")
                assert b"\r\nretry-after: 3\r\n" in response
                error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
                message = error["message"] if path.startswith("/v1") else error
                assert message == "The server is at its capacity. Retry after 3 s."
        assert not parsed
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in read_response(sock).splitlines()[0]
        assert parsed
    # What is not a whole simple request is refused by the application: chunks, requests of pages, a missing body.
    chunks = b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks += b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert b" 429 " in send_raw(busy, chunks).splitlines()[0]
    assert post(busy, Origin="http://localhost")[0] == 429
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9"
    with connection(busy) as slow:
        slow.sendall(head + b"\r\n\r\n")
        assert b" 429 " in slow.recv(1000).splitlines()[0]
    assert 'status="429"' in busy.request("/metrics")[1]


def test_requests_are_refused_at_once_when_the_event_loop_is_the_bottleneck(busy, monkeypatch):
    """Model work is negligible; each request takes 20 ms in the event loop, and 40 arrive at the same time."""
    find_model = native.find_model

    def slow_find_model(*arguments):
        time.sleep(0.02)
        return find_model(*arguments)

    monkeypatch.setattr(native, "find_model", slow_find_model)
    statuses = [post(busy, "/api/translate", BODY)[0] for _ in range(5)]  # measures the throughput
    assert statuses == [200] * 5
    with ThreadPoolExecutor(40) as pool:
        statuses = list(pool.map(lambda _: post(busy, "/api/translate", BODY)[0], range(40)))
    assert {*statuses} == {200, 429}
    wait_until(lambda: len(busy.service.queue) == 0)
    assert post(busy, "/api/translate", BODY)[0] == 200


def test_connections_are_bounded(busy, monkeypatch):
    monkeypatch.setattr(load_shedding, "MAX_CONNECTIONS", 2)
    first, second = connection(busy), connection(busy)
    with first, second:
        wait_until(lambda: b" 429 " in read_first(busy))
    wait_until(lambda: busy.request("/health")[0] == 200)


def read_first(server) -> bytes:
    with connection(server) as sock:
        sock.settimeout(0.2)
        try:
            return sock.recv(1000)
        except TimeoutError:
            return b""
