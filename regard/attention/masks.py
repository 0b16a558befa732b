"""Masks: who may look at whom. True = may look.

A mask is a small tree that can be evaluated on any block of positions, so that nobody ever needs the whole T×S matrix.
Positions lie on the keys' axis: key s is at s, and query t at p = t + (S − T), so that the last query stands at the
last key, whether all queries are there or, in decoding, only the newest.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.attention.offsets import to_keep
from regard.errors import RegardError


class Mask:
    """What masks have in common; `&`, `|` and `~` combine them.

    >>> (causal() & ~window(2)).block(torch.arange(3), torch.arange(3)).int()
    tensor([[0, 0, 0],
            [0, 0, 0],
            [1, 0, 0]], dtype=torch.int32)
    """

    relative = False
    """Whether it asks how far apart a query and a key are."""

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        """Which of the queries at positions p may look at which of the keys at s, for each sequence of the batch."""
        raise NotImplementedError

    def of_batch(self, chosen: Int[Tensor, "b"] | slice) -> "Mask":
        """The same mask for a few sequences of the batch."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)

    def __invert__(self) -> "Mask":
        return Not(self)


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    relative = True

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "t s"]:
        return s <= p[:, None]


@dataclass(frozen=True, eq=False)
class Window(Mask):
    n: int
    relative = True

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "t s"]:
        return (s <= p[:, None]) & (s > p[:, None] - self.n)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    lengths: Int[Tensor, "B"]

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "B 1 1 s"]:
        return s < self.lengths.to(s.device)[:, None, None, None]

    def of_batch(self, chosen: Int[Tensor, "b"] | slice) -> Mask:
        return Padding(self.lengths[chosen])


@dataclass(frozen=True, eq=False)
class And(Mask):
    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.left.relative or self.right.relative

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        return self.left.block(p, s) & self.right.block(p, s)

    def of_batch(self, chosen: Int[Tensor, "b"] | slice) -> Mask:
        return And(self.left.of_batch(chosen), self.right.of_batch(chosen))


@dataclass(frozen=True, eq=False)
class Or(Mask):
    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.left.relative or self.right.relative

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        return self.left.block(p, s) | self.right.block(p, s)

    def of_batch(self, chosen: Int[Tensor, "b"] | slice) -> Mask:
        return Or(self.left.of_batch(chosen), self.right.of_batch(chosen))


@dataclass(frozen=True, eq=False)
class Not(Mask):
    inner: Mask

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.inner.relative

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        return ~self.inner.block(p, s)

    def of_batch(self, chosen: Int[Tensor, "b"] | slice) -> Mask:
        return Not(self.inner.of_batch(chosen))


def causal() -> Mask:
    """No query looks ahead: s ≤ p.

    >>> causal().block(torch.arange(2), torch.arange(3)).int()
    tensor([[1, 0, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    return Causal()


def window(n: int) -> Mask:
    """Each query looks at the n keys up to its own place: p − n < s ≤ p.

    >>> window(2).block(torch.arange(3), torch.arange(3)).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    if n < 1:
        raise RegardError(f"window({n}) lets nobody look at anything.", "Give a window of at least 1.")
    return Window(n)


def padding(lengths: Int[Tensor, "B"]) -> Mask:
    """Of the keys of sequence b only the first lengths[b] are real; queries are not masked.

    Lengths are best given from the CPU, also for attention on a GPU: there `attend` can ask them without waiting.

    >>> padding(torch.tensor([1, 2])).block(torch.arange(2), torch.arange(3)).int().flatten(0, 2)
    tensor([[1, 0, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    return Padding(lengths)


@dataclass(frozen=True, eq=False)
class Form:
    """A mask taken apart, as kernels like it: all parts must allow. `rest` is what has no form of its own."""

    causal: bool = False
    window: int | None = None
    lengths: Int[Tensor, "B"] | None = None
    rest: Mask | None = None

    @staticmethod
    def of(mask: Mask | None) -> "Form":
        match mask:
            case None:
                return FREE
            case Causal():
                return CAUSAL
            case Window(n):
                return Form(window=n)
            case Padding(lengths):
                return Form(lengths=lengths)
            case And(left, right):
                return Form.of(left).both(Form.of(right))
        return Form(rest=mask)

    def both(self, other: "Form") -> "Form":
        return Form(
            causal=self.causal or other.causal,
            window=_one_or(min, self.window, other.window),
            lengths=_one_or(_shorter, self.lengths, other.lengths),
            rest=_one_or(And, self.rest, other.rest),
        )

    @property
    def relative(self) -> bool:
        return self.causal or self.window is not None or (self.rest is not None and self.rest.relative)

    @property
    def mask(self) -> Mask | None:
        """The mask again, put together."""
        whole = Causal() if self.causal else None
        whole = _one_or(And, whole, None if self.window is None else Window(self.window))
        whole = _one_or(And, whole, None if self.lengths is None else Padding(self.lengths))
        return _one_or(And, whole, self.rest)

    def of_batch(self, chosen: Int[Tensor, "b"] | slice) -> "Form":
        return Form(
            self.causal,
            self.window,
            None if self.lengths is None else self.lengths[chosen],
            None if self.rest is None else self.rest.of_batch(chosen),
        )


FREE = Form()
CAUSAL = Form(causal=True)


def _shorter(a: Int[Tensor, "B"], b: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    # Of two that lie apart the one on the CPU goes to the other.
    return torch.minimum(a.to(b.device), b) if a.device.type == "cpu" else torch.minimum(a, b.to(a.device))


def _one_or(join: Any, one: Any, other: Any) -> Any:
    """The join of two, or the one that there is."""
    return other if one is None else one if other is None else join(one, other)


@dataclass(frozen=True, eq=False)
class Keys:
    """Which of S keys are real, on the device where it is asked. A sequence without any has its first one.

    Those are told apart by `seeing`, which is None when it is known, without waiting for a GPU, that there are none.

    >>> keys = Keys.of(torch.tensor([1, 0]), 2, torch.device("cpu"), torch.float32)
    >>> keys.allowed.flatten(1).tolist(), keys.seeing.flatten().tolist()
    ([[True, False], [True, False]], [True, False])
    """

    allowed: Bool[Tensor, "B 1 1 S"]
    bias: Float[Tensor, "B 1 1 S"] | None
    """The same as numbers that are added to scores, 0 or −∞: on a GPU alone, whose kernels take no other."""
    seeing: Bool[Tensor, "B 1 1 1"] | None

    @staticmethod
    def of(lengths: Int[Tensor, "B"], S: int, device: torch.device, dtype: torch.dtype) -> "Keys":
        """Made once, and kept as long as the lengths are there and nobody changes them: a model's layers share it."""
        # What is made while a graph is captured belongs to the graph, which makes it anew each time that it runs;
        # tensors of inference mode do not tell whether they were changed.
        compiled = torch.compiler.is_compiling()
        if compiled or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()) or lengths.is_inference():
            return Keys._made(lengths, S, device, dtype)
        wanted = lengths._version, S, device, dtype
        known, keys = _kept.get(lengths, (None, None))
        if known != wanted:
            keys = to_keep(lambda: Keys._made(lengths, S, device, dtype))
            _kept[lengths] = wanted, keys
        return keys

    @staticmethod
    def _made(lengths: Tensor, S: int, device: torch.device, dtype: torch.dtype) -> "Keys":
        at_hand = _at_hand(lengths)
        all_see = at_hand and bool((lengths > 0).all())
        # Memory that is not pinned is read before the call returns, without waiting for what the GPU has still to do.
        at_once = at_hand and device.type == "cuda" and not lengths.is_pinned()
        lengths = lengths.to(device, non_blocking=at_once).view(-1, 1, 1, 1)
        allowed = torch.arange(S, device=device) < lengths.clamp(min=1)
        bias = _bias(allowed, dtype) if device.type == "cuda" else None
        return Keys(allowed, bias, None if all_see else lengths > 0)


def _at_hand(lengths: Int[Tensor, "B"]) -> bool:
    """Whether they can be read without waiting for a GPU, and without a compiler's objecting."""
    return lengths.device.type == "cpu" and not torch.compiler.is_compiling()


def _bias(allowed: Bool[Tensor, "B 1 1 S"], dtype: torch.dtype) -> Float[Tensor, "B 1 1 S"]:
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill(allowed.logical_not(), float("-inf"))


# Nothing of what is kept may be a view of the lengths: it would hold them.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
