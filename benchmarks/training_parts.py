"""The parts of a training step that are kernels of our own, each alone, beside what torch has.

    python benchmarks/training_parts.py --only attention

Attention over packed sentences: 25,600 tokens, 8 heads of 64, forward and backward, by how long the sentences are; the
tilings beside each other; and the error against float64. The loss: 25,600 features of 512, 32,000 entries, label
smoothing, forward and backward together, beside its three matrix products alone. About a minute each.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from gpu_common import changed, milliseconds, sentence_lengths, table

from regard.attention import Offsets, ScaledDot, attend, causal, use
from regard.attention.kernels import sentences
from regard.attention.kernels.sentences import Tiling
from regard.attention.reference import reference_packed
from regard.train import losses, vocabulary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def packed(lengths: np.ndarray, max_len: int) -> Offsets:
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
    return Offsets(starts.to(DEVICE), int(lengths.sum()), max_len)


def error(heads: int, width: int, lengths: np.ndarray, max_len: int, masked: bool) -> list[float]:
    """‖found − exact‖ / ‖exact‖ of the output and the three gradients."""
    offsets = packed(lengths, max_len)
    there = Offsets(offsets.starts.cpu(), offsets.total, offsets.max_len)
    q, k, v, grad = (torch.randn(offsets.total, heads, width, device=DEVICE).to(WIDE) for _ in range(4))
    mask = causal() if masked else None

    def both(function, tensors, grad):
        out = function(*tensors)
        return [out, *torch.autograd.grad(out, tensors, grad)]

    def ours(q, k, v):
        with use("sentences"):
            return attend(q, k, v, mask=mask, q_offsets=offsets, k_offsets=offsets)

    found = both(ours, [x.clone().requires_grad_() for x in (q, k, v)], grad)
    exact = both(
        lambda q, k, v: reference_packed(q, k, v, ScaledDot(), mask, None, there, there),
        [x.double().cpu().requires_grad_() for x in (q, k, v)],
        grad.double().cpu(),
    )
    return [float(((one.double().cpu() - other).norm() / other.norm()).detach()) for one, other in zip(found, exact)]


def attention(tiny: bool) -> None:
    tokens, heads, width = (64, 2, 16) if tiny else (25_600, 8, 64)
    generator = np.random.default_rng(0)
    rows = []
    for d in (16,) if tiny else (32, 64, 80, 128):
        for longest in (16,) if tiny else (16, 32, 64, 128):
            lengths = generator.integers(0, longest + 1, 3 if tiny else 40)
            for masked in (False, True):
                errors = error(3, d, lengths, longest, masked)
                rows.append([f"{d}, {longest}, {'causal' if masked else 'all'}", *(f"{e:.1e}" for e in errors)])
    print(table(["width, longest, mask", "output", "dq", "dk", "dv"], rows), flush=True)

    lengths = sentence_lengths(8 * tokens // 8, 128, seed=1)
    timed = []
    for low, longest in ((1, 16),) if tiny else ((9, 16), (17, 32), (33, 64), (65, 128)):
        of_size = lengths[(lengths >= low) & (lengths <= longest)]
        of_size = of_size[: int(np.searchsorted(np.cumsum(of_size), tokens))]
        offsets = packed(of_size, longest)
        q, grad = (torch.randn(offsets.total, heads, width, device=DEVICE).to(WIDE) for _ in range(2))
        # As a layer gives them: halves of one tensor.
        keys_values = torch.randn(offsets.total, 2, heads, width, device=DEVICE).to(WIDE)
        k, v = (x.requires_grad_() for x in keys_values.unbind(1))
        q.requires_grad_()
        for masked in (False, True):
            mask = causal() if masked else None

            def run(kernel: str, q=q, k=k, v=v, mask=mask, offsets=offsets):
                with use(kernel):
                    return attend(q, k, v, mask=mask, q_offsets=offsets, k_offsets=offsets)

            def measure(kernel: str, run=run, q=q, k=k, v=v, grad=grad) -> tuple[float, float]:
                with torch.no_grad():
                    forward = milliseconds(lambda: run(kernel))
                out = run(kernel)
                return forward, milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))

            variants = {}
            for tiling in [
                *(Tiling(r, c) for r in (32, 64) for c in ((1024,) if tiny else (512, 1024, 2048))),
                *([] if tiny else [Tiling(16, 512), Tiling(16, 1024)]),
            ]:
                with changed(sentences, FORWARD=tiling, BACKWARD=tiling):
                    variants[tiling] = measure("sentences")
            row = [f"{len(of_size)} of {low}–{longest}, {'causal' if masked else 'all'}"]
            for way in (0, 1):
                best = min(variants, key=lambda tiling: variants[tiling][way])
                row += [
                    " ".join(f"{r}/{c}:{1e3 * variants[r, c][way]:.0f}" for r, c in variants),
                    f"{best.rows}/{best.cells}",
                ]
            chosen = measure("sentences")
            theirs = measure("varlen") if DEVICE == "cuda" else (float("nan"),) * 2
            timed.append([row[0], *(f"{1e3 * x:.0f}" for x in (*chosen, *theirs)), row[2], row[4]])
            print(f"{row[0]}: forward {row[1]}; backward {row[3]}", flush=True)
    head = ["sentences", "forward µs", "backward µs", "varlen forward", "varlen backward", "best tiling", "backward"]
    print(table(head, timed))


def loss(tiny: bool) -> None:
    N, E, V = (40, 16, 50) if tiny else (25_600, 512, 32_000)
    features, twin = (torch.randn(N, E, device=DEVICE).to(WIDE).requires_grad_() for _ in range(2))
    weight = (torch.randn(V, E, device=DEVICE) * E**-0.5).requires_grad_()
    targets = torch.randint(0, V, (N,), device=DEVICE)
    targets[::10] = -1
    narrow = weight.detach().to(WIDE)
    rows = []

    def run(divergence: float = 0.0, features=features) -> list[torch.Tensor]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            other = twin if divergence else None
            parts = losses.token_loss(features, weight, targets, 0.1, other, divergence)
        return [parts.loss, *torch.autograd.grad(parts.loss, [features, weight])]

    def plain() -> list[torch.Tensor]:
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
        with changed(vocabulary, CELLS=cells):
            enter(f"ours, 2^{cells.bit_length() - 1} logits at a time", run)
    for block, warps in (
        ((16, 4),) if tiny else ((2048, 4), (4096, 4), (8192, 8), (16384, 16), (32768, 16), (32768, 32))
    ):
        with changed(vocabulary, BLOCK=block, WARPS=warps):
            enter(f"ours, {block} columns by {warps} warps", run)
    with changed(vocabulary, _adds_in_float32=lambda: False):
        enter("ours, products added in a pass of its own", run)
    enter("ours, R-Drop", lambda: run(2.5))
    if DEVICE == "cuda":
        without = changed(vocabulary, takes=lambda features: False)
        with without, changed(losses, _rows_loss=torch.compile(losses._rows_loss, dynamic=False)):
            enter("the plain sweep, compiled", run)
            enter("the plain sweep, compiled, R-Drop", lambda: run(2.5))
        enter("torch.compile of the formula", torch.compile(plain, dynamic=False))
    enter("the formula, eager", plain)
    print(table(["loss", "ms", "GiB"], rows))


PARTS = {"attention": attention, "loss": loss}


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
