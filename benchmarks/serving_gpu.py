"""Requests through the scheduler of the server, without HTTP, beside the decoding engine alone.

    python benchmarks/serving_gpu.py --device cuda

A Transformer of the shape `base` with random weights in bfloat16 (float32 on a CPU, shape `tiny`). The engine decodes
all sentences in one call of `decode_all`; the scheduler gets every sentence as a request of its own, all at once, and
at random times at 70 % of the engine's throughput. Runs alternate. The goal is 85 % of the engine's throughput.
"""

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import Future

import torch
from gpu_common import sentence_lengths, table

from regard.data.text.special_tokens import SEQ2SEQ_TOKENS
from regard.decode import DecodeConfig, Request
from regard.models.transformer import Transformer, transformer_base, transformer_tiny
from regard.pipelines.decoding_request import DecodingRequest
from regard.serve.scheduler import SWITCH_INTERVAL, Scheduler

VOCAB = 32_000


def make_request(model: Transformer, sources: list[list[int]], config: DecodeConfig) -> DecodingRequest:
    return DecodingRequest(model, Request(sources, config, SEQ2SEQ_TOKENS))


def run_all_at_once(scheduler: Scheduler, requests: list[DecodingRequest]) -> float:
    """Seconds until all requests, submitted at once, are finished."""
    start = time.perf_counter()
    futures = [scheduler.submit(request, timeout=600) for request in requests]
    for future in futures:
        future.result()
    return time.perf_counter() - start


def run_at_rate(scheduler: Scheduler, requests: list[DecodingRequest], rate: float) -> list[float]:
    """Latencies of requests that arrive at random times, `rate` per second."""
    draw, latencies, futures = random.Random(0), [], []
    start, at = time.perf_counter(), 0.0
    for request in requests:
        at += draw.expovariate(rate)
        time.sleep(max(0.0, start + at - time.perf_counter()))
        sent = time.perf_counter()

        def note(_: Future, sent: float = sent) -> None:
            latencies.append(time.perf_counter() - sent)

        futures.append(scheduler.submit(request, timeout=600))
        futures[-1].add_done_callback(note)
    for future in futures:
        future.result()
    return sorted(latencies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sentences", type=int, default=16384)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL)  # as in the server
    is_gpu = options.device.startswith("cuda")
    sizes = {"source_vocab": VOCAB, "target_vocab": VOCAB} if is_gpu else {"source_vocab": 2000, "target_vocab": 2000}
    torch.manual_seed(0)
    model = Transformer((transformer_base if is_gpu else transformer_tiny)(**sizes)).to(options.device).eval()
    if is_gpu:
        model = model.to(torch.bfloat16)
    draw = random.Random(0)
    lengths = sentence_lengths(options.sentences, 100, seed=0)
    sources = [[*draw.choices(range(4, sizes["source_vocab"]), k=int(n)), SEQ2SEQ_TOKENS.eos] for n in lengths]
    rows = []
    for name, config in (("greedy", DecodeConfig(method="greedy")), ("beam 4", DecodeConfig(beam=4))):
        # Random weights never end an output: all have the length of their source.
        config = DecodeConfig(method=config.method, beam=config.beam, max_ratio=1.0, max_extra=0)
        whole = make_request(model, sources, config)
        single = [make_request(model, [source], config) for source in sources]
        scheduler = Scheduler(latency_target=1e9)
        try:
            run_all_at_once(scheduler, single)  # captures graphs, or compiles kernels
            whole.decode()
            engine, server = [], []
            for _ in range(options.runs):
                start = time.perf_counter()
                expected = whole.decode()
                engine.append(time.perf_counter() - start)
                server.append(run_all_at_once(scheduler, single))
            sample = [scheduler.submit(request).result()[0][0].ids for request in single[:64]]
            same = sum(ids == n_best[0].ids for ids, n_best in zip(sample, expected))
            best, ours = (options.sentences / statistics.median(seconds) for seconds in (engine, server))
            latencies = run_at_rate(scheduler, single, 0.7 * best)
            p50, p99 = (1e3 * latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.99))
            cells = [name, f"{best:.0f}", f"{ours:.0f}", f"{100 * ours / best:.0f}%"]
            rows.append([*cells, f"{p50:.0f}", f"{p99:.0f}", f"{same} of {len(sample)}"])
        finally:
            scheduler.close()
    header = ["search", "engine, sentences/s", "scheduler, sentences/s", "share", "p50 ms at 70 %", "p99 ms at 70 %"]
    print(table([*header, "equal outputs"], rows))


if __name__ == "__main__":
    main()
