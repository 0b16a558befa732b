"""Protocols of decoding: what a model, a source batch and a stepper must provide, and how a search is interrupted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.data.text.special_tokens import SpecialTokens

SPECIAL = SpecialTokens()


@runtime_checkable
class SourceBatch(Protocol):
    """A batch of B source sequences, such as `Packed`."""

    @property
    def ids(self) -> Int[Tensor, "N"]: ...

    @property
    def offsets(self) -> Offsets: ...


@runtime_checkable
class Decodable(Protocol):
    """A model that can be decoded. Its state has rows (B, K): K hypotheses ("beams") for each of B sentences.

    The type of the state is up to the model. It starts with K = 1; only `reorder` changes B and K. Language models,
    whose output continues the source, have an attribute `continues_source = True`.
    """

    def start(self, source: Any) -> Any:
        """Encode the source; returns a state with (B, 1) rows."""

    def step(self, state: Any, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], Any]:
        """Append the last token of each row; returns the logits of the next token and the new state."""

    def reorder(self, state: Any, indices: Int[Tensor, "B2 K2"]) -> Any:
        """Select rows: new row (b, k) is old row indices[b, k], a flat index: old sentence * old K + old beam.

        All beams of a new sentence come from the same old sentence, so tensors that depend only on the source can stay
        shared between beams.
        """


@dataclass(frozen=True)
class StepPositions:
    """Positions of the slots; the host knows their range, so that no step waits for the device."""

    positions: Int[Tensor, "B"]
    """cache position of the last token of each slot"""
    longest: int
    """number of cache positions in use, the maximum over the slots"""
    shared: int | None
    """the position, if it is the same in all slots"""
    in_use: Sequence[bool] = ()
    """which slots have a sentence"""


class Stepper(Protocol):
    """Computes the logits of the next tokens of B slots with K hypotheses each."""

    device: torch.device

    @property
    def attention(self) -> list[Float[Tensor, "B K S"]]:
        """The cross-attention of the last step per layer, averaged over heads, if it was asked for."""

    def load(self, slots: list[int], sources: list[list[int]]) -> None: ...

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None: ...

    def step(self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None) -> Tensor: ...

    def reorder(self, parents: Int[Tensor, "B K"]) -> None: ...

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None: ...


def continues_source(model: Any) -> bool:
    """Whether the output of a model continues its source, which the model states as `continues_source`."""
    return getattr(model, "continues_source", False)


_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` between the steps of searches inside: what it raises ends those whose result is not wanted."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_interruption() -> None:
    """Called between the steps of a search.

    >>> def stop():
    ...     raise TimeoutError("too late")
    >>> with interruptible(stop):
    ...     check_interruption()
    Traceback (most recent call last):
    TimeoutError: too late
    """
    check = _check.get()
    if check is not None:
        check()
