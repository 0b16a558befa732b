"""What the measurements on a GPU share: synthetic sentences, the machine's ceiling, a stopwatch and a table."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from regard.data import Batch, PairBatches, Sequences

# Of translated news: the mean is 28, half of the sentences have between 17 and 34 tokens, one of fifty more than 75.
MEAN, SPREAD = 28, 0.55


def sentence_lengths(count: int, longest: int, seed: int, mean: float = MEAN) -> np.ndarray:
    """Log-normal, as lengths of sentences are."""
    draw = np.random.default_rng(seed).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(np.rint(draw), 2, longest).astype(int)


def sentence_pairs(
    tokens: int, longest: int, vocab: int, *, batches: int, seed: int = 0, mean: float = MEAN
) -> list[Batch]:
    """Batches of pairs of sentences as in training, sorted by length within pools, `tokens` a side at most."""
    generator = np.random.default_rng([seed, 1])  # not the one that draws the lengths
    count = 4 * batches * tokens // int(min(mean, longest)) + 16
    usual, ratio = sentence_lengths(count, longest - 1, seed, mean), generator.lognormal(0.0, 0.1, count)
    lengths = (np.clip(np.rint(usual * r), 2, longest - 1).astype(int) for r in (ratio, 1 / ratio))
    sides = [Sequences.from_lists(generator.integers(4, vocab, n) for n in side) for side in lengths]
    made = PairBatches(*sides, budget=tokens, max_len=longest, seed=seed, constant_shapes=True)
    return list(itertools.islice(made.epoch(0), batches))


def milliseconds(function: Callable[[], object], repeat: int = 20) -> float:
    """The median time of a call: on a GPU between events, with what the cache holds thrown out in between."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(function, warmup=20, rep=5 * repeat, return_mode="median")
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def matrix_ceiling(device: str, size: int = 8192) -> float:
    """TFLOP/s of a large bf16 matrix product on random numbers: what no training step can pass."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) / 1e9


@contextlib.contextmanager
def changed(place: Any, **values: Any):
    """A module's constants for a while."""
    before = {name: getattr(place, name) for name in values}
    for name, value in values.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


def table(header: list[str], rows: list[list[str]]) -> str:
    """In Markdown, numbers to the right."""
    line = "| " + " | ".join(["---"] + ["---:"] * (len(header) - 1)) + " |"
    return "\n".join(["| " + " | ".join(header) + " |", line, *("| " + " | ".join(row) + " |" for row in rows)])
