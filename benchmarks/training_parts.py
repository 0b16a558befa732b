"""Custom kernels of a training step, each measured separately, against torch.

    python benchmarks/training_parts.py --only attention

Attention over packed sentences: the error against float64; then 25,600 tokens, 8 heads of 64, forward and backward, by
sentence length, for several tilings and torch's variable-length attention; the best tilings are printed last. Loss:
25,600 features of width 512, vocabulary of 32,000, label smoothing, forward and backward together, against its three
matrix products alone. Norms: norm(x + dropout(y)) of 25,600 rows of 512. At most a minute each. To test the script on a
CPU:

    TRITON_INTERPRET=1 python benchmarks/training_parts.py --tiny
"""

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gpu_common import milliseconds, override, sentence_lengths, table
from torch import Tensor

from regard.attention import Offsets, ScaledDot, attend, causal, use
from regard.attention.reference import reference_packed
from regard.kernels.triton import add_norm, cross_entropy, varlen_short
from regard.kernels.triton.varlen_short import VarlenTiling as Tiling
from regard.training import losses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


# Candidate tilings by maximum sentence length, the current one first. Selected by registers, spills and instructions.
FORWARD = {
    16: [Tiling(16, 1, 80), Tiling(16, 1, 104), Tiling(16, 2, 64)],
    32: [Tiling(32, 1, 168), Tiling(32, 2, 96), Tiling(16, 1, 128), Tiling(32, 2, 128), Tiling(32, 1, 255)],
    64: [Tiling(64, 4, 96), Tiling(64, 4, 128), Tiling(32, 2, 128), Tiling(64, 2, 168), Tiling(32, 4, 96)],
    128: [Tiling(64, 4, 168), Tiling(64, 4, 128), Tiling(32, 2, 255), Tiling(128, 8, 128), Tiling(64, 8, 128)],
}
BACKWARD = {
    16: [Tiling(16, 1, 128), Tiling(16, 1, 112), Tiling(16, 2, 96), Tiling(16, 1, 168)],
    32: [Tiling(32, 1, 255), Tiling(32, 2, 168), Tiling(32, 2, 128), Tiling(16, 2, 168), Tiling(32, 4, 128)],
    64: [
        Tiling(64, 4, 168),
        Tiling(64, 4, 255),
        *(Tiling(r, w, 128) for r, w in ((32, 8), (64, 8))),
        Tiling(32, 4, 168),
    ],
    128: [Tiling(32, 8, 128), Tiling(32, 8, 255), Tiling(16, 8, 128), Tiling(64, 8, 255)],
}
HEADS, WIDTH, TOKENS = (2, 16, 64) if DEVICE == "cpu" else (8, 64, 25_600)


def captured_milliseconds(function: Callable[[], object]) -> float:
    """Time in a CUDA graph, as in training: single launches would be limited by the CPU."""
    if DEVICE == "cpu":
        return milliseconds(function)
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(function, rep=10, return_mode="median")


class Inputs(NamedTuple):
    """Inputs of forward and backward: sentences of up to `max_len` tokens, and empty ones as in training batches."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    offsets: Offsets
    masked: bool

    @staticmethod
    def from_lengths(lengths: np.ndarray, max_len: int, masked: bool, width: int = WIDTH) -> "Inputs":
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
        offsets = Offsets(starts.to(DEVICE), int(lengths.sum()), max_len)
        q, grad = (torch.randn(offsets.total, HEADS, width, device=DEVICE).to(DTYPE) for _ in range(2))
        # As in a layer: halves of one tensor.
        k, v = torch.randn(offsets.total, 2, HEADS, width, device=DEVICE).to(DTYPE).unbind(1)
        return Inputs(q, k, v, grad, offsets, masked)

    @property
    def _arguments(self) -> tuple:
        starts, max_len = self.offsets.starts, self.offsets.max_len
        return starts, starts, max_len, max_len, self.q.shape[-1] ** -0.5, self.masked

    def forward(self, tiling: Tiling | None = None) -> tuple[Tensor, ...]:
        with override(
            varlen_short,
            FORWARD=varlen_short.FORWARD if tiling is None else {varlen_short.MAX_ELEMENTS: tiling},
        ):
            return (varlen_short.varlen_short_forward(self.q, self.k, self.v, *self._arguments),)

    def backward(self, tiling: Tiling | None = None) -> tuple[Tensor, ...]:
        with override(
            varlen_short,
            BACKWARD=varlen_short.BACKWARD if tiling is None else {varlen_short.MAX_ELEMENTS: tiling},
        ):
            return varlen_short.varlen_short_backward(self.grad, self.q, self.k, self.v, *self._arguments)

    def microseconds(self, direction: str, tiling: Tiling, first: Tiling) -> float:
        """Time with a tiling; infinite if it fails or its result differs from that of the first tiling."""
        run = getattr(self, direction)
        try:
            if not all(relative_error(x, y) < 1e-2 for x, y in zip(run(tiling), run(first))):
                return math.inf
        except Exception as problem:  # too many registers, or too much shared memory
            print("  ", direction, tiling, str(problem)[:100], flush=True)
            return math.inf
        return 1e3 * captured_milliseconds(partial(run, tiling))

    def varlen_milliseconds(self) -> tuple[float, float]:
        """Time of torch's variable-length attention, forward and backward."""
        tensors = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        options = dict(mask=causal() if self.masked else None, q_offsets=self.offsets, k_offsets=self.offsets)

        def run() -> Tensor:
            with use("varlen"):
                return attend(*tensors, **options)

        with torch.no_grad():
            forward = milliseconds(run, 10)
        out = run()
        return forward, milliseconds(lambda: torch.autograd.grad(out, tensors, self.grad, retain_graph=True), 10)


def error(max_len: int, masked: bool, width: int) -> list[float]:
    """‖actual − exact‖ / ‖exact‖ of the output and the three gradients."""
    lengths = np.random.default_rng(0).integers(0, max_len + 1, 3 if DEVICE == "cpu" else 40)
    inputs = Inputs.from_lengths(lengths, max_len, masked, width)
    offsets = Offsets(inputs.offsets.starts.cpu(), inputs.offsets.total, max_len)
    exact = [x.double().cpu().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = reference_packed(*exact, ScaledDot(), causal() if masked else None, None, offsets, offsets)
    expected = [out, *torch.autograd.grad(out, exact, inputs.grad.double().cpu())]
    return [relative_error(x.cpu(), y) for x, y in zip([*inputs.forward(), *inputs.backward()], expected)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected.double()).norm() / expected.double().norm()).detach())


def compile_one(task: tuple[str, int, bool, int, Tiling | None]) -> None:
    """Compile a kernel; the result is cached on disk."""
    direction, max_len, masked, width, tiling = task
    try:
        getattr(Inputs.from_lengths(np.array([max_len, 0]), max_len, masked, width), direction)(tiling)
        torch.cuda.synchronize()
    except Exception as problem:  # will be raised again when the kernel is used
        print("  ", task, str(problem)[:100], flush=True)


def attention(tiny: bool) -> None:
    start = time.time()
    sizes = (16,) if tiny else (16, 32, 64, 128)
    checked = [(16, True, 16)] if tiny else [(s, m, 64) for s in sizes for m in (False, True)]
    checked += [] if tiny else [(64, True, 80), (64, False, 128), (128, True, 32)]
    tilings = {"forward": FORWARD, "backward": BACKWARD}
    tasks = [(direction, *case, None) for direction in tilings for case in checked]
    for direction, candidates in tilings.items():
        tasks += [(direction, s, m, WIDTH, tiling) for s in sizes for m in (False, True) for tiling in candidates[s]]
    if DEVICE == "cuda":
        with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_one, tasks))
    print(f"compiled {len(tasks)} kernels after {time.time() - start:.0f} s", flush=True)
    rows = [
        [f"{s}, {'causal' if masked else 'all'}, {width}", *(f"{e:.1e}" for e in error(s, masked, width))]
        for s, masked, width in checked
    ]
    print(table(["max length, mask, width", "output", "dq", "dk", "dv"], rows))
    print(f"after {time.time() - start:.0f} s", flush=True)

    drawn = sentence_lengths(8 * TOKENS, 128, seed=1)
    rows, timings = [], {}
    for max_len in sizes:
        lengths = drawn[(drawn > max_len // 2) & (drawn <= max_len)]
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), TOKENS))]
        # Batches of constant shape have slots for sentences of eight tokens; most are empty.
        lengths = np.pad(lengths, (0, TOKENS // 8 - len(lengths)))
        for masked in (False, True):
            inputs = Inputs.from_lengths(lengths, max_len, masked)
            for direction, candidates in tilings.items():
                for tiling in candidates[max_len]:
                    time_us = inputs.microseconds(direction, tiling, candidates[max_len][0])
                    timings[direction, max_len, masked, tiling] = time_us
            varlen = inputs.varlen_milliseconds() if DEVICE == "cuda" else (math.nan, math.nan)
            row = [f"{(lengths > 0).sum()} of up to {max_len}, {'causal' if masked else 'all'}"]
            for direction, varlen_ms in zip(tilings, varlen):
                candidates = tilings[direction][max_len]
                times = {tiling: timings[direction, max_len, masked, tiling] for tiling in candidates}
                row += [
                    " ".join(f"{'/'.join(map(str, tiling))}:{x:.0f}" for tiling, x in times.items()),
                    f"{1e3 * varlen_ms:.0f}",
                ]
            rows.append(row)
            print(*row, sep="; ", flush=True)
    names = ["forward, rows/warps/registers: µs", "varlen forward", "backward", "varlen backward"]
    print(table(["sentences", *names], rows))
    for direction, candidates in tilings.items():

        def total(tiling: Tiling, s: int, direction: str = direction) -> float:
            return timings[direction, s, False, tiling] + timings[direction, s, True, tiling]

        best = {s: min(candidates[s], key=partial(total, s=s)) for s in sizes}
        print(
            f"best {direction}:",
            *(f"{s}: {tuple(tiling)}" for s, tiling in best.items()),
            f"({time.time() - start:.0f} s)",
        )


def loss(tiny: bool) -> None:
    N, E, V = (40, 16, 50) if tiny else (25_600, 512, 32_000)
    features, twin = (torch.randn(N, E, device=DEVICE).to(DTYPE).requires_grad_() for _ in range(2))
    weight = (torch.randn(V, E, device=DEVICE) * E**-0.5).requires_grad_()
    targets = torch.randint(0, V, (N,), device=DEVICE)
    targets[::10] = -1
    weight_16 = weight.detach().to(DTYPE)
    rows = []

    def run(divergence: float = 0.0, features=features) -> list[Tensor]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            other = twin if divergence else None
            parts = losses.token_loss(features, weight, targets, 0.1, other, divergence)
        return [parts.loss, *torch.autograd.grad(parts.loss, [features, weight])]

    def plain() -> list[Tensor]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = features @ weight.T
        options = dict(label_smoothing=0.1, ignore_index=-1, reduction="sum")
        value = torch.nn.functional.cross_entropy(logits.float(), targets, **options)
        return [value, *torch.autograd.grad(value, [features, weight])]

    def products() -> None:
        logits = features.detach() @ weight_16.T
        logits @ weight_16
        logits.T @ features.detach()

    def measure(name: str, function: Callable[[], object]) -> None:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        median = milliseconds(function)
        memory = (torch.cuda.max_memory_allocated() - before) / 2**30 if DEVICE == "cuda" else 0.0
        rows.append([name, f"{median:.2f}", f"{memory:.2f}"])
        print(*rows[-1], flush=True)

    exact = [x.double() for x in plain()]
    errors = [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(run(), exact)]
    print("errors of loss and gradients of features and weights against float32 logits:", *(f"{e:.1e}" for e in errors))
    measure("three matrix products", products)
    measure("Regard", run)
    for cells in (2**12,) if tiny else (2**26, 2**27, 2**29, 2**30):
        with override(cross_entropy, CHUNK_ELEMENTS=cells):
            measure(f"Regard, 2^{cells.bit_length() - 1} logits at a time", run)
    for block, warps in (
        ((16, 4),) if tiny else ((2048, 4), (4096, 4), (8192, 8), (16384, 16), (32768, 16), (32768, 32))
    ):
        with override(cross_entropy, BLOCK=block, WARPS=warps):
            measure(f"Regard, {block} columns by {warps} warps", run)
    with override(cross_entropy, _accumulates_in_float32=lambda: False):
        measure("Regard, gradient accumulated separately", run)
    measure("Regard, R-Drop", lambda: run(2.5))
    if DEVICE == "cuda":
        without = override(cross_entropy, supports=lambda features: False)
        with without, override(losses, _rows_loss=torch.compile(losses._rows_loss, dynamic=False)):
            measure("plain cross-entropy, compiled", run)
            measure("plain cross-entropy, compiled, R-Drop", lambda: run(2.5))
        measure("formula, compiled", torch.compile(plain, dynamic=False))
    measure("formula, eager", plain)
    print(table(["loss", "ms", "GiB"], rows))


def norms(tiny: bool) -> None:
    N, E = (40, 32) if tiny else (25_600, 512)
    x, y, grad = (torch.randn(N, E, device=DEVICE).to(DTYPE) for _ in range(3))
    norm = torch.nn.LayerNorm(E).to(DEVICE)
    seed = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    arguments = (norm.weight, norm.bias, seed, 0.1, norm.eps)
    rows = []
    for cells in (512,) if tiny else (1024, 2048, 4096):
        for warps in (4,) if tiny else (4, 8):
            times = []
            for programs in (3,) if tiny else (264, 528, 1056, 2112):
                with override(add_norm, TILE_ELEMENTS=cells, WARPS=warps, PROGRAMS=programs):
                    if not times:
                        times.append(captured_milliseconds(lambda: add_norm.add_norm_forward(x, y, *arguments)))
                        total = add_norm.add_norm_forward(x, y, *arguments)[1]
                    backward_arguments = (grad, None, total, norm.weight, True, seed, 0.1, norm.eps)
                    times.append(captured_milliseconds(lambda a=backward_arguments: add_norm.add_norm_backward(*a)))
            rows.append([f"{cells} cells, {warps} warps", *(f"{1e3 * ms:.0f}" for ms in times)])
            print(*rows[-1], flush=True)
    copy = captured_milliseconds(lambda: (x.clone(), y.clone()))
    print(
        table(
            ["", "forward µs", "backward µs with 264, 528, 1056, 2112 programs"],
            [[a, b, " ".join(c)] for a, b, *c in rows],
        )
    )
    print(f"two copies of such a tensor: {1e3 * copy:.0f} µs")


PARTS = {"attention": attention, "loss": loss, "norms": norms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the script")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options.tiny)


if __name__ == "__main__":
    main()
