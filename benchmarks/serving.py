"""Load on a server on the loopback address: throughput, latency, batching, overload; beside FastAPI with CTranslate2.

    python benchmarks/serving.py                 # all rows: about three minutes
    python benchmarks/serving.py --soak 600      # memory of the server over ten minutes of mixed load

The model has the shape `small` and random weights; every request has one sentence of 20 words and an output of 24
tokens (beam 5), the same for both servers. Clients run in this process, the servers in their own. Clients send one
request after another over one connection each. Overload: requests arrive at random, at twice the measured capacity,
whether or not earlier ones are finished. Prints Markdown tables.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gpu_common import table

from regard.data import Tokenizer
from regard.interop import export_ctranslate2
from regard.models import make_model
from regard.models.transformer import transformer_small
from regard.pipelines import Translator, load, save

WORDS = [f"w{i}" for i in range(8000)]
SOURCE_WORDS, OUTPUT_TOKENS, BEAM = 20, 24, 5
LATENCY_TARGET = 0.5


def make_folder(folder: Path) -> None:
    """Write a model of random weights whose tokens are words."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word", vocab_size=len(WORDS) + 8)
    size = tokenizer.vocab_size
    config = transformer_small(source_vocab=size, target_vocab=size, shared_vocab=True)
    translator = Translator(make_model(config).eval(), tokenizer, tokenizer)
    save(folder, translator)


def make_sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.sample(WORDS, SOURCE_WORDS)) for _ in range(count)]


def run_ctranslate2_server(folder: str, port: int) -> None:
    """A plain server: every request is one call of CTranslate2, which has two workers."""
    import ctranslate2
    import uvicorn
    from fastapi import FastAPI, Request

    export, app = Path(folder) / "ct2", FastAPI()
    tokenizer = load(folder, "cpu").source_tokenizer
    translator = ctranslate2.Translator(str(export), device="cpu", inter_threads=2, intra_threads=1)
    lengths = {"min_decoding_length": OUTPUT_TOKENS, "max_decoding_length": OUTPUT_TOKENS}

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/api/translate")
    async def translate(request: Request) -> dict[str, object]:
        (text,) = (await request.json())["texts"]
        tokens = [tokenizer.vocabulary[i] for i in tokenizer.encode(text)] + ["<eos>"]
        result = translator.translate_batch([tokens], beam_size=BEAM, asynchronous=True, **lengths)[0]
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
                status, _ = asyncio.run(send_once(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
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


class Connection:
    """An HTTP connection that stays open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        headers = head.lower()
        start = headers.index(b"content-length:") + len(b"content-length:")
        body = await reader.readexactly(int(headers[start : headers.index(b"\r\n", start)]))
        if b"connection: close" in headers:
            self.close()
        return int(head.split(b" ", 2)[1]), body

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def send_once(port: int, request: bytes) -> tuple[int, bytes]:
    connection = Connection(port)
    try:
        return await connection.send(request)
    finally:
        connection.close()


def make_request(sentence: str) -> bytes:
    options = {"beam": BEAM, "min_len": OUTPUT_TOKENS, "max_len": OUTPUT_TOKENS}
    body = json.dumps({"texts": [sentence], "options": options}).encode()
    head = f"POST /api/translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Load:
    """The responses to a load."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)

    def note(self, sentence: str, status: int, body: bytes, latency: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.latencies.append(latency)
            self.texts[sentence] = json.loads(body)["translations"][0][0]["text"]

    @property
    def throughput(self) -> float:
        return len(self.latencies) / self.seconds

    def row(self) -> list[str]:
        p50, p95, p99 = np.percentile(self.latencies, [50, 95, 99]) * 1e3
        return [f"{self.throughput:.0f}", f"{p50:.0f}", f"{p95:.0f}", f"{p99:.0f}"]


async def closed_loop(port: int, sentences: list[str], clients: int, seconds: float) -> Load:
    """Clients that each send one request after another."""
    load, start = Load(), time.perf_counter()

    async def client(number: int) -> None:
        connection, draw = Connection(port), random.Random(number)
        while time.perf_counter() - start < seconds:
            sentence = draw.choice(sentences)
            sent = time.perf_counter()
            status, body = await connection.send(make_request(sentence))
            load.note(sentence, status, body, time.perf_counter() - sent)
            if status == 429:
                await asyncio.sleep(0.05)
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    load.seconds = time.perf_counter() - start
    return load


async def open_loop(port: int, sentences: list[str], rate: float, seconds: float) -> Load:
    """Requests that arrive at random times, `rate` per second."""
    load, start, draw = Load(), time.perf_counter(), random.Random(1)
    free: list[Connection] = []
    tasks = []

    async def one(sentence: str) -> None:
        connection = free.pop() if free else Connection(port)
        sent = time.perf_counter()
        status, body = await connection.send(make_request(sentence))
        load.note(sentence, status, body, time.perf_counter() - sent)
        free.append(connection)

    at = 0.0
    while at < seconds:
        at += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(draw.choice(sentences))))
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - start
    for connection in free:
        connection.close()
    return load


def soak(port: int, process: subprocess.Popen, sentences: list[str], seconds: float) -> None:
    """Print the resident memory of the server every tenth of the time."""
    for part in range(11):
        if part:
            asyncio.run(closed_loop(port, sentences, 16, seconds / 10))
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        print(f"{part * seconds / 10:.0f} s: {pages * 4096 / 2**20:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per row")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of load while memory is printed")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--ctranslate2", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ctranslate2:
        run_ctranslate2_server(options.ctranslate2, options.port)
        return
    sentences, port = make_sentences(256), options.port
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        make_folder(folder)
        export_ctranslate2(load(folder, "cpu"), folder / "ct2")
        regard = [
            sys.executable,
            "-m",
            "regard",
            "serve",
            str(folder),
            "--port",
            str(port),
            "--device",
            "cpu",
            "--quiet",
        ]
        patient = [*regard, "--latency-target", "60"]
        plain = [sys.executable, __file__, "--ctranslate2", str(folder), "--port", str(port)]
        if options.soak:
            with server(patient, port) as process:
                soak(port, process, sentences, options.soak)
            return
        rows, loads = [], {}
        for name, command in (("Regard", patient), ("FastAPI + CTranslate2", plain)):
            with server(command, port):
                asyncio.run(closed_loop(port, sentences, 4, 2.0))  # warm-up
                for clients in options.clients:
                    load_ = loads[name, clients] = asyncio.run(closed_loop(port, sentences, clients, options.seconds))
                    rows.append([name, str(clients), *load_.row()])
                    print(" | ".join(rows[-1]), flush=True)
        print(table(["server", "clients", "requests/s", "p50 ms", "p95 ms", "p99 ms"], rows))
        first, best = (loads["Regard", n] for n in (options.clients[0], max(options.clients)))
        same = [first.texts[one] == best.texts[one] for one in first.texts.keys() & best.texts.keys()]
        capacity = max(load_.throughput for (name, _), load_ in loads.items() if name == "Regard")
        print(f"Batching: {capacity / first.throughput:.1f} × one request at a time. "
              f"Equal outputs under load: {sum(same)} of {len(same)}.")  # fmt: skip
        with server([*regard, "--latency-target", str(LATENCY_TARGET)], port):
            asyncio.run(closed_loop(port, sentences, 32, 3.0))  # warm-up
            load_ = asyncio.run(open_loop(port, sentences, 2 * capacity, 2 * options.seconds))
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(load_.statuses.items()))
        print(f"Overload, {2 * capacity:.0f} requests/s, latency target {1e3 * LATENCY_TARGET:.0f} ms ({statuses}):")
        print(table(["accepted/s", "p50 ms", "p95 ms", "p99 ms"], [load_.row()]))


if __name__ == "__main__":
    main()
