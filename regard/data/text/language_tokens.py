"""Special tokens that name the languages of a translation."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.ranges import check_value, format_value

SourceRole = Literal["begin", "after_end"]
TargetRole = Literal["begin", "forced", "sos"]
# Longer lists of languages are not written out in messages.
_MAX_LISTED = 12
_NEAREST = 5


@dataclass(frozen=True)
class LanguageTokens:
    """The special token of each language, and the roles of `SpecialTokens` that source and target language set.

    | model | source | target |
    | --- | --- | --- |
    | trained with Regard (Johnson et al. 2017) | None | `begin` |
    | NLLB, M2M100, mBART-50 | `begin` | `forced` |
    | mBART | `after_end` | `sos` |

    >>> tokens = LanguageTokens({"en": 7, "fr": 8}, target="forced", source="begin")
    >>> special = tokens.select(SpecialTokens(end=3), "fr", "en")
    >>> special.add_special_tokens([5]), special.make_decoder_input([6])
    ([7, 5, 3], [2, 8, 6])
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    """token ids by language code"""
    target: TargetRole = "begin"
    source: SourceRole | None = None
    """None: the source language is not an input of the model"""
    default_source: str | None = None
    default_target: str | None = None

    def select(self, special: SpecialTokens, target: str, source: str | None = None) -> SpecialTokens:
        """The special tokens of a translation between two languages."""
        roles: dict[str, Any] = {self.target: self.ids[target]}
        if self.source is not None and source is not None:
            roles[self.source] = self.ids[source]
        return dataclasses.replace(special, **roles)

    def remove(self, special: SpecialTokens) -> SpecialTokens:
        """The special tokens without languages; a decoder that starts with the language gets `eos` in its place.

        >>> LanguageTokens({"fr": 8}, target="sos").remove(SpecialTokens(sos=8, eos=3)).sos
        3
        """
        roles: dict[str, Any] = {self.target: special.eos if self.target == "sos" else None}
        if self.source is not None:
            roles[self.source] = None
        return dataclasses.replace(special, **roles)

    def code(self, index: int | None) -> str | None:
        """The language of a token; None for other tokens."""
        return next((code for code, token in self.ids.items() if token == index), None)

    def to_json(self) -> dict[str, Any]:
        """The content of a config file."""
        return dataclasses.asdict(self) | {"ids": dict(self.ids)}

    @staticmethod
    def from_json(table: Any, origin: str, vocab: int) -> "LanguageTokens":
        """Read what `to_json` wrote, for a model with a vocabulary of this size; `origin` is named in errors.

        >>> LanguageTokens.from_json({"ids": {"fr": 8}, "target": "forced"}, "config.json", 9).target
        'forced'
        """
        names = {one.name for one in dataclasses.fields(LanguageTokens)}
        ids = table.get("ids") if isinstance(table, dict) else None
        if not isinstance(table, dict) or not isinstance(ids, dict) or not table.keys() <= names:
            raise RegardError(
                f"{origin} must be an object with the keys {', '.join(sorted(names))} (got {format_value(table)}).",
                "Upgrade regard, or fix the file.",
            )
        for code, index in ids.items():
            if type(index) is not int or not 0 <= index < vocab:
                raise RegardError(
                    f"{origin}.ids.{code} must be an id of the vocabulary of {vocab} (got {format_value(index)}).",
                    "Fix the file.",
                )
        source, defaults = table.get("source"), {key: table.get(key) for key in ("default_source", "default_target")}
        for key, code in defaults.items():
            if code is not None and code not in ids:
                raise RegardError(f"{origin}.{key}: unknown language {format_value(code)}.", "Fix the file.")
        return LanguageTokens(
            ids,
            check_value(TargetRole, table.get("target"), f"{origin}.target"),
            None if source is None else check_value(SourceRole, source, f"{origin}.source"),
            **defaults,
        )


def nearest_codes(code: str, known: Sequence[str], count: int = _NEAREST) -> list[str]:
    """The known language codes that are most similar to a code: first those with the longest common beginning.

    >>> nearest_codes("fr", ["eng_Latn", "fon_Latn", "fra_Latn"], 2)
    ['fra_Latn', 'fon_Latn']
    """

    def distance(one: str) -> tuple[int, float]:
        pair = one.lower(), code.lower()
        common = next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), min(map(len, pair)))
        return -common, -difflib.SequenceMatcher(None, *pair).ratio()

    return sorted(known, key=distance)[:count]


def describe_languages(known: Sequence[str], direction: str, code: str | None = None) -> str:
    """A sentence with the known languages; of many, those nearest to `code`, or a few examples.

    >>> describe_languages(["de", "fr"], "into")
    'The model translates into: de, fr.'
    """
    if len(known) <= _MAX_LISTED:
        return f"The model translates {direction}: {', '.join(known)}."
    if code is None:
        return f"The model translates {direction} {len(known)} languages, such as {', '.join(known[:_NEAREST])}."
    return f"The nearest of {len(known)} languages: {', '.join(nearest_codes(code, known))}."
