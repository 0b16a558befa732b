"""Required and forbidden phrases of texts, as constraints on the output of a pipeline."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from regard.decode import LexicalConstraints, TokenTexts
from regard.errors import RegardError

Phrases = Sequence[str] | Sequence[Sequence[str]]
"""phrases for all lines, or one list of phrases per line"""


def phrases_per_line(phrases: Phrases | None, count: int, name: str) -> list[list[str]]:
    """One list of phrases per line; `name` identifies the argument in errors.

    >>> phrases_per_line(["Haus"], 2, "required"), phrases_per_line([["Haus"], []], 2, "required")
    ([['Haus'], ['Haus']], [['Haus'], []])
    """
    entries: list[Any] = [] if phrases is None else [phrases] if isinstance(phrases, str) else list(phrases)
    if isinstance(phrases, str) or not all(isinstance(entry, str | Sequence) for entry in entries):
        raise RegardError(f"{name} must be a list of phrases (got {phrases!r}).", f'Pass {name}=["a phrase"].')
    if all(isinstance(entry, str) for entry in entries):
        return [list(entries) for _ in range(count)]
    if any(isinstance(entry, str) for entry in entries):
        raise RegardError(
            f"{name} mixes phrases and lists of phrases.", "Pass either phrases for all lines or one list per line."
        )
    if len(entries) != count:
        raise RegardError(
            f"Expected one list of {name} phrases per line: got {len(entries)} lists for {count} lines.",
            "Pass an empty list for a line without phrases.",
        )
    for entry in entries:
        if not all(isinstance(phrase, str) for phrase in entry):
            raise RegardError(f"{name} must contain strings (got {entry!r}).", "Pass one list of phrases per line.")
    return [list(entry) for entry in entries]


def make_constraints(
    make_texts: Callable[[], TokenTexts],
    required: Sequence[Sequence[str]],
    forbidden: Sequence[Sequence[str]],
    names: Sequence[str],
) -> list[LexicalConstraints] | None:
    """The lexical constraints of each line; None if there are no phrases. `names` identify the lines in errors."""
    if not any(required) and not any(forbidden):
        return None
    texts = make_texts()
    constraints = []
    for line_required, line_forbidden, name in zip(required, forbidden, names):
        try:
            constraints.append(_compile(texts, tuple(line_required), tuple(line_forbidden)))
        except RegardError as error:
            raise RegardError(f"{name}: {error.message}", error.hint) from None
    return constraints


@lru_cache(maxsize=64)  # the same phrases often apply to many lines
def _compile(texts: TokenTexts, required: tuple[str, ...], forbidden: tuple[str, ...]) -> LexicalConstraints:
    return LexicalConstraints(texts, required, forbidden)
