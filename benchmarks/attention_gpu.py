"""Scaled dot attention on a GPU: `attend` beside each backend of SDPA, and the two ways to say which keys are real.

    python benchmarks/attention_gpu.py --lengths 1024 4096 16384

First plain and causal attention, and cosine and general; then padding, where most fall off the fast path. Each way is
checked against the definition in float64 before it is timed. Speeds are of the pairs that the mask allows.
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
from regard.bench import Row, Shape
from regard.bench.attention_speed import SHAPES, Case, overhead
from regard.bench.bench_report import Report
from regard.bench.measurement import Cannot, Entrant, compare, measure_ceilings
from regard.bench.peers import BACKENDS, flex, sdpa

Way = Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]
aten = torch.ops.aten


def cudnn_bias(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool) -> Tensor:
    bias = KeyPadding.from_lengths(lengths, k.shape[2], k.device, k.dtype).bias
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, torch.is_grad_enabled(), 0.0, causal, False)[0]


def cudnn_width(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool) -> Tensor:
    scale, allowed = q.shape[-1] ** -0.5, KeyPadding.from_lengths(lengths, k.shape[2], k.device, k.dtype).allowed
    q, k = (pad(x, (0, 7)) for x in _append_mask_column(q, k, ~allowed))
    grad = torch.is_grad_enabled()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, grad, 0.0, causal, False, scale=scale)[0]


WAYS: dict[str, Way] = {"cuDNN, bias of a row": cudnn_bias, "cuDNN, mask as width": cudnn_width}


def plain_entrants(case: Case) -> Iterator[Entrant]:
    q, k, v = case.inputs()
    score, mask, theirs = case.make_score(), case.make_mask(), case.make_mask(case.device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score=score, mask=mask)

    yield Entrant("Regard", lambda: case.step(ours, score, q, k, v), ours=True)
    dot = replace(case, score="scaled_dot").make_score()
    for backend in (None, *BACKENDS):
        name = f"SDPA, {backend}" if backend else "SDPA"
        yield Entrant(name, lambda backend=backend: case.step(sdpa(dot, theirs, backend), dot, q, k, v))


def padded_entrants(case: Case, flexible: bool) -> Iterator[Entrant]:
    yield from plain_entrants(case)
    q, k, v = case.inputs()
    lengths, score = case.lengths().to(case.device), case.make_score()
    causal = "causal" in case.mask
    for name, way in WAYS.items():
        check = replace(case, shape=Shape(2 * 512, 2, case.shape.width), length=512)

        def ready(way: Way = way, check: Case = check) -> Callable[[], None]:
            _check(way, check, causal)
            return case.step(lambda q, k, v: way(q, k, v, lengths, causal), score, q, k, v)

        yield Entrant(f"way: {name}", ready)
    if flexible:
        yield Entrant(
            "FlexAttention", lambda: case.step(flex(score, case.make_mask(case.device), q, k), score, q, k, v)
        )


def _check(way: Way, case: Case, causal: bool) -> None:
    """Outputs and gradients beside the definition's in float64."""
    inputs = [x.detach().requires_grad_() for x in case.inputs()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn_like(inputs[2])
    out = way(*inputs, case.lengths().to(case.device), causal)
    wanted = reference(*exact, case.make_score().double(), case.make_mask())
    pairs = [(out, wanted)]
    pairs += zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, exact, grad.double()))
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    if not worst < 0.01:
        raise Cannot(f"wrong: relative error {worst:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=SHAPES["cuda"].tokens)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="a JSON file of all rows")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = replace(SHAPES["cuda"], tokens=options.tokens)
    ceilings = measure_ceilings(device, dtype)
    rows = []
    todo = [("scaled_dot", mask) for mask in ("none", "causal", "padding", "causal+padding")]
    todo += [("cosine", "none"), ("general", "none")]
    for score, mask in todo:
        for length in options.lengths:
            for backward in (False, True):
                case = Case(score, mask, length, backward, shape, device, dtype)
                flexible = length == 4096 and device.type == "cuda"
                entrants = padded_entrants(case, flexible) if "padding" in mask else plain_entrants(case)
                found = compare(case.name, list(entrants), case.work(), ceilings, device, options.rounds, length)
                print_short(found, [length])  # as it comes: a run that is cut off has told something
                rows += found
    rows += overhead(ceilings, device, dtype, options.rounds)
    report = Report("scaled dot", ceilings, rows)
    if options.out:
        report.save(options.out)
    print(f"cuDNN {torch.backends.cudnn.version()}, order of backends {torch._C._get_sdp_priority_order()}")
    print(report.ceilings.machine)
    print_short(rows, options.lengths)


def print_short(rows: list[Row], lengths: list[int]) -> None:
    """A line for each case and entrant: TFLOP/s of the allowed pairs at each length, or why there are none."""
    print(f"| case | entrant | {' | '.join(map(str, lengths))} |\n| --- | --- |{' ---: |' * len(lengths)}")
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.rate is not None:
            said = f"{row.rate / 1e12:.1f}"
        else:
            said = f"{row.seconds * 1e6:.1f} µs" if row.seconds else row.note[:40]
        lines.setdefault((row.case, row.implementation), []).append(said)
    for (case, entrant), cells in lines.items():
        said = dict.fromkeys(cells) if len(set(cells)) == 1 else cells
        print(f"| {case} | {entrant} | {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    main()
