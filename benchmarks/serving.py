"""Load on a server on the loopback address: throughput, latency, batching, overload; beside FastAPI with CTranslate2.

    python benchmarks/serving.py                 # all rows: about three minutes
    python benchmarks/serving.py --requests short --repeat 3   # latency; loads of 0.5 to 4 x the capacity
    python benchmarks/serving.py --soak 600      # memory of the server over ten minutes of mixed load

Models have random weights. A request is one sentence, the same for both servers: `long`, 20 words with an output of 24
tokens and beam 5, shape `small`; `short`, 4 words with an output of 5 tokens, greedy, 2+2 layers of width 128. Clients
run in this process, the servers in their own. Clients send one request after another over one connection each. Loads
of a multiple of the capacity: requests arrive at random, whether or not earlier ones are finished; the capacity is
what 32 clients get from the same server right before. Prints Markdown tables.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import table

from regard.data import Tokenizer
from regard.interop import export_ctranslate2
from regard.models import make_model
from regard.models.transformer import TransformerConfig, transformer_small, transformer_tiny
from regard.pipelines import Translator, load, save

WORDS = [f"w{i}" for i in range(8000)]
LATENCY_TARGET = 0.5
LOADS = (0.5, 1.0, 2.0, 4.0)
CAPACITY_CLIENTS = 32


@dataclass(frozen=True)
class Requests:
    """The requests of a benchmark, and the shape of the model."""

    make_config: Callable[..., TransformerConfig]
    source_words: int
    output_tokens: int
    beam: int

    def make_folder(self, folder: Path) -> None:
        """Write a model of random weights whose tokens are words."""
        torch.manual_seed(0)
        tokenizer = Tokenizer.train([" ".join(WORDS)], "word", vocab_size=len(WORDS) + 8)
        size = tokenizer.vocab_size
        config = self.make_config(source_vocab=size, target_vocab=size, shared_vocab=True)
        save(folder, Translator(make_model(config).eval(), tokenizer, tokenizer))

    def make_sentences(self, count: int) -> list[str]:
        draw = random.Random(0)
        return [" ".join(draw.sample(WORDS, self.source_words)) for _ in range(count)]

    def encode(self, sentence: str) -> bytes:
        method = {"method": "beam", "beam": self.beam} if self.beam > 1 else {"method": "greedy"}
        options = {**method, "min_len": self.output_tokens, "max_len": self.output_tokens}
        body = json.dumps({"texts": [sentence], "options": options}).encode()
        head = "POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        return head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body


REQUESTS = {
    "long": Requests(transformer_small, 20, 24, 5),
    "short": Requests(partial(transformer_tiny, encoder_layers=2, decoder_layers=2), 4, 5, 1),
}


def run_ctranslate2_server(folder: str, port: int, requests: Requests) -> None:
    """A plain server: every request is one call of CTranslate2, which has two workers. It sets TCP_NODELAY."""
    import ctranslate2
    import uvicorn
    from fastapi import FastAPI, Request

    export, app = Path(folder) / "ct2", FastAPI()
    tokenizer = load(folder, "cpu").source_tokenizer
    translator = ctranslate2.Translator(str(export), device="cpu", inter_threads=2, intra_threads=1)
    lengths = {"min_decoding_length": requests.output_tokens, "max_decoding_length": requests.output_tokens}

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/api/translate")
    async def translate(request: Request) -> dict[str, object]:
        (text,) = (await request.json())["texts"]
        tokens = [tokenizer.vocabulary[i] for i in tokenizer.encode(text)] + ["<eos>"]
        result = translator.translate_batch([tokens], beam_size=requests.beam, asynchronous=True, **lengths)[0]
        output = await asyncio.to_thread(result.result)
        return {"translations": [[{"text": " ".join(output.hypotheses[0])}]]}

    uvicorn.run(app, port=port, log_level="error", access_log=False)


@contextmanager
def server(command: list[str], port: int):
    """A server process, until it responds."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                status, _ = asyncio.run(send_once(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
                if status == 200:
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


class Connection(asyncio.Protocol):
    """An HTTP connection that stays open. It parses as little as it can: it shares the cores with the server."""

    def __init__(self, port: int) -> None:
        self.port, self.transport, self.received = port, None, b""

    async def send(self, request: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self.transport is None:
            self.received = b""
            self.transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self.port)
        self.response = loop.create_future()
        self.transport.write(request)
        return await self.response

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        headers = head.lower()
        if not separator or len(body) < int(headers.partition(b"content-length:")[2].split(None, 1)[0]):
            return
        self.received = b""
        if b"connection: close" in headers:
            self.close()
        if not self.response.done():
            self.response.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if not self.response.done():
            self.response.set_exception(error or ConnectionError("closed"))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None


async def send_once(port: int, request: bytes) -> tuple[int, bytes]:
    connection = Connection(port)
    try:
        return await connection.send(request)
    finally:
        connection.close()


@dataclass
class Load:
    """The responses to a load."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    """seconds until a response with status 429"""
    statuses: Counter[int] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)

    def note(self, sentence: str, status: int, body: bytes, latency: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.latencies.append(latency)
            self.texts[sentence] = json.loads(body)["translations"][0][0]["text"]
        elif status == 429:
            self.refusals.append(latency)

    @property
    def throughput(self) -> float:
        return len(self.latencies) / self.seconds

    def row(self) -> list[str]:
        return [f"{self.throughput:.0f}", *percentiles(self.latencies, 50, 95, 99)]


def percentiles(seconds: list[float], *points: float) -> list[str]:
    """In milliseconds."""
    if not seconds:
        return ["-"] * len(points)
    return [
        f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
        for value in np.percentile(seconds, points) * 1e3
    ]


async def closed_loop(port: int, encoded: dict[str, bytes], clients: int, seconds: float) -> Load:
    """Clients that each send one request after another."""
    load, start, sentences = Load(), time.perf_counter(), list(encoded)

    async def client(number: int) -> None:
        connection, draw = Connection(port), random.Random(number)
        while time.perf_counter() - start < seconds:
            sentence = draw.choice(sentences)
            sent = time.perf_counter()
            status, body = await connection.send(encoded[sentence])
            load.note(sentence, status, body, time.perf_counter() - sent)
            if status == 429:
                await asyncio.sleep(0.05)
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    load.seconds = time.perf_counter() - start
    return load


async def open_loop(port: int, encoded: dict[str, bytes], rate: float, seconds: float) -> Load:
    """Requests that arrive at random times, `rate` per second."""
    load, start, draw, sentences = Load(), time.perf_counter(), random.Random(1), list(encoded)
    free: list[Connection] = []
    tasks = []

    async def one(sentence: str) -> None:
        connection = free.pop() if free else Connection(port)
        sent = time.perf_counter()
        status, body = await connection.send(encoded[sentence])
        load.note(sentence, status, body, time.perf_counter() - sent)
        free.append(connection)

    at = 0.0
    while at < seconds:
        at += draw.expovariate(rate)
        if (wait := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(draw.choice(sentences))))
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - start
    for connection in free:
        connection.close()
    return load


def soak(port: int, process: subprocess.Popen, encoded: dict[str, bytes], seconds: float) -> None:
    """Print the resident memory of the server every tenth of the time."""
    for part in range(11):
        if part:
            asyncio.run(closed_loop(port, encoded, 16, seconds / 10))
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        print(f"{part * seconds / 10:.0f} s: {pages * 4096 / 2**20:.0f} MiB", flush=True)


def throughput_rows(servers: dict[str, list[str]], port: int, encoded: dict[str, bytes], options: Any) -> None:
    """Throughput and latency of clients that wait for their responses, and the effect of batching."""
    rows, loads = [], {}
    for name, command in servers.items():
        with server(command, port):
            asyncio.run(closed_loop(port, encoded, 4, 2.0))  # warm-up
            for clients in options.clients:
                load_ = loads[name, clients] = asyncio.run(closed_loop(port, encoded, clients, options.seconds))
                rows.append([name, str(clients), *load_.row()])
                print(" | ".join(rows[-1]), flush=True)
    print(table(["server", "clients", "requests/s", "p50 ms", "p95 ms", "p99 ms"], rows))
    first, best = (loads["Regard", n] for n in (options.clients[0], max(options.clients)))
    same = [first.texts[line] == best.texts[line] for line in first.texts.keys() & best.texts.keys()]
    capacity = max(load_.throughput for (name, _), load_ in loads.items() if name == "Regard")
    print(f"Batching: {capacity / first.throughput:.1f} × one request at a time. "
          f"Equal outputs under load: {sum(same)} of {len(same)}.")  # fmt: skip


def keep_alive_rows(servers: dict[str, list[str]], port: int, encoded: dict[str, bytes], options: Any) -> None:
    """Latency of one client on one connection and processor time of the server, the servers in turns."""
    loads: dict[str, list[float]] = {name: [] for name in servers}
    busy = dict.fromkeys(servers, 0.0)
    for _ in range(options.repeat):
        for name, command in servers.items():
            with server(command, port) as process:
                asyncio.run(closed_loop(port, encoded, 1, 1.0))  # warm-up
                before = cpu_seconds(process)
                loads[name] += asyncio.run(closed_loop(port, encoded, 1, options.seconds)).latencies
                busy[name] += cpu_seconds(process) - before
    rows = [
        [name, str(len(seconds)), *percentiles(seconds, 0, 50, 95, 99), f"{busy[name] / len(seconds) * 1e3:.2f}"]
        for name, seconds in loads.items()
    ]
    columns = ["server", "requests", "minimum ms", "p50 ms", "p95 ms", "p99 ms", "processor ms/request"]
    print(table(columns, rows), flush=True)


def cpu_seconds(process: subprocess.Popen) -> float:
    """Processor time of all threads of a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load_rows(command: list[str], port: int, encoded: dict[str, bytes], options: Any) -> None:
    """Loads of a multiple of the capacity."""
    rows = []
    for _ in range(options.repeat):
        with server(command, port):
            asyncio.run(closed_loop(port, encoded, CAPACITY_CLIENTS, 2.0))  # warm-up
            for times in LOADS:
                capacity = asyncio.run(closed_loop(port, encoded, CAPACITY_CLIENTS, options.seconds / 2)).throughput
                load_ = asyncio.run(open_loop(port, encoded, times * capacity, options.seconds))
                count = sum(load_.statuses.values())
                refused = load_.statuses[429] / count
                row = [f"{times:g} ×", f"{capacity:.0f}", f"{count / load_.seconds:.0f}", f"{load_.throughput:.0f}"]
                row += [f"{refused:.0%}", *percentiles(load_.latencies, 50, 99), *percentiles(load_.refusals, 50, 99)]
                others = {status: n for status, n in load_.statuses.items() if status not in (200, 429)}
                rows.append(row)
                print(" | ".join(row), others or "", flush=True)
    columns = ["load", "capacity/s", "sent/s", "accepted/s", "refused", "p50 ms", "p99 ms"]
    print(table([*columns, "refusal p50 ms", "refusal p99 ms"], sorted(rows, key=lambda row: float(row[0].split()[0]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", choices=list(REQUESTS), default="long")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per row")
    parser.add_argument("--repeat", type=int, default=1, help="how often the loads are run")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of load while memory is printed")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--ctranslate2", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    requests, port = REQUESTS[options.requests], options.port
    if options.ctranslate2:
        run_ctranslate2_server(options.ctranslate2, port, requests)
        return
    encoded = {sentence: requests.encode(sentence) for sentence in requests.make_sentences(256)}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        requests.make_folder(folder)
        export_ctranslate2(load(folder, "cpu"), folder / "ct2")
        python, at = [sys.executable], ["--port", str(port)]
        regard = [*python, "-m", "regard", "serve", str(folder), *at, "--device", "cpu", "--quiet"]
        patient = [*regard, "--latency-target", "60"]
        plain = [*python, __file__, "--ctranslate2", str(folder), *at, "--requests", options.requests]
        servers = {"Regard": patient, "FastAPI + CTranslate2": plain}
        if options.soak:
            with server(patient, port) as process:
                soak(port, process, encoded, options.soak)
            return
        if options.requests == "long":
            throughput_rows(servers, port, encoded, options)
        else:
            keep_alive_rows(servers, port, encoded, options)
        load_rows([*regard, "--latency-target", str(LATENCY_TARGET)], port, encoded, options)


if __name__ == "__main__":
    main()
