"""Requests for translations of lines with their languages, their results, and the text format of these."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.data.text.languages import LanguageTokens, describe_languages
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.pipelines.translator import Translator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from regard.data.text.sentence_splitter import join_sentences
from regard.decode import DecodeConfig, Hypothesis, SearchHistory
from regard.pipelines.decoding_request import Phrases, check_options, phrases_per_line

Split = Literal["auto", "always", "never"]
"""which lines are split into sentences: those beyond the trained length, all, or none"""


class TranslationOptions(TypedDict, total=False):
    """Options of translations, beside those of decoding: see `TranslationRequest`."""

    prefixes: str | Sequence[str] | None
    required: Phrases | None
    forbidden: Phrases | None
    truncate: bool
    split: Split
    first_index: int
    history: bool
    to: str | None
    source_language: str | None
    names: Sequence[str] | None


@dataclass(frozen=True)
class TranslationRequest:
    """What is asked of a translator: lines, options of decoding, rules for the outputs, and languages.

    A call, a file or a server makes it once and passes it on.
    """

    lines: Sequence[str]
    config: DecodeConfig
    prefixes: str | Sequence[str] | None = None
    """forced beginnings of the translations: one for all lines, or one per line"""
    required: Phrases | None = None
    """phrases that translations contain, as often as they are listed, as whole words"""
    forbidden: Phrases | None = None
    """phrases that translations do not contain as whole words"""
    truncate: bool = False
    """whether lines beyond the trained length are cut"""
    split: Split = "never"
    """which lines are split into sentences, whose translations are joined; those with required phrases are not"""
    first_index: int = 0
    """index of the first line, on which samples depend in addition to the seed"""
    history: bool = False
    """whether the candidates of every step of the search are recorded"""
    to: str | None = None
    """target language, for a model of several"""
    source_language: str | None = None
    """source language, for a model of several"""
    names: Sequence[str] | None = None
    """names of the lines in errors; by default line 1, line 2, …"""

    def __post_init__(self) -> None:
        if self.split == "always" and (self.config.n_best > 1 or self.history):
            raise RegardError(
                "split='always' gives one translation per line, without search history.",
                "Use n_best=1 and history=False, or another split.",
            )
        if not isinstance(self.prefixes, str | None) and len(self.prefixes) != len(self.lines):
            raise RegardError(
                f"Expected one prefix per line: got {len(self.prefixes)} prefixes for {len(self.lines)} lines.",
                'Pass "" for a line without one.',
            )
        if self.split == "always" and any(self.required_per_line):
            raise RegardError(
                "split='always' translates sentences separately: a required phrase has no sentence to be in.",
                "Use another split.",
            )

    @staticmethod
    def of(
        lines: Sequence[str], config: DecodeConfig, options: Mapping[str, Any], function: str
    ) -> "TranslationRequest":
        """The request of a function; an error for an option that it does not have."""
        check_options(options, TranslationOptions.__annotations__, function)
        return TranslationRequest(lines, config, **options)

    def block(self, lines: Sequence[str], first: int = 0, **changes: Any) -> "TranslationRequest":
        """The request for other lines, of which `first` come before."""
        return replace(self, lines=lines, first_index=self.first_index + first, **changes)

    @property
    def prefix_per_line(self) -> list[str]:
        return [self.prefixes or ""] * len(self.lines) if isinstance(self.prefixes, str | None) else [*self.prefixes]

    @property
    def required_per_line(self) -> list[list[str]]:
        return phrases_per_line(self.required, len(self.lines), "required")

    @property
    def forbidden_per_line(self) -> list[list[str]]:
        return phrases_per_line(self.forbidden, len(self.lines), "forbidden")

    @property
    def name_per_line(self) -> list[str]:
        return [f"line {i}" for i in range(1, len(self.lines) + 1)] if self.names is None else [*self.names]

    @property
    def split_per_line(self) -> list[Split]:
        """Which lines are split; not those whose results belong to one sentence."""
        is_whole = self.config.n_best > 1 or self.history
        return ["never" if is_whole or required else self.split for required in self.required_per_line]


@dataclass(frozen=True)
class Translation:
    """A translation of a line, with its score, its hypothesis and, if recorded, the search history."""

    text: str
    score: float
    hypothesis: Hypothesis = field(repr=False)
    history: SearchHistory | None = field(default=None, repr=False)


def format_translations(
    results: Sequence[Sequence[Translation]],
    config: DecodeConfig,
    first_index: int = 0,
    *,
    scores: bool = False,
    column: Sequence[str] | None = None,
) -> list[str]:
    """Translations as lines of text: text ||| score ||| column.

    With `n_best` above 1, a line begins with the index of the input line, and has a score.

    >>> best = Translation("Le chat dort.", -0.25, Hypothesis([], 0.0, 0.0, []))
    >>> format_translations([[best]], DecodeConfig(), scores=True)
    ['Le chat dort. ||| -0.2500']
    >>> format_translations([[best, best]], DecodeConfig(n_best=2), first_index=7)
    ['7 ||| Le chat dort. ||| -0.2500', '7 ||| Le chat dort. ||| -0.2500']
    """
    flat = [translation for n_best in results for translation in n_best]
    columns = [[translation.text.replace("\n", " ") for translation in flat]]
    if config.n_best > 1:
        columns.insert(0, [str(i) for i, n_best in enumerate(results, first_index) for _ in n_best])
    if scores or config.n_best > 1:
        columns.append([f"{translation.score:.4f}" for translation in flat])
    if column is not None:
        columns.append(list(column))
    return [" ||| ".join(fields) for fields in zip(*columns)]


def join_translations(sentences: list[list[Translation]], config: DecodeConfig) -> list[Translation]:
    """The translations of a line, joined from those of its sentences."""
    if len(sentences) == 1:
        return sentences[0]
    best = [n_best[0].hypothesis for n_best in sentences]
    logprobs = [logprob for hypothesis in best for logprob in hypothesis.token_logprobs]
    score = sum(logprobs) / max(1, len(logprobs)) ** config.length_penalty
    joined = Hypothesis([token for hypothesis in best for token in hypothesis.ids], score, sum(logprobs), logprobs)
    return [Translation(join_sentences([n_best[0].text for n_best in sentences]), score, joined)]


def language_tokens_of(translator: "Translator") -> LanguageTokens:
    """The language tokens of a translator; those of a model of one pair are empty.

    A model trained with Regard has the tags of its target languages in the tokenizer.
    """
    if translator.language_tokens is not None:
        return translator.language_tokens
    tags = translator.source_tokenizer.language_tags
    return LanguageTokens({code: tags[code] for code in translator.target_languages if code in tags})


def select_languages(translator: "Translator", to: str | None, source_language: str | None) -> "Translator":
    """The translator of the same model from one source language into one target language.

    None is the language that the translator already has, the default of the model, or its only language. A language
    that the model does not have is an error, and so is None if there are several.
    """
    tokens = language_tokens_of(translator)
    targets, sources = translator.target_languages, translator.source_languages
    if not tokens.ids:
        for code, known, direction in ((to, targets, "into"), (source_language, sources, "from")):
            if code is not None:
                _check_language(code, known, direction)
        return translator
    choices = (to, translator.target_language, tokens.default_target)
    target = _require_language(choices, [code for code in targets if code in tokens.ids], "into")
    source = source_language
    if tokens.source is not None:
        source = _require_language((source, translator.source_language, tokens.default_source), sources, "from")
    elif source is not None:
        _check_language(source, sources, "from")
    special = tokens.select(translator.special, target, source)
    if special == translator.special:
        return translator
    languages = {"target_language": target, "source_language": source}
    return dataclasses.replace(translator, special=special, **languages)  # type: ignore[arg-type]


def without_languages(translator: "Translator") -> "Translator":
    """The translator as it is saved: with all of its languages."""
    if translator.target_language is None:
        return translator
    special = language_tokens_of(translator).remove(translator.special)
    return dataclasses.replace(translator, target_language=None, source_language=None, special=special)


def _require_language(choices: Sequence[str | None], known: Sequence[str], direction: str) -> str:
    """The first choice, or the only language; an error if it is unknown, or missing and there are several."""
    code = next((choice for choice in choices if choice is not None), None)
    if code is not None:
        _check_language(code, known, direction)
        return code
    if len(known) != 1:
        option = "--to, to=…" if direction == "into" else "--from, source_language=…"
        raise RegardError(
            f"No {_SIDES[direction]} language is given, and the model has {len(known)}.",
            f"{describe_languages(known, direction)} Pass one of them ({option}).",
        )
    return known[0]


_SIDES = {"into": "target", "from": "source"}


def _check_language(code: str, known: Sequence[str], direction: str) -> None:
    side = _SIDES[direction]
    if not known:
        raise RegardError(
            f"{side.capitalize()} language {code!r}: the languages of the model are unknown.",
            "Leave it out, or train with data.languages.",
        )
    if code not in known:
        raise RegardError(f"Unknown {side} language {code!r}.", describe_languages(known, direction, code))
