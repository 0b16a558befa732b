"""Which engine decodes a call, and why: listed by `explain`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple


class EngineChoice(NamedTuple):
    """How a call of `decode_all` was decoded: by the decoding engine or by the plain search."""

    engine: Literal["engine", "plain"]
    reason: str
    """why the plain search decoded the call; "" for the engine"""
    sentences: int
    """number of sentences of the call"""


class _Thread(threading.local):
    choices: tuple[list[EngineChoice], ...] = ()


_thread = _Thread()


@contextmanager
def explain() -> Iterator[list[EngineChoice]]:
    """List how each call of `decode_all` in this thread inside the with block is decoded.

    >>> from regard.decode import DecodeConfig, Request, decode_all
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> with explain() as choices:
    ...     _ = decode_all(Transformer(sizes).eval(), Request([[4, 3]], DecodeConfig(coverage_penalty=0.2)))
    >>> choices[0].engine, choices[0].reason
    ('plain', 'the coverage penalty needs the attention weights of every step')
    """
    choices: list[EngineChoice] = []
    previous = _thread.choices
    _thread.choices = (*previous, choices)
    try:
        yield choices
    finally:
        _thread.choices = previous


def note_choice(reason: str, sentences: int) -> None:
    """Add a call to the lists of `explain`; `reason` is "" if the engine decodes it."""
    for choices in _thread.choices:
        choices.append(EngineChoice("plain" if reason else "engine", reason, sentences))
