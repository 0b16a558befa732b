"""What computes the steps of a call, and why: listed by `explain`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

Stepper = Literal["model", "static", "compiled", "captured"]


class EngineChoice(NamedTuple):
    """What computed the steps of a call of `decode_all`: the model itself, a decoder with static caches, or such a
    decoder with kernels compiled for the CPU or captured in CUDA graphs.
    """

    stepper: Stepper
    reason: str
    """why nothing faster did"""
    sentences: int
    """number of sentences of the call"""


class _Thread(threading.local):
    choices: tuple[list[EngineChoice], ...] = ()


_thread = _Thread()


@contextmanager
def explain() -> Iterator[list[EngineChoice]]:
    """List how each call of `decode_all` in this thread inside the with block is decoded.

    >>> from regard.decode import DecodeConfig, decode_all
    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> with explain() as choices:
    ...     _ = decode_all(Transformer(sizes).eval(), [[4, 3]], pack, DecodeConfig(coverage_penalty=0.2))
    >>> choices[0].stepper, choices[0].reason
    ('model', 'the coverage penalty needs the attention weights of every step')
    """
    choices: list[EngineChoice] = []
    previous = _thread.choices
    _thread.choices = (*previous, choices)
    try:
        yield choices
    finally:
        _thread.choices = previous


def note_choice(stepper: Stepper, reason: str, sentences: int) -> None:
    """Add a call to the lists of `explain`."""
    for choices in _thread.choices:
        choices.append(EngineChoice(stepper, reason, sentences))
