"""Hostile and unlucky clients: nothing crashes, nothing accepted is lost, and memory stays flat."""

import contextlib
import gc
import json
import random
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from regard.decode import Shortlist
from regard.pipelines import load, save
from regard.serve.limits import ServeLimits
from regard.serve.registry import ModelRegistry
from tests.serve.conftest import run_in_thread
from tests.serve.test_scheduler import wait_until

TOKEN = "0123456789abcdef"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""what a client that half-closed its connection may receive before the response"""
LONG = {"method": "greedy", "min_len": 250, "max_len": 256}


def connection(server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port))


def send_raw(server, content: bytes) -> bytes:
    """What the server sends back for these bytes, until it closes the connection."""
    with connection(server) as sock:
        received = b""
        with contextlib.suppress(OSError):
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                received += chunk
        return received.removeprefix(CONTINUE)


def http(path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture(scope="module")
def guarded(folders):
    """A server with a token and small requests."""
    limits = ServeLimits(max_body_bytes=10_000)
    registry = ModelRegistry([folders["numbers"]], device="cpu", latency_target=30)
    with run_in_thread(registry, limits=limits, tokens=[TOKEN], allowed_origins=["https://page.example"]) as running:
        yield running


def test_tokens(guarded):
    body = {"texts": ["one"]}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
        status, content = guarded.request("/api/translate", body, **headers)
        assert (status, "The token is missing or wrong." in content["error"]) == (401, True)
    assert guarded.request("/api/translate", body, authorization=f"Bearer {TOKEN}")[0] == 200
    assert guarded.request("/v1/models")[0] == 401
    assert guarded.request("/metrics")[0] == 401
    assert guarded.request("/health")[0] == 200
    libretranslate = {"q": "one", "source": "en", "target": "fr"}
    assert guarded.request("/translate", libretranslate)[0] == 403
    assert guarded.request("/translate", libretranslate | {"api_key": "wrong"})[0] == 403
    assert guarded.request("/translate", libretranslate | {"api_key": TOKEN})[0] == 200
    for key in ("\ud800", "\0", "é", 3, ["a"], TOKEN * 100):
        assert guarded.request("/translate", libretranslate | {"api_key": key})[0] == 403
    assert guarded.request("/api/translate", body, authorization="Bearer \xe9")[0] == 401


def test_cross_origin_requests_are_allowed_if_configured(guarded):
    preflight = b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\nOrigin: %s\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    allowed = b"access-control-allow-origin: https://page.example"
    assert allowed in send_raw(guarded, preflight % b"https://page.example")
    assert b"access-control-allow-origin" not in send_raw(guarded, preflight % b"https://other.example")


def test_large_bodies(guarded):
    authorization = f"Bearer {TOKEN}"
    stated = send_raw(guarded, http("/api/translate", b"", Content_Length="10000000", Authorization=authorization))
    assert b" 413 " in stated.splitlines()[0]
    chunk = b"1000\r\n" + b"a" * 0x1000 + b"\r\n"
    headers = {"Transfer_Encoding": "chunked", "Authorization": authorization}
    chunked = send_raw(guarded, http("/api/translate", chunk * 5 + b"0\r\n\r\n", **headers))
    assert b" 413 " in chunked.splitlines()[0]
    assert b"The request has more than 10000 bytes." in chunked


def test_slow_clients(guarded, monkeypatch):
    monkeypatch.setattr(guarded.service, "limits", replace(guarded.service.limits, receive_timeout=0.3))
    with connection(guarded) as sock:
        sock.sendall(http("/api/translate", b'{"te', Content_Length="100", Authorization=f"Bearer {TOKEN}"))
        assert b" 408 " in sock.recv(65536).splitlines()[0]


def test_random_bytes(server):
    draw = random.Random(0)
    lines = [
        b"POST /translate HTTP/1.1\r\n",
        b"\r\n",
        b"Host: localhost\r\n",
        b"Content-Length: 5\r\n",
        b"{\x00}",
        b"GET / HTTP",
    ]
    for _ in range(150):
        parts = [draw.choice(lines) if draw.random() < 0.6 else draw.randbytes(draw.randint(1, 60)) for _ in range(6)]
        response = send_raw(server, b"".join(parts))
        assert not response or response.split(b" ", 2)[1][:1] in b"234", response[:200]
    for path in ("/translate", "/v1/completions", "/api/classify"):
        for _ in range(40):
            body = draw.choice([b"{", b"[", b'{"q":', b'"', b""]) + draw.randbytes(draw.randint(0, 80))
            assert server.request(path, body)[0] in (400, 422)
    for depth in (500, 90_000):
        assert server.request("/translate", b"[" * depth)[0] in (400, 413)
        assert server.request("/api/translate", b'{"texts":' + b"[" * depth)[0] in (400, 413, 422)
    assert server.request("/health")[0] == 200


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_stop_their_work(server, is_streamed):
    scheduler = next(model for model in server.service.registry.models if model.name == "letters").scheduler
    cancelled = scheduler.counts.cancelled
    count = 1 if is_streamed else 64
    body = {"model": "letters", "prompts": ["Un"] * count, "options": LONG, "stream": is_streamed}
    content = json.dumps(body).encode()
    with connection(server) as sock:
        sock.sendall(http("/api/generate", content, Content_Length=str(len(content))))
        if is_streamed:
            assert b"200 OK" in sock.recv(1000)
        else:
            wait_until(lambda: scheduler.outstanding > 0)
    wait_until(lambda: scheduler.outstanding == 0)
    assert scheduler.counts.cancelled == cancelled + 1
    assert server.request("/ready")[0] == 200


def test_a_client_that_does_not_read_does_not_delay_others(server):
    body = json.dumps({"model": "letters", "prompts": ["Un"], "options": LONG, "stream": True}).encode()
    with connection(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(http("/api/generate", body, Content_Length=str(len(body))))
        server.post("/api/generate", {"model": "letters", "prompts": ["La"], "options": {"max_len": 4}})


def test_overload_is_refused_with_429(folders):
    registry = ModelRegistry([folders["numbers"]], device="cpu", latency_target=0.05, workers=2)
    body = {"texts": ["one two three four"] * 16, "options": {"beam": 16, "min_len": 100, "max_len": 100}}
    with run_in_thread(registry) as server:
        server.post("/api/translate", body)
        with ThreadPoolExecutor(12) as pool:
            responses = list(pool.map(lambda _: server.request("/api/translate", body), range(24)))
        assert {status for status, _ in responses} == {200, 429}
        refused = next(content for status, content in responses if status == 429)
        assert "The server is at its capacity. Retry after" in refused["error"]
        outputs = [content for status, content in responses if status == 200]
        assert all(output == outputs[0] for output in outputs)
        wait_until(lambda: server.service.registry.models[0].scheduler.outstanding == 0)
        assert server.request("/api/translate", {"texts": ["one"]})[0] == 200


def test_changed_folders_are_reloaded(folders, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(folders["numbers"], folder)
    translator = load(folder, "cpu")
    registry = ModelRegistry([folder], device="cpu", latency_target=30, workers=2)
    with run_in_thread(registry) as server:
        translate = lambda: server.post("/api/translate", {"texts": ["one two three"]})["translations"][0]  # noqa: E731
        before = translate()
        registry.reload_changed()
        first = registry.models[0]
        # A broken folder: the old model stays.
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:1000])
        registry.reload_changed()
        assert registry.models[0] is first
        assert "the file is damaged" in server.request("/ready")[1]["reload_errors"]["model"]
        assert "reload failed" in caplog.text
        assert translate() == before
        (folder / "config.json").unlink()
        registry.reload_changed()
        assert translate() == before
        # A good one replaces it, while requests are served.
        with torch.no_grad():
            translator.model.output.weight.mul_(0.5)
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(translate) for _ in range(50)]
            save(folder, translator)
            registry.reload_changed()
            results = [future.result() for future in futures]
        after = translate()
        assert after[0]["score"] != before[0]["score"]
        assert all(result in (before, after) for result in results)
        assert "reload_errors" not in server.request("/ready")[1]


def test_rewritten_files_do_not_reach_a_served_model(folders, tmp_path):
    """Nothing of a served model is mapped: a file that shrinks in place would kill the process."""
    translator = load(folders["numbers"], "cpu")
    vocab = translator.model.config.target_vocab
    targets = np.zeros((translator.model.config.source_vocab, 2), np.int32)
    translator.shortlist = Shortlist(targets, np.arange(vocab, dtype=np.int32), vocab)
    for precision in ("float32", "int8"):
        save(tmp_path / precision, translator, precision=precision)
    registry = ModelRegistry([tmp_path / "float32", tmp_path / "int8"], device="cpu", latency_target=30, workers=1)
    assert [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line] == []
    body = {"texts": ["one two three", "two"], "options": {"shortlist": True}}
    with run_in_thread(registry) as server:
        translate = lambda: [server.post("/api/translate", body | {"model": name}) for name in registry.names]  # noqa: E731
        before = translate()
        for file in tmp_path.rglob("*.safetensors"):
            with open(file, "r+b") as opened:
                opened.truncate(100)
        assert translate() == before


def test_memory_stays_flat(server):
    """A short soak: thousands of requests of all kinds leave nothing behind."""

    def run(count: int) -> None:
        def one(i: int) -> None:
            kind = i % 4
            if kind == 0:
                server.post("/translate", {"q": f"one two {i}", "source": "en", "target": "fr"})
            elif kind == 1:
                options = {"max_len": 3 + i % 9, "seed": i, "temperature": 0.5 + (i % 7) / 10}
                server.post("/api/generate", {"model": "letters", "prompts": ["Un"], "options": options})
            elif kind == 2:
                server.post("/v1/embeddings", {"model": "moods", "input": f"the cat {i}"})
            else:
                server.request("/api/translate", {"texts": ["one"], "options": {"beam": 1 + i % 17}})

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(count)))

    run(300)
    gc.collect()
    before = resident_bytes()
    run(600)
    gc.collect()
    assert resident_bytes() - before < 24 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_schemathesis(server):
    """No request that the OpenAPI description allows, or nearly allows, gives a server error."""
    import hypothesis
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    settings = hypothesis.settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @settings
        def check(case):
            assert case.call(timeout=240).status_code < 500

        check()
