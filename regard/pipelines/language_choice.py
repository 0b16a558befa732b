"""Languages of a multilingual translator: special tokens in source and target name them, see `LanguageTokens`."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.data.text.languages import LanguageTokens, describe_languages
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.pipelines.translator import Translator


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
