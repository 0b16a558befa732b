"""`regard bench attention`: time of `attend` for every score and mask, against peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention import SCORES, Mask, Score, attend, causal, explain, make_score, padding
from regard.bench.bench_report import BenchReport
from regard.bench.measurement import Ceilings, Implementation, Measurement, Work, compare, measure_ceilings
from regard.bench.peers import peer_attentions
from regard.devices import Device, find_device
from regard.errors import RegardError

MASKS = ("none", "causal", "padding", "causal+padding")
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a call; `tokens` is the total number of queries in a batch, independent of the length."""

    tokens: int
    heads: int
    width: int = 64
    hidden: int = 64

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


SHAPES = {
    "cpu": AttentionShape(tokens=512, heads=4),
    "mps": AttentionShape(tokens=2048, heads=8),
    "cuda": AttentionShape(tokens=32768, heads=16),
}
LENGTHS = {"cpu": (256,), "mps": (1024,), "cuda": (1024, 4096)}
DTYPES = {"cpu": torch.float32, "mps": torch.float32, "cuda": torch.bfloat16}


def bench_attention(
    device: Device = "auto",
    lengths: Sequence[int] = (),
    scores: Sequence[str] = (),
    masks: Sequence[str] = (),
    *,
    shape: AttentionShape | None = None,
    compiled: bool = True,
    rounds: int = 3,
) -> BenchReport:
    """Measure every score and mask at each length, forward, and forward and backward, against all peers.

    Compiled peers take seconds per case, so they run in the most important cases only: scaled dot and concat without a
    mask, and on a GPU scaled dot with every mask. `compiled=False` leaves them out.

    >>> report = bench_attention("cpu", [8], ["dot"], ["none"], shape=AttentionShape(8, 1, 8), compiled=False, rounds=1)
    >>> [row.implementation for row in report.rows[:3]]
    ['Regard', 'formula, eager', 'SDPA']
    """
    target = find_device(device)
    dtype, shape = DTYPES[target.type], shape or SHAPES[target.type]
    lengths = check_lengths(lengths or LENGTHS[target.type])
    scores = check_names(scores or tuple(SCORES), tuple(SCORES), "score")
    masks = check_names(masks or MASKS, MASKS, "mask")
    ceilings = measure_ceilings(target, dtype)
    rows: list[Measurement] = []
    for name in scores:
        for mask in masks:
            for length in lengths:
                include_compiled = compiled and (
                    (mask == "none" and name in ("scaled_dot", "concat"))
                    or (target.type == "cuda" and name == "scaled_dot")
                )
                for backward in (False, True):
                    case = AttentionCase(name, mask, length, backward, shape, target, dtype)
                    rows += case.measure(ceilings, include_compiled, rounds)
    return BenchReport("attention", ceilings, rows + measure_overhead(ceilings, target, dtype, rounds))


def measure_overhead(ceilings: Ceilings, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Measurement]:
    """Measure the overhead of `attend` with a tiny call, against torch's scaled_dot_product_attention."""
    q, k, v = (torch.randn(1, 4, n, 64, device=device).to(dtype) for n in (1, 16, 16))

    def without_gradients(function: Callable[..., Tensor]) -> Callable[[], Callable[[], Tensor]]:
        return lambda: torch.inference_mode()(lambda: function(q, k, v))

    implementations = [
        Implementation("Regard", without_gradients(attend), is_regard=True),
        Implementation("SDPA", without_gradients(torch.nn.functional.scaled_dot_product_attention)),
    ]
    return compare("overhead: one query, 16 keys", implementations, Work(), ceilings, device, max(rounds, 5))


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

    def measure(self, ceilings: Ceilings, compiled: bool, rounds: int) -> list[Measurement]:
        q, k, v = self.inputs()
        score, mask = self.make_score(), self.make_mask()
        peer_mask = self.make_mask(self.device)

        def regard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, score=score, mask=mask)

        implementations = [
            Implementation("Regard", lambda: self.step(regard_attention, score, q, k, v), is_regard=True)
        ]
        for name, make in peer_attentions(score, peer_mask, q, k, compiled):
            implementations.append(Implementation(name, lambda make=make: self.step(make(), score, q, k, v)))
        rows = compare(self.name, implementations, self.work(), ceilings, self.device, rounds, self.length)
        with explain() as choices, torch.no_grad():
            regard_attention(q, k, v)
        return [self._add_kernel_note(row, choices[0].backend) for row in rows]

    @staticmethod
    def _add_kernel_note(row: Measurement, kernel: str) -> Measurement:
        return replace(row, note=f"kernel {kernel}") if row.is_regard and row.seconds else row

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

    def step(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], score: Score, q: Tensor, k: Tensor, v: Tensor
    ) -> Callable[[], Any]:
        if not self.backward:
            return torch.no_grad()(lambda: attention(q, k, v))
        inputs = [q, k, v, *score.parameters()]
        grad = torch.randn_like(v)

        def step() -> None:
            # The location score does not depend on the keys.
            torch.autograd.grad(attention(q, k, v), inputs, grad, allow_unused=True)

        return step


def check_names(names: Sequence[str], known: Sequence[str], kind: str) -> Sequence[str]:
    """Raise if a name is unknown; `kind` (score, mask) is for the message."""
    for name in names:
        if name not in known:
            raise RegardError(f"No {kind} is called {name!r}.", f"Choose from {', '.join(known)}.")
    return names


def check_lengths(lengths: Sequence[int]) -> Sequence[int]:
    """Raise if a length is not positive."""
    if any(length < 1 for length in lengths):
        raise RegardError(f"Lengths must be at least 1 (got {min(lengths)}).", "Change --lengths.")
    return lengths
