"""The parts of a training step that are kernels of our own, each alone, beside what torch has.

    python benchmarks/training_parts.py --only attention

Attention over packed sentences: the error against float64; then 25,600 tokens, 8 heads of 64, forward and backward, by
how long the sentences are, with the tilings that may be fastest beside each other and beside torch's variable-length
attention; the best come last. The loss: 25,600 features of 512, 32,000 entries, label smoothing, forward and backward
together, beside its three matrix products alone. Norms: norm(x + dropout(y)) of 25,600 rows of 512. At most a minute
each. To see on a CPU whether the script runs:

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
from gpu_common import changed, milliseconds, sentence_lengths, table
from torch import Tensor

from regard.attention import Offsets, ScaledDot, attend, causal, use
from regard.attention.reference import reference_packed
from regard.kernels import add_norm_cuda, cross_entropy_cuda, varlen_short_cuda
from regard.kernels.varlen_short_cuda import VarlenTiling as Tiling
from regard.training import losses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


# By the longest sentence: what may be fastest, today's choice first. Chosen by registers, spills and instructions.
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
    """In a graph, as in training: launching one by one takes the CPU longer than the GPU computes."""
    if DEVICE == "cpu":
        return milliseconds(function)
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(function, rep=10, return_mode="median")


class Given(NamedTuple):
    """What both operators are given: sentences of up to `longest` tokens, and empty ones as training's batches have."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    offsets: Offsets
    masked: bool

    @staticmethod
    def of(lengths: np.ndarray, longest: int, masked: bool, width: int = WIDTH) -> "Given":
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
        offsets = Offsets(starts.to(DEVICE), int(lengths.sum()), longest)
        q, grad = (torch.randn(offsets.total, HEADS, width, device=DEVICE).to(WIDE) for _ in range(2))
        # As a layer gives them: halves of one tensor.
        k, v = torch.randn(offsets.total, 2, HEADS, width, device=DEVICE).to(WIDE).unbind(1)
        return Given(q, k, v, grad, offsets, masked)

    @property
    def _rest(self) -> tuple:
        starts, longest = self.offsets.starts, self.offsets.max_len
        return starts, starts, longest, longest, self.q.shape[-1] ** -0.5, self.masked

    def forward(self, tiling: Tiling | None = None) -> tuple[Tensor, ...]:
        table = varlen_short_cuda.FORWARD if tiling is None else {varlen_short_cuda.MAX_ELEMENTS: tiling}
        with changed(varlen_short_cuda, FORWARD=table):
            return (varlen_short_cuda.varlen_short_forward(self.q, self.k, self.v, *self._rest),)

    def backward(self, tiling: Tiling | None = None) -> tuple[Tensor, ...]:
        table = varlen_short_cuda.BACKWARD if tiling is None else {varlen_short_cuda.MAX_ELEMENTS: tiling}
        with changed(varlen_short_cuda, BACKWARD=table):
            return varlen_short_cuda.varlen_short_backward(self.grad, self.q, self.k, self.v, *self._rest)

    def microseconds(self, way: str, tiling: Tiling, first: Tiling) -> float:
        """Infinite where it does not run, or gives something else than the first."""
        run = getattr(self, way)
        try:
            if not all(relative(x, y) < 1e-2 for x, y in zip(run(tiling), run(first))):
                return math.inf
        except Exception as problem:  # too many registers, or too much shared memory
            print("  ", way, tiling, str(problem)[:100], flush=True)
            return math.inf
        return 1e3 * captured_milliseconds(partial(run, tiling))

    def theirs(self) -> tuple[float, float]:
        """Milliseconds of torch's variable-length attention."""
        tensors = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        given = dict(mask=causal() if self.masked else None, q_offsets=self.offsets, k_offsets=self.offsets)

        def run() -> Tensor:
            with use("varlen"):
                return attend(*tensors, **given)

        with torch.no_grad():
            forward = milliseconds(run, 10)
        out = run()
        return forward, milliseconds(lambda: torch.autograd.grad(out, tensors, self.grad, retain_graph=True), 10)


def error(longest: int, masked: bool, width: int) -> list[float]:
    """‖found − exact‖ / ‖exact‖ of the output and the three gradients."""
    given = Given.of(
        np.random.default_rng(0).integers(0, longest + 1, 3 if DEVICE == "cpu" else 40), longest, masked, width
    )
    there = Offsets(given.offsets.starts.cpu(), given.offsets.total, longest)
    exact = [x.double().cpu().requires_grad_() for x in (given.q, given.k, given.v)]
    out = reference_packed(*exact, ScaledDot(), causal() if masked else None, None, there, there)
    expected = [out, *torch.autograd.grad(out, exact, given.grad.double().cpu())]
    return [relative(x.cpu(), y) for x, y in zip([*given.forward(), *given.backward()], expected)]


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


def compile_one(task: tuple[str, int, bool, int, Tiling | None]) -> None:
    """What is compiled is kept on disk."""
    way, longest, masked, width, tiling = task
    try:
        getattr(Given.of(np.array([longest, 0]), longest, masked, width), way)(tiling)
        torch.cuda.synchronize()
    except Exception as problem:  # whoever asks for it meets it again
        print("  ", task, str(problem)[:100], flush=True)


def attention(tiny: bool) -> None:
    began = time.time()
    sizes = (16,) if tiny else (16, 32, 64, 128)
    checked = [(16, True, 16)] if tiny else [(s, m, 64) for s in sizes for m in (False, True)]
    checked += [] if tiny else [(64, True, 80), (64, False, 128), (128, True, 32)]
    tilings = {"forward": FORWARD, "backward": BACKWARD}
    tasks = [(way, *case, None) for way in tilings for case in checked]
    for way, table_of in tilings.items():
        tasks += [(way, s, m, WIDTH, one) for s in sizes for m in (False, True) for one in table_of[s]]
    if DEVICE == "cuda":
        with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_one, tasks))
    print(f"compiled {len(tasks)} kernels after {time.time() - began:.0f} s", flush=True)
    rows = [
        [f"{s}, {'causal' if masked else 'all'}, {width}", *(f"{e:.1e}" for e in error(s, masked, width))]
        for s, masked, width in checked
    ]
    print(table(["longest, mask, width", "output", "dq", "dk", "dv"], rows))
    print(f"after {time.time() - began:.0f} s", flush=True)

    drawn = sentence_lengths(8 * TOKENS, 128, seed=1)
    rows, spent = [], {}
    for longest in sizes:
        lengths = drawn[(drawn > longest // 2) & (drawn <= longest)]
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), TOKENS))]
        # Batches of a constant shape have places for sentences of eight tokens; most are empty.
        lengths = np.pad(lengths, (0, TOKENS // 8 - len(lengths)))
        for masked in (False, True):
            given = Given.of(lengths, longest, masked)
            for way, table_of in tilings.items():
                for tiling in table_of[longest]:
                    spent[way, longest, masked, tiling] = given.microseconds(way, tiling, table_of[longest][0])
            theirs = given.theirs() if DEVICE == "cuda" else (math.nan, math.nan)
            row = [f"{(lengths > 0).sum()} of up to {longest}, {'causal' if masked else 'all'}"]
            for way, other in zip(tilings, theirs):
                found = {one: spent[way, longest, masked, one] for one in tilings[way][longest]}
                row += [
                    " ".join(f"{'/'.join(map(str, one))}:{x:.0f}" for one, x in found.items()),
                    f"{1e3 * other:.0f}",
                ]
            rows.append(row)
            print(*row, sep="; ", flush=True)
    names = ["forward, rows/warps/registers: µs", "varlen forward", "backward", "varlen backward"]
    print(table(["sentences", *names], rows))
    for way, table_of in tilings.items():
        best = {
            s: min(table_of[s], key=lambda one: spent[way, s, False, one] + spent[way, s, True, one]) for s in sizes
        }
        print(f"best {way}:", *(f"{s}: {tuple(one)}" for s, one in best.items()), f"({time.time() - began:.0f} s)")


def loss(tiny: bool) -> None:
    N, E, V = (40, 16, 50) if tiny else (25_600, 512, 32_000)
    features, twin = (torch.randn(N, E, device=DEVICE).to(WIDE).requires_grad_() for _ in range(2))
    weight = (torch.randn(V, E, device=DEVICE) * E**-0.5).requires_grad_()
    targets = torch.randint(0, V, (N,), device=DEVICE)
    targets[::10] = -1
    narrow = weight.detach().to(WIDE)
    rows = []

    def run(divergence: float = 0.0, features=features) -> list[Tensor]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            other = twin if divergence else None
            parts = losses.token_loss(features, weight, targets, 0.1, other, divergence)
        return [parts.loss, *torch.autograd.grad(parts.loss, [features, weight])]

    def plain() -> list[Tensor]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = features @ weight.T
        given = dict(label_smoothing=0.1, ignore_index=-1, reduction="sum")
        found = torch.nn.functional.cross_entropy(logits.float(), targets, **given)
        return [found, *torch.autograd.grad(found, [features, weight])]

    def products() -> None:
        logits = features.detach() @ narrow.T
        logits @ narrow
        logits.T @ features.detach()

    def enter(name: str, function: Callable[[], object]) -> None:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        spent = milliseconds(function)
        memory = (torch.cuda.max_memory_allocated() - before) / 2**30 if DEVICE == "cuda" else 0.0
        rows.append([name, f"{spent:.2f}", f"{memory:.2f}"])
        print(*rows[-1], flush=True)

    exact = [x.double() for x in plain()]
    errors = [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(run(), exact)]
    print("against float32 logits, loss and gradients by features and weights:", *(f"{e:.1e}" for e in errors))
    enter("the three products", products)
    enter("ours", run)
    for cells in (2**12,) if tiny else (2**26, 2**27, 2**29, 2**30):
        with changed(cross_entropy_cuda, CHUNK_ELEMENTS=cells):
            enter(f"ours, 2^{cells.bit_length() - 1} logits at a time", run)
    for block, warps in (
        ((16, 4),) if tiny else ((2048, 4), (4096, 4), (8192, 8), (16384, 16), (32768, 16), (32768, 32))
    ):
        with changed(cross_entropy_cuda, BLOCK=block, WARPS=warps):
            enter(f"ours, {block} columns by {warps} warps", run)
    with changed(cross_entropy_cuda, _accumulates_in_float32=lambda: False):
        enter("ours, products added in a pass of its own", run)
    enter("ours, R-Drop", lambda: run(2.5))
    if DEVICE == "cuda":
        without = changed(cross_entropy_cuda, supports=lambda features: False)
        with without, changed(losses, _rows_loss=torch.compile(losses._rows_loss, dynamic=False)):
            enter("the plain sweep, compiled", run)
            enter("the plain sweep, compiled, R-Drop", lambda: run(2.5))
        enter("torch.compile of the formula", torch.compile(plain, dynamic=False))
    enter("the formula, eager", plain)
    print(table(["loss", "ms", "GiB"], rows))


def norms(tiny: bool) -> None:
    N, E = (40, 32) if tiny else (25_600, 512)
    x, y, grad = (torch.randn(N, E, device=DEVICE).to(WIDE) for _ in range(3))
    norm = torch.nn.LayerNorm(E).to(DEVICE)
    seed = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    given = (norm.weight, norm.bias, seed, 0.1, norm.eps)
    rows = []
    for cells in (512,) if tiny else (1024, 2048, 4096):
        for warps in (4,) if tiny else (4, 8):
            times = []
            for programs in (3,) if tiny else (264, 528, 1056, 2112):
                with changed(add_norm_cuda, TILE_ELEMENTS=cells, WARPS=warps, PROGRAMS=programs):
                    if not times:
                        times.append(captured_milliseconds(lambda: add_norm_cuda.add_norm_forward(x, y, *given)))
                        total = add_norm_cuda.add_norm_forward(x, y, *given)[1]
                    back = (grad, None, total, norm.weight, True, seed, 0.1, norm.eps)
                    times.append(captured_milliseconds(lambda back=back: add_norm_cuda.add_norm_backward(*back)))
            rows.append([f"{cells} cells, {warps} warps", *(f"{1e3 * ms:.0f}" for ms in times)])
            print(*rows[-1], flush=True)
    copied = captured_milliseconds(lambda: (x.clone(), y.clone()))
    print(
        table(
            ["", "forward µs", "backward µs with 264, 528, 1056, 2112 programs"],
            [[a, b, " ".join(c)] for a, b, *c in rows],
        )
    )
    print(f"two copies of such a tensor: {1e3 * copied:.0f} µs")


PARTS = {"attention": attention, "loss": loss, "norms": norms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options.tiny)


if __name__ == "__main__":
    main()
