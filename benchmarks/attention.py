"""Attention: time of `attend` for every score and mask, against the formula, SDPA and FlexAttention.

    python benchmarks/attention.py --out attention.json
    python benchmarks/attention.py --device cpu --scores concat --masks none --lengths 512 2048 --tokens 1024 --heads 4
    python benchmarks/attention.py --growth --plot growth.png

Each case is measured forward, and forward and backward; the last rows are the overhead of a call. Rates count only
pairs that the mask allows. On a GPU, SDPA is measured with each backend (cosine and general against scaled dot), and
padding also in two encodings of cuDNN, each checked against the reference in float64. Compiled peers take seconds per
case, so they run for scaled dot and concat without a mask only, and on a GPU for scaled dot with every mask.

--growth measures time and peak memory over the length: Regard and the formula, forward and backward, one sequence. An
implementation stops when it runs out of memory or when the next call would exceed the limits.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from measurement import (
    DTYPES,
    Implementation,
    Measurement,
    Report,
    Roofline,
    Unsupported,
    Work,
    compare,
    format_bytes,
    format_seconds,
    free_memory,
    measure_roofline,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.attention import SCORES, Dot, Mask, ScaledDot, Score, attend, causal, explain, make_score, padding
from regard.attention.backends.sdpa import _append_mask_column
from regard.attention.masks import KeyPadding, MaskParts
from regard.attention.reference import reference
from regard.devices import find_device

MASKS = ("none", "causal", "padding", "causal+padding")
PASSES = ("forward", "forward+backward")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a call; `tokens` is the total number of queries in a batch, independent of the length."""

    tokens: int
    heads: int
    width: int = 64
    hidden: int = 64

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


SHAPES = {"cpu": AttentionShape(512, 4), "mps": AttentionShape(2048, 8), "cuda": AttentionShape(32768, 16)}
LENGTHS = {"cpu": (256,), "mps": (1024,), "cuda": (1024, 4096)}
# With --growth: one sequence.
GROWTH_HEADS = {"cpu": 1, "mps": 4, "cuda": 8}
GROWTH_LENGTHS = {
    "cpu": (128, 256, 512, 1024, 2048),
    "mps": (512, 1024, 2048, 4096),
    "cuda": tuple(2**n for n in range(9, 17)),
}
MAX_SECONDS = 2.0


@dataclass(frozen=True)
class AttentionCase:
    """One score, mask and length; forward, or forward and backward."""

    score: str
    mask: str
    length: int
    backward: bool
    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype

    def measure(self, roofline: Roofline, compiled: bool, rounds: int) -> list[Measurement]:
        q, k, v = self.inputs()
        score, mask = self.make_score(), self.make_mask()

        def regard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, score=score, mask=mask)

        implementations = [
            Implementation("Regard", lambda: self.step(regard_attention, score, q, k, v), is_regard=True)
        ]
        for name, make in peer_attentions(self, score, q, k, compiled):
            implementations.append(Implementation(name, lambda make=make: self.step(make(), score, q, k, v)))
        rows = compare(self.name, implementations, self.work(), roofline, self.device, rounds, self.length)
        with explain() as choices, torch.no_grad():
            regard_attention(q, k, v)
        kernel = f"kernel {choices[0].backend}"
        return [replace(row, note=kernel) if row.is_regard and row.seconds else row for row in rows]

    @property
    def name(self) -> str:
        mask = "" if self.mask == "none" else f", {self.mask}"
        return f"{self.score}{mask}, {PASSES[self.backward]}"

    @property
    def batch(self) -> int:
        return self.shape.batch(self.length)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        size = (self.batch, self.shape.heads, self.length, self.shape.width)
        q, k, v = (
            torch.randn(size, device=self.device, generator=generator).to(self.dtype).requires_grad_(self.backward)
            for _ in range(3)
        )
        return q, k, v

    def make_score(self) -> Score:
        width = self.shape.width
        score = make_score(self.score, width, width, hidden=self.shape.hidden, max_keys=self.length)
        return score.to(self.device).requires_grad_(self.backward)

    def lengths(self) -> Tensor:
        """Lengths from half to all of `length`; three quarters if there is only one sequence."""
        if self.batch == 1:
            return torch.tensor([max(1, 3 * self.length // 4)])
        return torch.linspace(self.length / 2, self.length, self.batch).ceil().long()

    def make_mask(self, device: torch.device | None = None) -> Mask | None:
        """The mask; lengths are on the CPU by default, which `padding` prefers, or on `device`, as peers need."""
        match self.mask:
            case "causal":
                return causal()
            case "padding":
                return padding(self.lengths().to(device))
            case "causal+padding":
                return causal() & padding(self.lengths().to(device))
        return None

    def pairs(self) -> float:
        """Number of (query, key) pairs that the mask allows, over all sequences."""
        N = self.length
        if self.mask in ("none", "causal"):
            return self.batch * (N * N if self.mask == "none" else N * (N + 1) / 2)
        lengths = self.lengths().double()
        if self.mask == "padding":
            return float((lengths * N).sum())
        return float((lengths * (lengths + 1) / 2 + (N - lengths) * lengths).sum())

    def work(self) -> Work:
        """Two matrix products forward, five more backward; q, k, v and output once, and again with their gradients."""
        shape, pairs = self.shape, self.pairs() * self.shape.heads
        flops = pairs * shape.width * (14 if self.backward else 4)
        size = self.batch * shape.heads * self.length * shape.width * self.dtype.itemsize
        bytes_moved = size * (12 if self.backward else 4)
        if self.score != "concat":
            return Work(flops, bytes_moved)
        return Work(0.0, bytes_moved, pairs * shape.hidden, pairs * shape.hidden, " elements/s")

    def step(self, attention: Attention, score: Score, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
        if not self.backward:
            return torch.no_grad()(lambda: attention(q, k, v))
        inputs = [q, k, v, *score.parameters()]
        grad = torch.randn_like(v)

        def step() -> None:
            # The location score does not depend on the keys, and peers of other scores not on their parameters.
            torch.autograd.grad(attention(q, k, v), inputs, grad, allow_unused=True)

        return step


# -- peers ------------------------------------------------------------------------------------------------------------


def peer_attentions(
    case: AttentionCase, score: Score, q: Tensor, k: Tensor, compiled: bool
) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Names and factories of all peers of one case; `compiled` includes those that take seconds to compile."""
    mask = case.make_mask(case.device)
    yield "formula, eager", lambda: formula(score, mask)
    if compiled:
        yield "formula, compiled", lambda: compiled_formula(score, mask)
    is_dot_product = type(score) in (Dot, ScaledDot)
    if is_dot_product or (q.is_cuda and case.score in ("cosine", "general")):
        like, suffix = (score, "") if is_dot_product else (ScaledDot(), " (scaled dot)")
        for backend in (None, *(BACKENDS if q.is_cuda else ())):
            name = f"SDPA, {backend}{suffix}" if backend else f"SDPA{suffix}"
            yield name, functools.partial(sdpa, like, mask, backend)
    if is_dot_product and q.is_cuda and "padding" in case.mask:
        for name, encoding in ENCODINGS.items():
            yield name, functools.partial(checked_encoding, encoding, case)
    if is_dot_product and compiled:
        yield "FlexAttention", lambda: flex(score, mask, q, k)


def formula(score: Score, mask: Mask | None) -> Attention:
    """The definition of attention, which builds the T×S matrix."""
    return lambda q, k, v: reference(q, k, v, score, mask)


def compiled_formula(score: Score, mask: Mask | None, dynamic: bool = False) -> Attention:
    """The definition, compiled: for one shape or, if `dynamic`, for all shapes."""
    torch.compiler.reset()  # otherwise earlier shapes would affect the compilation of this case
    return torch.compile(formula(score, mask), dynamic=dynamic)


def sdpa(score: Score, mask: Mask | None, backend: str | None = None) -> Attention:
    """torch's scaled_dot_product_attention, with the mask in its cheapest supported form."""
    form, scale = MaskParts.from_mask(mask), 1.0 if type(score) is Dot else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        allowed = _attn_mask(form, q, k)
        causal = form.causal and allowed is None
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, scale=scale)

    if backend is None:
        return attention

    def with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return attention(q, k, v)

    return with_backend


def _attn_mask(form: MaskParts, q: Tensor, k: Tensor) -> Tensor | None:
    """None for a causal mask, which is a flag; (B, 1, 1, S) for lengths; (B, 1, T, S) for both."""
    if form.lengths is None:
        return None
    T, S = q.shape[2], k.shape[2]
    s = torch.arange(S, device=q.device)
    allowed = s < form.lengths[:, None, None, None]
    return allowed & (s <= torch.arange(T, device=q.device)[:, None]) if form.causal else allowed


def flex(score: Score, mask: Mask | None, q: Tensor, k: Tensor) -> Attention:
    """FlexAttention, compiled, with a precomputed block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    form, scale = MaskParts.from_mask(mask), 1.0 if type(score) is Dot else None
    (B, _, T, _), S = q.shape, k.shape[2]
    block_mask = None
    if mask is not None:
        lengths = form.lengths

        def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            allowed = s <= t if form.causal else s >= 0
            return allowed if lengths is None else allowed & (s < lengths[b])

        block_mask = create_block_mask(mask_mod, B if lengths is not None else None, None, T, S, device=q.device.type)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=block_mask, scale=scale)


def cudnn_with_bias(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool, scale: float) -> Tensor:
    bias = KeyPadding.from_lengths(lengths, k.shape[2], k.device, k.dtype).bias
    grad = torch.is_grad_enabled()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, grad, 0.0, causal, False, scale=scale)[0]


def cudnn_with_mask_channel(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool, scale: float) -> Tensor:
    allowed = KeyPadding.from_lengths(lengths, k.shape[2], k.device, k.dtype).allowed
    q, k = (pad(x, (0, 7)) for x in _append_mask_column(q, k, ~allowed))
    grad = torch.is_grad_enabled()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, grad, 0.0, causal, False, scale=scale)[0]


ENCODINGS: dict[str, Callable[..., Tensor]] = {
    "cuDNN, row bias": cudnn_with_bias,
    "cuDNN, mask as channel": cudnn_with_mask_channel,
}


def checked_encoding(encoding: Callable[..., Tensor], case: AttentionCase) -> Attention:
    """An encoding of padding, after its output and gradients were compared with the reference in float64."""
    scale = 1.0 if case.score == "dot" else case.shape.width**-0.5

    def encoded(case: AttentionCase) -> Attention:
        lengths, causal = case.lengths().to(case.device), "causal" in case.mask
        return lambda q, k, v: encoding(q, k, v, lengths, causal, scale)

    small = replace(case, shape=AttentionShape(2 * 512, 2, case.shape.width), length=512)
    inputs = [x.detach().requires_grad_() for x in small.inputs()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn_like(inputs[2])
    out, expected = encoded(small)(*inputs), reference(*exact, small.make_score().double(), small.make_mask())
    pairs = [(out, expected)]
    pairs += zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, exact, grad.double()))
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    if not worst < 0.01:
        raise Unsupported(f"wrong result: relative error {worst:.3g}")
    return encoded(case)


# -- measurements -----------------------------------------------------------------------------------------------------


def measure_overhead(roofline: Roofline, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Measurement]:
    """Measure the overhead of `attend` with a tiny call, against torch's scaled_dot_product_attention."""
    q, k, v = (torch.randn(1, 4, n, 64, device=device).to(dtype) for n in (1, 16, 16))

    def without_gradients(function: Callable[..., Tensor]) -> Callable[[], Callable[[], Tensor]]:
        return lambda: torch.inference_mode()(lambda: function(q, k, v))

    implementations = [
        Implementation("Regard", without_gradients(attend), is_regard=True),
        Implementation("SDPA", without_gradients(scaled_dot_product_attention)),
    ]
    return compare("overhead: one query, 16 keys", implementations, Work(), roofline, device, max(rounds, 5))


def check_growth(previous: Measurement | None, length: int, memory: int, max_seconds: float = MAX_SECONDS) -> None:
    """Raise if a call of this length would exceed the limits, extrapolated quadratically from a shorter one."""
    if previous is None or previous.seconds is None or previous.length is None:
        return
    factor = (length / previous.length) ** 2
    if previous.seconds * factor > max_seconds:
        raise Unsupported(f"stopped: a call would take {format_seconds(previous.seconds * factor)}")
    if previous.memory is not None and previous.memory > 32 << 20 and previous.memory * factor > memory:
        raise Unsupported(f"out of memory: would need {format_bytes(round(previous.memory * factor))}")


def measure_growth(
    name: str, lengths: Sequence[int], shape: AttentionShape, roofline: Roofline, device: torch.device, compiled: bool,
    rounds: int,
) -> list[Measurement]:  # fmt: skip
    """Rows of one score at every length; all free memory of a GPU may be used, or half of that of a CPU up to 4 GiB."""
    free = free_memory(device)
    memory = free if device.type == "cuda" else min(4 << 30, free // 2)
    rows: list[Measurement] = []
    last: dict[str, Measurement] = {}
    case = AttentionCase(name, "none", max(lengths), True, shape, device, DTYPES[device.type])
    score = case.make_score()
    attentions = {"Regard": functools.partial(attend, score=score), "formula, eager": formula(score, None)}
    if compiled:
        attentions["formula, compiled"] = compiled_formula(score, None, dynamic=True)
    for case in (replace(case, length=length) for length in lengths):
        inputs = case.inputs()

        def prepare(label: str, case: AttentionCase = case, inputs: tuple = inputs) -> Callable[[], Any]:
            check_growth(last.get(label), case.length, memory)
            return case.step(attentions[label], score, *inputs)

        implementations = [
            Implementation(label, functools.partial(prepare, label), label == "Regard")
            for label in attentions
            if label not in last or last[label].seconds is not None
        ]
        for row in compare(name, implementations, case.work(), roofline, device, rounds, case.length):
            rows.append(row)
            last[row.implementation] = row
    return rows


def plot_growth(report: Report, path: str) -> None:
    """One row of two panels per score, time and memory, with logarithmic axes."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in report.rows))
    colors = {"Regard": "#0072b2", "formula, eager": "#d55e00", "formula, compiled": "#009e73"}
    figure = Figure(figsize=(10, 0.6 + 2.6 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for case, pair in zip(cases, panels):
        for axes, title in zip(pair, ("seconds", "peak memory, MiB")):
            for name, color in colors.items():
                rows = [row for row in report.rows if (row.case, row.implementation) == (case, name) and row.seconds]
                values = [row.seconds if title == "seconds" else (row.memory or 0) / 2**20 for row in rows]
                axes.plot([row.length for row in rows], values, color=color, marker="o", label=name)
            axes.set_title(f"{case}: {title}", fontsize=9, loc="left")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", nonpositive="mask")
            axes.set_xlabel("length", fontsize=8)
            axes.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(report.roofline.machine, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[])
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--tokens", type=int, help="queries of a batch")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="measurements per row, of which the median is reported")
    parser.add_argument("--no-compiled", action="store_true", help="leave out peers that torch.compile makes")
    parser.add_argument("--growth", action="store_true", help="time and memory over the length")
    parser.add_argument("--out", help="JSON file of the measurements")
    parser.add_argument("--plot", help="with --growth: image file of the curves")
    options = parser.parse_args()
    device, compiled = find_device(options.device), not options.no_compiled
    kind, dtype, is_cuda = device.type, DTYPES[device.type], device.type == "cuda"
    roofline, rows = measure_roofline(device, dtype), []
    if options.growth:
        shape = AttentionShape(1, options.heads or GROWTH_HEADS[kind])
        for name in options.scores:
            include = compiled and (is_cuda or name in ("scaled_dot", "concat"))
            lengths = sorted(options.lengths or GROWTH_LENGTHS[kind])
            rows += measure_growth(name, lengths, shape, roofline, device, include, options.rounds)
    else:
        shape = SHAPES[kind]
        shape = replace(shape, tokens=options.tokens or shape.tokens, heads=options.heads or shape.heads)
        for name in options.scores:
            for mask in options.masks:
                include = compiled and (
                    (mask == "none" and name in ("scaled_dot", "concat")) or (is_cuda and name == "scaled_dot")
                )
                for length in options.lengths or LENGTHS[kind]:
                    for backward in (False, True):
                        case = AttentionCase(name, mask, length, backward, shape, device, dtype)
                        rows += case.measure(roofline, include, options.rounds)
                if options.out:  # so that an interrupted run has partial results
                    Report("attention", roofline, rows).save(options.out)
        rows += measure_overhead(roofline, device, dtype, options.rounds)
    report = Report("growth" if options.growth else "attention", roofline, rows)
    print(report)
    if options.out:
        report.save(options.out)
    if options.growth and options.plot:
        plot_growth(report, options.plot)


if __name__ == "__main__":
    main()
