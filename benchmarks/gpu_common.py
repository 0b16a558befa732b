"""Shared helpers of GPU benchmarks: synthetic sentences, timing, the peak rate of the GPU, Markdown tables."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from regard.data import PairBatches
from regard.data.batching.batch import Batch
from regard.data.batching.sequences import Sequences

# Typical of translated news: the mean is 28, half of the sentences have 17 to 34 tokens, one in fifty more than 75.
MEAN, SIGMA = 28, 0.55


def sentence_lengths(count: int, max_len: int, seed: int, mean: float = MEAN) -> np.ndarray:
    """Sentence lengths from a log-normal distribution."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(np.rint(lengths), 2, max_len).astype(int)


def sentence_pairs(
    tokens: int, max_len: int, vocab: int, *, batches: int, seed: int = 0, mean: float = MEAN
) -> list[Batch]:
    """Batches of sentence pairs as in training, bucketed by length, with at most `tokens` tokens per side."""
    generator = np.random.default_rng([seed, 1])  # independent of the lengths
    count = 4 * batches * tokens // int(min(mean, max_len)) + 16
    common, ratio = sentence_lengths(count, max_len - 1, seed, mean), generator.lognormal(0.0, 0.1, count)
    lengths = (np.clip(np.rint(common * r), 2, max_len - 1).astype(int) for r in (ratio, 1 / ratio))
    sides = [Sequences.from_lists(generator.integers(4, vocab, n) for n in side) for side in lengths]
    sampler = PairBatches(*sides, budget=tokens, max_len=max_len, seed=seed, constant_shapes=True)
    return list(itertools.islice(sampler.epoch(0), batches))


def milliseconds(function: Callable[[], object], repeat: int = 20) -> float:
    """Median time of a call in ms; on a GPU measured with events and a flushed cache."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(function, warmup=20, rep=5 * repeat, return_mode="median")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def matrix_ceiling(device: str, size: int = 8192) -> float:
    """TFLOP/s of a large bf16 matrix product of random numbers: an upper bound for training steps."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) / 1e9


@contextlib.contextmanager
def override(module: Any, **values: Any):
    """Replace attributes of a module temporarily."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with right-aligned numbers."""
    line = "| " + " | ".join(["---"] + ["---:"] * (len(header) - 1)) + " |"
    return "\n".join(["| " + " | ".join(header) + " |", line, *("| " + " | ".join(row) + " |" for row in rows)])
