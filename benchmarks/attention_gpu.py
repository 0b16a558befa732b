"""Scaled dot attention on a GPU: `attend` against each backend of SDPA, and two encodings of padding masks.

    python benchmarks/attention_gpu.py --lengths 1024 4096 16384

Measures plain and causal attention, padding (for which most backends have no fast path), and cosine and general scores.
Each encoding is checked against the reference in float64 before it is timed. Rates count only pairs that the mask
allows.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.attention import attend
from regard.attention.backends.sdpa import _append_mask_column
from regard.attention.masks import KeyPadding
from regard.attention.reference import reference
from regard.bench import AttentionShape, BenchReport, Measurement
from regard.bench.attention_speed import SHAPES, AttentionCase, measure_overhead
from regard.bench.measurement import Implementation, Unsupported, compare, measure_ceilings
from regard.bench.peers import BACKENDS, flex, sdpa

PaddedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]
aten = torch.ops.aten


def cudnn_with_bias(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool) -> Tensor:
    bias = KeyPadding.from_lengths(lengths, k.shape[2], k.device, k.dtype).bias
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, torch.is_grad_enabled(), 0.0, causal, False)[0]


def cudnn_with_mask_channel(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool) -> Tensor:
    scale, allowed = q.shape[-1] ** -0.5, KeyPadding.from_lengths(lengths, k.shape[2], k.device, k.dtype).allowed
    q, k = (pad(x, (0, 7)) for x in _append_mask_column(q, k, ~allowed))
    grad = torch.is_grad_enabled()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, grad, 0.0, causal, False, scale=scale)[0]


ENCODINGS: dict[str, PaddedAttention] = {
    "cuDNN, row bias": cudnn_with_bias,
    "cuDNN, mask as channel": cudnn_with_mask_channel,
}


def plain_implementations(case: AttentionCase) -> Iterator[Implementation]:
    q, k, v = case.inputs()
    score, mask, peer_mask = case.make_score(), case.make_mask(), case.make_mask(case.device)

    def regard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score=score, mask=mask)

    yield Implementation("Regard", lambda: case.step(regard_attention, score, q, k, v), is_regard=True)
    dot = replace(case, score="scaled_dot").make_score()
    for backend in (None, *BACKENDS):
        name = f"SDPA, {backend}" if backend else "SDPA"
        yield Implementation(name, lambda backend=backend: case.step(sdpa(dot, peer_mask, backend), dot, q, k, v))


def padded_implementations(case: AttentionCase, include_flex: bool) -> Iterator[Implementation]:
    yield from plain_implementations(case)
    q, k, v = case.inputs()
    lengths, score = case.lengths().to(case.device), case.make_score()
    causal = "causal" in case.mask
    for name, attention in ENCODINGS.items():
        check = replace(case, shape=AttentionShape(2 * 512, 2, case.shape.width), length=512)

        def prepare(attention: PaddedAttention = attention, check: AttentionCase = check) -> Callable[[], None]:
            _check(attention, check, causal)
            return case.step(lambda q, k, v: attention(q, k, v, lengths, causal), score, q, k, v)

        yield Implementation(name, prepare)
    if include_flex:
        yield Implementation(
            "FlexAttention", lambda: case.step(flex(score, case.make_mask(case.device), q, k), score, q, k, v)
        )


def _check(attention: PaddedAttention, case: AttentionCase, causal: bool) -> None:
    """Compare output and gradients with the reference in float64."""
    inputs = [x.detach().requires_grad_() for x in case.inputs()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn_like(inputs[2])
    out = attention(*inputs, case.lengths().to(case.device), causal)
    expected = reference(*exact, case.make_score().double(), case.make_mask())
    pairs = [(out, expected)]
    pairs += zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, exact, grad.double()))
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    if not worst < 0.01:
        raise Unsupported(f"wrong result: relative error {worst:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=SHAPES["cuda"].tokens)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file for all measurements")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = replace(SHAPES["cuda"], tokens=options.tokens)
    ceilings = measure_ceilings(device, dtype)
    rows = []
    cases = [("scaled_dot", mask) for mask in ("none", "causal", "padding", "causal+padding")]
    cases += [("cosine", "none"), ("general", "none")]
    for score, mask in cases:
        for length in options.lengths:
            for backward in (False, True):
                case = AttentionCase(score, mask, length, backward, shape, device, dtype)
                if "padding" in mask:
                    include_flex = length == 4096 and device.type == "cuda"
                    implementations = padded_implementations(case, include_flex)
                else:
                    implementations = plain_implementations(case)
                measurements = compare(
                    case.name, list(implementations), case.work(), ceilings, device, options.rounds, length
                )
                print_summary(measurements, [length])  # at once, so that an interrupted run has partial results
                rows += measurements
    rows += measure_overhead(ceilings, device, dtype, options.rounds)
    report = BenchReport("scaled dot", ceilings, rows)
    if options.out:
        report.save(options.out)
    print(f"cuDNN {torch.backends.cudnn.version()}, order of backends {torch._C._get_sdp_priority_order()}")
    print(report.ceilings.machine)
    print_summary(rows, options.lengths)


def print_summary(rows: list[Measurement], lengths: list[int]) -> None:
    """Print a line per case and implementation: TFLOP/s of the allowed pairs at each length, or why it failed."""
    print(f"| case | implementation | {' | '.join(map(str, lengths))} |\n| --- | --- |{' ---: |' * len(lengths)}")
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.rate is not None:
            cell = f"{row.rate / 1e12:.1f}"
        else:
            cell = f"{row.seconds * 1e6:.1f} µs" if row.seconds else row.note[:40]
        lines.setdefault((row.case, row.implementation), []).append(cell)
    for (case, implementation), cells in lines.items():
        unique = dict.fromkeys(cells) if len(set(cells)) == 1 else cells
        print(f"| {case} | {implementation} | {' | '.join(unique)} |", flush=True)


if __name__ == "__main__":
    main()
