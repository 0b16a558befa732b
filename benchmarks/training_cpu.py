"""Training on a CPU: tokens per second, against Hugging Face Marian, nn.Transformer and x-transformers.

    python benchmarks/training_cpu.py --rounds 3

All models have width 256, 3+3 layers, feed-forward 1024, vocabulary 8000; 4096 + 4096 tokens per step, sentences of 16,
so that there is no padding. A step is forward, loss, backward, clipping and Adam; that of Regard also loads data and
logs. Every run is a process of its own (or several), with the same allocator settings. Peers run as one process with
all threads and as one process per thread; the speeds of the latter are summed although they exchange no gradients. The
implementations alternate from round to round.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import training_peers
from measurement import Measurement, Report, is_installed, measure_roofline

from regard.allocator import keep_freed_memory
from regard.data import PairBatches
from regard.data.batching.sequences import Sequences
from regard.models import TransformerConfig
from regard.training import Dataset, Recipe, TokenizerConfig, TrainConfig, run_recipe
from regard.training.machine import resolve_precision

WIDTH, HEADS, LAYERS, FEEDFORWARD, VOCABULARY, LENGTH, TOKENS = 256, 4, 3, 1024, 8000, 16, 4096
WARMUP_STEPS = 2
PEERS = {
    "transformers' Marian": training_peers.marian,
    "nn.Transformer": training_peers.torch_transformer,
    "x-transformers": training_peers.x_transformer,
}


class Run(NamedTuple):
    """One run: `processes` processes in parallel, each with an equal part of the tokens."""

    model: str
    precision: str
    processes: int = 1
    threads: int = 1


def make_recipe(steps: int) -> Recipe:
    sizes = dict(width=WIDTH, heads=HEADS, feedforward=FEEDFORWARD, encoder_layers=LAYERS, decoder_layers=LAYERS)
    return Recipe(
        tokenizer=TokenizerConfig(kind="space", vocab_size=VOCABULARY),
        model=TransformerConfig(**sizes, max_len=64, norm="post"),
        train=TrainConfig(
            steps=steps + WARMUP_STEPS, batch_tokens=TOKENS, log_every=1, validate_every=10**9, device="cpu"
        ),
    )


def train_regard(steps: int) -> float:
    """Median seconds per step of `run_recipe`, including data loading and logging."""
    rng = random.Random(0)
    words = [f"w{i}" for i in range(VOCABULARY - 4)]
    sentences = max(2 * TOKENS, VOCABULARY) // LENGTH * 4
    lines = [" ".join(rng.choices(words, k=LENGTH - 1)) for _ in range(sentences)]
    pairs = list(zip(lines[::2], lines[1::2]))
    with tempfile.TemporaryDirectory() as out:
        run_recipe(make_recipe(steps), out, dataset=Dataset(pairs, pairs[:8]), quiet=True)
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return TOKENS / statistics.median(record["tokens_per_second"] for record in records[WARMUP_STEPS:])


def train_peer(run: Run, steps: int) -> float:
    """Median seconds per step of a peer model, with its part of the tokens."""
    keep_freed_memory()
    mode = "bfloat16" if run.precision == "bfloat16" else "eager"
    step = PEERS[run.model]("cpu", WIDTH, HEADS, LAYERS, FEEDFORWARD, VOCABULARY, mode)
    tokens, generator, seconds = TOKENS // run.processes, np.random.default_rng(0), []
    count = tokens // LENGTH
    sides = (generator.integers(4, VOCABULARY, (count * (steps + WARMUP_STEPS), LENGTH - 1)) for _ in range(2))
    batches = PairBatches(*map(Sequences.from_lists, sides), budget=tokens, max_len=64, seed=0)
    for batch in batches.epoch(0):
        start = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARMUP_STEPS:])


def run_processes(run: Run, steps: int) -> float:
    """Run the processes in parallel and return the seconds per step of all tokens."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if run.model != "Regard":
        environment |= {"OMP_NUM_THREADS": str(run.threads)}
    command = [sys.executable, __file__, "--steps", str(steps), "--job", json.dumps(run)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(run.processes)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode:
            raise RuntimeError((errors.strip().splitlines() or ["the process ended without a message"])[-1][:100])
    # Each process does its part: the total speed is the sum of their speeds.
    speeds = [TOKENS / run.processes / float(output.split()[-1]) for output, _ in outputs]
    return TOKENS / sum(speeds)


def make_runs(precision: str) -> dict[str, Run]:
    cores = torch.get_num_threads()
    variants = {f"{cores} threads": ("float32", 1, cores), f"{cores} processes": ("float32", cores, 1)}
    if precision == "bfloat16":  # peers get the same precision as Regard
        variants[f"{cores} processes, bfloat16"] = ("bfloat16", cores, 1)
    runs = {f"Regard, defaults ({precision})": Run("Regard", precision)}
    for model in PEERS:
        if model == "nn.Transformer" or is_installed(model.removesuffix("' Marian")):
            runs |= {f"{model}, {label}": Run(model, *variant) for label, variant in variants.items()}
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)  # one process of a run
    options = parser.parse_args()
    if options.job:
        run = Run(*options.job)
        print(train_regard(options.steps) if run.model == "Regard" else train_peer(run, options.steps))
        return
    precision = resolve_precision(make_recipe(options.steps)).train.precision
    runs, roofline = make_runs(precision), measure_roofline(torch.device("cpu"), getattr(torch, precision))
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    notes: dict[str, str] = {}
    for _ in range(options.rounds):
        for label, run in runs.items():
            if label not in notes:
                try:
                    seconds[label].append(run_processes(run, options.steps))
                except RuntimeError as error:
                    notes[label] = str(error)
    square, hidden = WIDTH**2, 2 * WIDTH * FEEDFORWARD
    flops = 6.0 * TOKENS * (LAYERS * (12 * square + 2 * hidden) + WIDTH * VOCABULARY)  # attention is neglected
    case, rows = f"width {WIDTH}, {LAYERS}+{LAYERS} layers, {TOKENS}+{TOKENS} tokens", []
    for label, run in runs.items():
        is_regard, times = run.model == "Regard", seconds[label]
        if label in notes:
            rows.append(Measurement(case, label, is_regard, note=notes[label]))
            continue
        median = statistics.median(times)
        low, high = (round(2 * TOKENS / extreme) for extreme in (max(times), min(times)))
        rate, share = 2 * TOKENS / median, flops / roofline.flops / median
        rows.append(
            Measurement(case, label, is_regard, None, median, None, rate, " tokens/s", share, f"{low} to {high}")
        )
    print(Report("training", roofline, rows))


if __name__ == "__main__":
    main()
