"""Target language of a multilingual translator: its tag is the first token of every source (Johnson et al. 2017)."""

import dataclasses
from typing import TYPE_CHECKING

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.pipelines.translator import Translator


def language_tag_ids(translator: "Translator") -> dict[str, int]:
    """The ids of the tags by target language; empty for a model of one language pair."""
    known = translator.source_tokenizer.language_tags
    return {code: known[code] for code in translator.target_languages if code in known}


def select_target(translator: "Translator", to: str | None) -> tuple[str | None, SpecialTokens]:
    """The target language, and the special tokens of a translator into it.

    None is the only target language, or the one that the translator already has. A language that the model does not
    have is an error, and so is None if there are several.
    """
    tags, known = language_tag_ids(translator), translator.target_languages
    listed = f"The model translates into: {', '.join(known)}."
    if to is None:
        if not tags or translator.target_language is not None:
            return translator.target_language, translator.special
        if len(known) > 1:
            raise RegardError(
                f"No target language is given, and the model has {len(known)}.",
                f"{listed} Pass one of them (--to, to=…).",
            )
        to = known[0]
    if not known:
        raise RegardError(
            f"Target language {to!r}: the languages of the model are unknown.",
            "Leave it out, or train with data.languages.",
        )
    if to not in known or (tags and to not in tags):
        raise RegardError(f"Unknown target language {to!r}.", listed)
    return (to, dataclasses.replace(translator.special, begin=tags[to])) if tags else (None, translator.special)


def without_target(translator: "Translator") -> "Translator":
    """The translator as it is saved: with all of its target languages."""
    if translator.target_language is None:
        return translator
    special = dataclasses.replace(translator.special, begin=None)
    return dataclasses.replace(translator, target_language=None, special=special)
