"""The parts of a training step that are kernels of our own, each alone, beside what torch has.

    python benchmarks/training_parts.py --only attention

Attention over packed sentences: 25,600 tokens, 8 heads of 64, forward and backward, by how long the sentences are; the
tilings beside each other; and the error against float64. Bounded to about a minute each.
"""

import argparse
import contextlib

import numpy as np
import torch
from gpu_common import milliseconds, sentence_lengths, table

from regard.attention import Offsets, ScaledDot, attend, causal, use
from regard.attention.kernels import sentences
from regard.attention.kernels.sentences import Tiling
from regard.attention.reference import reference_packed

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


@contextlib.contextmanager
def tilings(forward: Tiling, backward: Tiling):
    before = sentences.FORWARD, sentences.BACKWARD
    sentences.FORWARD, sentences.BACKWARD = forward, backward
    try:
        yield
    finally:
        sentences.FORWARD, sentences.BACKWARD = before


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
                with tilings(tiling, tiling):
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


PARTS = {"attention": attention}


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
