"""`regard bench attention`: every score beside every other way to compute it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attention import SCORES, Mask, Score, attend, causal, explain, make_score, padding
from regard.bench.bench_report import Report
from regard.bench.measurement import Ceilings, Entrant, Row, Work, compare, measure_ceilings
from regard.bench.peers import attentions
from regard.errors import RegardError
from regard.pipelines import Device, find_device

MASKS = ("none", "causal", "padding", "causal+padding")
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Shape:
    """The sizes of a call: `tokens` is how many queries all sequences have together, whatever their length."""

    tokens: int
    heads: int
    width: int = 64
    hidden: int = 64

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


SHAPES = {"cpu": Shape(tokens=512, heads=4), "mps": Shape(tokens=2048, heads=8), "cuda": Shape(tokens=32768, heads=16)}
LENGTHS = {"cpu": (256,), "mps": (1024,), "cuda": (1024, 4096)}
DTYPES = {"cpu": torch.float32, "mps": torch.float32, "cuda": torch.bfloat16}


def bench_attention(
    device: Device = "auto",
    lengths: Sequence[int] = (),
    scores: Sequence[str] = (),
    masks: Sequence[str] = (),
    *,
    shape: Shape | None = None,
    compiled: bool = True,
    rounds: int = 3,
) -> Report:
    """Every score and mask at each length, forward, and forward and backward, beside every peer.

    What is compiled takes seconds a case, so those peers join where it matters most: scaled dot and concat without a
    mask, and on a GPU scaled dot with each. `compiled=False` leaves them out.

    >>> report = bench_attention("cpu", [8], ["dot"], ["none"], shape=Shape(8, 1, 8), compiled=False, rounds=1)
    >>> [row.entrant for row in report.rows[:3]]
    ['Regard', 'formula, eager', 'SDPA']
    """
    where = find_device(device)
    dtype, shape = DTYPES[where.type], shape or SHAPES[where.type]
    lengths = known_lengths(lengths or LENGTHS[where.type])
    scores, masks = known(scores or tuple(SCORES), tuple(SCORES), "score"), known(masks or MASKS, MASKS, "mask")
    ceilings = measure_ceilings(where, dtype)
    rows: list[Row] = []
    for name in scores:
        for mask in masks:
            for length in lengths:
                join = compiled and (
                    (mask == "none" and name in ("scaled_dot", "concat"))
                    or (where.type == "cuda" and name == "scaled_dot")
                )
                for backward in (False, True):
                    case = Case(name, mask, length, backward, shape, where, dtype)
                    rows += case.measure(ceilings, join, rounds)
    return Report("attention", ceilings, rows + overhead(ceilings, where, dtype, rounds))


def overhead(ceilings: Ceilings, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Row]:
    """What `attend` itself costs: a call so small that nothing else counts, beside torch's own door."""
    q, k, v = (torch.randn(1, 4, n, 64, device=device).to(dtype) for n in (1, 16, 16))

    def without_gradients(function: Callable[..., Tensor]) -> Callable[[], Callable[[], Tensor]]:
        return lambda: torch.inference_mode()(lambda: function(q, k, v))

    entrants = [
        Entrant("Regard", without_gradients(attend), ours=True),
        Entrant("SDPA", without_gradients(torch.nn.functional.scaled_dot_product_attention)),
    ]
    return compare("one query, 16 keys: the overhead", entrants, Work(), ceilings, device, max(rounds, 5))


@dataclass(frozen=True)
class Case:
    """One score, mask and length, forward or with its backward pass."""

    score: str
    mask: str
    length: int
    backward: bool
    shape: Shape
    device: torch.device
    dtype: torch.dtype

    def measure(self, ceilings: Ceilings, compiled: bool, rounds: int) -> list[Row]:
        q, k, v = self.inputs()
        score, mask = self.make_score(), self.make_mask()
        theirs = self.make_mask(self.device)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, score=score, mask=mask)

        entrants = [Entrant("Regard", lambda: self.step(ours, score, q, k, v), ours=True)]
        for name, make in attentions(score, theirs, q, k, compiled):
            entrants.append(Entrant(name, lambda make=make: self.step(make(), score, q, k, v)))
        rows = compare(self.name, entrants, self.work(), ceilings, self.device, rounds, self.length)
        with explain() as choices, torch.no_grad():
            ours(q, k, v)
        return [self._noted(row, choices[0].kernel) for row in rows]

    @staticmethod
    def _noted(row: Row, kernel: str) -> Row:
        return Row(**(vars(row) | {"note": f"kernel {kernel}"})) if row.ours and row.seconds else row

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
        made = make_score(self.score, width, width, hidden=self.shape.hidden, max_keys=self.length)
        return made.to(self.device).requires_grad_(self.backward)

    def lengths(self) -> Tensor:
        """From half of the length up to all of it; three quarters where there is one sequence alone."""
        if self.batch == 1:
            return torch.tensor([max(1, 3 * self.length // 4)])
        return torch.linspace(self.length / 2, self.length, self.batch).ceil().long()

    def make_mask(self, device: torch.device | None = None) -> Mask | None:
        """Lengths lie on the CPU, as `padding` likes them, or on the device that is given, as others do."""
        match self.mask:
            case "causal":
                return causal()
            case "padding":
                return padding(self.lengths().to(device))
            case "causal+padding":
                return causal() & padding(self.lengths().to(device))
        return None

    def pairs(self) -> float:
        """How many queries may look at how many keys, all sequences together."""
        N = self.length
        if self.mask in ("none", "causal"):
            return self.batch * (N * N if self.mask == "none" else N * (N + 1) / 2)
        lengths = self.lengths().double()
        seen = lengths * N if self.mask == "padding" else lengths * (lengths + 1) / 2 + (N - lengths) * lengths
        return float(seen.sum())

    def work(self) -> Work:
        """Two products forward, five more backward; q, k, v and the output once, and once more with their gradients."""
        shape, pairs = self.shape, self.pairs() * self.shape.heads
        flops = pairs * shape.width * (14 if self.backward else 4)
        size = self.batch * shape.heads * self.length * shape.width * self.dtype.itemsize
        moved = size * (12 if self.backward else 4)
        if self.score != "concat":
            return Work(flops, moved)
        return Work(0.0, moved, pairs * shape.hidden, pairs * shape.hidden, " elements/s")

    def step(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], score: Score, q: Tensor, k: Tensor, v: Tensor
    ) -> Callable[[], Any]:
        if not self.backward:
            return torch.no_grad()(lambda: attention(q, k, v))
        wanted = [q, k, v, *score.parameters()]
        grad = torch.randn_like(v)

        def step() -> None:
            # Location never asks the keys what they hold.
            torch.autograd.grad(attention(q, k, v), wanted, grad, allow_unused=True)

        return step


def known(names: Sequence[str], there: Sequence[str], what: str) -> Sequence[str]:
    for name in names:
        if name not in there:
            raise RegardError(f"No {what} is called {name!r}.", f"Choose from {', '.join(there)}.")
    return names


def known_lengths(lengths: Sequence[int]) -> Sequence[int]:
    if any(length < 1 for length in lengths):
        raise RegardError(f"A length of {min(lengths)} is none.", "Give lengths of at least 1.")
    return lengths
