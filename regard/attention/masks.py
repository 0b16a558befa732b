"""Attention masks: True = the query may attend to the key.

A mask is an expression that can be evaluated on any block of positions, so that the T×S matrix never exists. Positions
are on the axis of the keys: key s is at s, and query t at p = t + (S − T). The last query is at the last key, whether
all queries are present or, in decoding, only the newest.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.attention.offsets import outside_inference_mode
from regard.errors import RegardError


class Mask:
    """Base class of masks; `&`, `|` and `~` combine them.

    >>> (causal() & ~window(2)).block(torch.arange(3), torch.arange(3)).int()
    tensor([[0, 0, 0],
            [0, 0, 0],
            [1, 0, 0]], dtype=torch.int32)
    """

    is_relative = False
    """Whether it depends on the distance between query and key."""

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        """The mask of queries at positions p and keys at positions s, for each sequence of the batch."""
        raise RegardError(f"The mask {type(self).__name__} has no rule.", "Define its method block(p, s).")

    def __call__(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        """`block`, with a check of what a mask of your own returns."""
        block = self.block(p, s)
        T, S = p.shape[0], s.shape[0]  # len() would fix dynamic lengths of exported code
        is_matrix = block.dim() >= 2 and block.shape[-1] == S and block.shape[-2] in (T, 1)
        if not is_matrix or block.dtype != torch.bool:
            raise RegardError(
                f"{type(self).__name__}.block returned {block.dtype} of shape {tuple(block.shape)} for {T} queries "
                f"and {S} keys.",
                "Return a boolean tensor of shape (queries, keys), after axes of sequences and heads, if any.",
            )
        return block

    def select_sequences(self, indices: Int[Tensor, "b"] | slice) -> "Mask":
        """The same mask for some sequences of the batch. Override it if computing only those is cheaper."""
        return SelectedSequences(self, indices)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, check_mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, check_mask(other))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "Mask":
        return Not(self)


def check_mask(mask: Any) -> Mask:
    """Raise an error if a value is not a mask."""
    if not isinstance(mask, Mask):
        raise RegardError(
            f"A mask is an expression such as causal() & padding(lengths) (got {type(mask).__name__}).",
            "Pass a boolean tensor of the shape of the weights alone, as mask=, or subclass Mask.",
        )
    return mask


@dataclass(frozen=True, eq=False)
class SelectedSequences(Mask):
    """A mask for some sequences of the batch."""

    inner: Mask
    indices: Int[Tensor, "b"] | slice

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        return self.inner.is_relative

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        block = self.inner(p, s)
        return block if block.dim() < 4 or len(block) == 1 else block[self.indices]


@dataclass(frozen=True, eq=False)
class Matrix(Mask):
    """A boolean tensor of the shape of the weights, or broadcast to it."""

    allowed: Bool[Tensor, "*B1 #T S"]

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        T, S = self.allowed.shape[-2:]
        allowed = self.allowed.to(s.device)
        return (allowed if T == 1 else allowed[..., p - (S - T), :])[..., s]


class RelativeMask(Mask):
    """A mask of the distance between query and key, the same for all sequences."""

    is_relative = True

    def select_sequences(self, indices: Int[Tensor, "b"] | slice) -> Mask:
        return self


@dataclass(frozen=True, eq=False)
class Causal(RelativeMask):
    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "t s"]:
        return s <= p[:, None]


@dataclass(frozen=True, eq=False)
class Window(RelativeMask):
    n: int

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "t s"]:
        return (s <= p[:, None]) & (s > p[:, None] - self.n)


@dataclass(frozen=True, eq=False)
class Local(RelativeMask):
    n: int

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "t s"]:
        return (s - p[:, None]).abs() <= self.n


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    lengths: Int[Tensor, "B"]

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "B 1 1 s"]:
        return s < self.lengths.to(s.device)[:, None, None, None]

    def select_sequences(self, indices: Int[Tensor, "b"] | slice) -> Mask:
        return Padding(self.lengths[indices])


@dataclass(frozen=True, eq=False)
class Combined(Mask):
    """Two masks; subclasses combine their blocks."""

    left: Mask
    right: Mask

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        return self.left.is_relative or self.right.is_relative

    def select_sequences(self, indices: Int[Tensor, "b"] | slice) -> Mask:
        return type(self)(self.left.select_sequences(indices), self.right.select_sequences(indices))


class And(Combined):
    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        return self.left(p, s) & self.right(p, s)


class Or(Combined):
    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        return self.left(p, s) | self.right(p, s)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    inner: Mask

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        return self.inner.is_relative

    def block(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Bool[Tensor, "*B1 #t s"]:
        return ~self.inner(p, s)

    def select_sequences(self, indices: Int[Tensor, "b"] | slice) -> Mask:
        return Not(self.inner.select_sequences(indices))


def causal() -> Mask:
    """Attend to the query's own position and earlier ones: s ≤ p.

    >>> causal().block(torch.arange(2), torch.arange(3)).int()
    tensor([[1, 0, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    return Causal()


def window(n: int) -> Mask:
    """Sliding window: attend to the last n keys up to the query's own position: p − n < s ≤ p.

    >>> window(2).block(torch.arange(3), torch.arange(3)).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    if n < 1:
        raise RegardError(f"window({n}): the window must be at least 1.", "Pass a positive window size.")
    return Window(n)


def local(n: int) -> Mask:
    """Local attention in both directions: attend to keys at a distance of at most n: |p − s| ≤ n.

    >>> local(1).block(torch.arange(3), torch.arange(3)).int()
    tensor([[1, 1, 0],
            [1, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    if n < 0:
        raise RegardError(f"local({n}): the distance must be at least 0.", "Pass a distance of 0 or more.")
    return Local(n)


def padding(lengths: Int[Tensor, "B"]) -> Mask:
    """Attend to the first lengths[b] keys of sequence b; the rest is padding. Queries are not masked.

    Pass lengths on the CPU, also for attention on a GPU: `attend` can then read them without synchronizing.

    >>> padding(torch.tensor([1, 2])).block(torch.arange(2), torch.arange(3)).int().flatten(0, 2)
    tensor([[1, 0, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    return Padding(lengths)


@dataclass(frozen=True, eq=False)
class MaskParts:
    """A mask as the conjunction of a causal mask, a window, a maximum distance, lengths of the keys, and the rest."""

    causal: bool = False
    window: int | None = None
    distance: int | None = None
    lengths: Int[Tensor, "B"] | None = None
    rest: Mask | None = None
    """conjuncts of any other form"""

    @staticmethod
    def from_mask(mask: Mask | None) -> "MaskParts":
        match mask:
            case None:
                return NO_MASK
            case Causal():
                return CAUSAL
            case Window(n):
                return MaskParts(window=n)
            case Local(n):
                return MaskParts(distance=n)
            case Padding(lengths):
                return MaskParts(lengths=lengths)
            case And(left, right):
                return MaskParts.from_mask(left).intersect(MaskParts.from_mask(right))
        return MaskParts(rest=check_mask(mask))

    def intersect(self, other: "MaskParts") -> "MaskParts":
        """The conjunction of two masks."""
        return MaskParts(
            causal=self.causal or other.causal,
            window=_combine(min, self.window, other.window),
            distance=_combine(min, self.distance, other.distance),
            lengths=_combine(_minimum, self.lengths, other.lengths),
            rest=_combine(And, self.rest, other.rest),
        )

    @property
    def is_relative(self) -> bool:
        has_limit = self.causal or self.window is not None or self.distance is not None
        return has_limit or (self.rest is not None and self.rest.is_relative)

    @property
    def mask(self) -> Mask | None:
        """The mask as one expression; None: no mask."""
        mask = Causal() if self.causal else None
        mask = _combine(And, mask, None if self.window is None else Window(self.window))
        mask = _combine(And, mask, None if self.distance is None else Local(self.distance))
        mask = _combine(And, mask, None if self.lengths is None else Padding(self.lengths))
        return _combine(And, mask, self.rest)

    def select_sequences(self, indices: Int[Tensor, "b"] | slice) -> "MaskParts":
        return replace(
            self,
            lengths=None if self.lengths is None else self.lengths[indices],
            rest=None if self.rest is None else self.rest.select_sequences(indices),
        )


NO_MASK = MaskParts()
CAUSAL = MaskParts(causal=True)


def _minimum(a: Int[Tensor, "B"], b: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    # Tensors on different devices: the one on the CPU is moved.
    return torch.minimum(a.to(b.device), b) if a.device.type == "cpu" else torch.minimum(a, b.to(a.device))


def _combine(function: Any, a: Any, b: Any) -> Any:
    """function(a, b), or the other one if one is None."""
    return b if a is None else a if b is None else function(a, b)


@dataclass(frozen=True, eq=False)
class KeyPadding:
    """A padding mask over S keys, on the device of the queries.

    The first key of a sequence without keys is allowed, so that its softmax is defined; `has_keys` marks such sequences
    for setting their output to zero. It is None if, without synchronizing with a GPU, there are known to be none.

    >>> keys = KeyPadding.from_lengths(torch.tensor([1, 0]), 2, torch.device("cpu"), torch.float32)
    >>> keys.allowed.flatten(1).tolist(), keys.has_keys.flatten().tolist()
    ([[True, False], [True, False]], [True, False])
    """

    allowed: Bool[Tensor, "B 1 1 S"]
    bias: Float[Tensor, "B 1 1 S"] | None
    """the mask as a bias of the scores, 0 or −∞; only on GPUs, whose kernels support nothing else"""
    has_keys: Bool[Tensor, "B 1 1 1"] | None

    @staticmethod
    def from_lengths(lengths: Int[Tensor, "B"], S: int, device: torch.device, dtype: torch.dtype) -> "KeyPadding":
        """Cached while the lengths exist and are not modified: the layers of a model share it."""
        # Tensors computed during the capture of a CUDA graph belong to the graph, which recomputes them at each replay;
        # inference tensors do not track modifications.
        is_compiling = torch.compiler.is_compiling()
        is_capturing = not is_compiling and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_compiling or is_capturing or lengths.is_inference():
            return KeyPadding._compute(lengths, S, device, dtype)
        key = lengths._version, S, device, dtype
        cached_key, keys = _cache.get(lengths, (None, None))
        if cached_key != key:
            keys = outside_inference_mode(lambda: KeyPadding._compute(lengths, S, device, dtype))
            _cache[lengths] = key, keys
        return keys

    @staticmethod
    def _compute(lengths: Tensor, S: int, device: torch.device, dtype: torch.dtype) -> "KeyPadding":
        is_readable = _is_readable(lengths)
        all_have_keys = is_readable and bool((lengths > 0).all())
        # Memory that is not pinned is read before the call returns, without waiting for pending work of the GPU.
        non_blocking = is_readable and device.type == "cuda" and not lengths.is_pinned()
        lengths = lengths.to(device, non_blocking=non_blocking).view(-1, 1, 1, 1)
        allowed = torch.arange(S, device=device) < lengths.clamp(min=1)
        bias = _as_bias(allowed, dtype) if device.type == "cuda" else None
        return KeyPadding(allowed, bias, None if all_have_keys else lengths > 0)


def _is_readable(lengths: Int[Tensor, "B"]) -> bool:
    """Whether values can be read without synchronizing with a GPU and without breaking a compiled graph."""
    return lengths.device.type == "cpu" and not torch.compiler.is_compiling()


def _as_bias(allowed: Bool[Tensor, "B 1 1 S"], dtype: torch.dtype) -> Float[Tensor, "B 1 1 S"]:
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill(allowed.logical_not(), float("-inf"))


# Values must not be views of the lengths, which would keep them alive.
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
