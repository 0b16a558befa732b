"""Decoding requests: encoded inputs of a pipeline with options and phrases, and how hypotheses become results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from regard.decode import DecodeConfig, LexicalConstraints, NBest, Request, TokenTexts, decode_all
from regard.decode.slots import OnToken
from regard.errors import RegardError, did_you_mean

R = TypeVar("R")
_GPU_PRECISIONS = ("float16", "bfloat16", "float8")


@dataclass(frozen=True)
class DecodingRequest(Generic[R]):
    """The sentences of one call of a pipeline, encoded. `run` decodes them; a server decodes them with others.

    >>> translator.prepare(["The cat sleeps."]).run()[0][0].text  # doctest: +SKIP
    'Le chat dort.'
    """

    model: Any
    encoded: Request

    def __post_init__(self) -> None:
        """Check the options that depend on the model: token ids, and the precision that its device supports."""
        model, config = getattr(self.model, "models", [self.model])[0], self.encoded.config
        vocab = getattr(model.config, "target_vocab", None) or model.config.vocab
        sequences = {"suppress_sequences": [token for sequence in config.suppress_sequences for token in sequence]}
        sequences["begin_suppress_tokens"] = [*config.begin_suppress_tokens]
        for name, ids in sequences.items():
            if max(ids, default=0) >= vocab:
                raise RegardError(
                    f"{name}: the token id {max(ids)} is outside the vocabulary of the model, 0 to {vocab - 1}.",
                    "Remove it.",
                )
        if config.precision in _GPU_PRECISIONS and isinstance(model, nn.Module):
            parameter = next(model.parameters(), None)
            if parameter is not None and parameter.device.type == "cpu":
                raise RegardError(
                    f"precision {config.precision} is for GPUs (the model is on cpu).", "Use int8 or float32."
                )

    def finish(self, hypotheses: list[NBest]) -> list[R]:
        """The results of the pipeline, from the hypotheses of each source; here these themselves."""
        return hypotheses  # type: ignore[return-value]

    @torch.no_grad()
    def decode(
        self, *, on_token: OnToken | None = None, progress: Callable[[int, int], None] | None = None
    ) -> list[NBest]:
        """The hypotheses of each source: see `decode_all`."""
        return decode_all(self.model, self.encoded, on_token=on_token, progress=progress)

    def run(self, *, on_token: OnToken | None = None, progress: Callable[[int, int], None] | None = None) -> list[R]:
        """Decode all sources and return the results."""
        return self.finish(self.decode(on_token=on_token, progress=progress))


def check_options(options: Mapping[str, Any], known: Iterable[str], function: str) -> None:
    """Raise an error for an option that a function does not have, with the right name or place.

    >>> check_options({"spilt": "auto"}, ["split", "truncate"], "translate")
    Traceback (most recent call last):
    regard.errors.RegardError: translate has no option spilt. Did you mean split?
    """
    known = list(known)
    for name in options:
        if name in known:
            continue
        hint = did_you_mean(name, known, f"Its options are {', '.join(known)}.")
        if name in (field.name for field in fields(DecodeConfig)):
            hint = f"It is an option of decoding: pass DecodeConfig({name}=…) as config."
        raise RegardError(f"{function} has no option {name}.", hint)


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
