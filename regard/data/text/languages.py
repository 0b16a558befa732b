"""Languages of translation models: pairs, the tags that name the target (Johnson et al. 2017), and tokens of imported
models; writing systems without spaces between words, and the matching sacreBLEU tokenizer."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import fmean
from typing import Any, Literal, NamedTuple

from regard.data.text.readers import is_table
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.ranges import check_value, format_value

# A code as in BCP 47: a language in lower case, then script or region with a capital (pt-BR, zh_Hans) or digits.
_CODE = r"[a-z]{2,8}(?:[-_](?:[A-Z][A-Za-z]*|\d+))*"
_PAIR = re.compile(rf"({_CODE})-({_CODE})")
SourceRole = Literal["begin", "after_end"]
TargetRole = Literal["begin", "forced", "sos"]
# Longer lists of languages are not written out in messages.
_MAX_LISTED = 12
_NEAREST = 5


class LanguagePair(NamedTuple):
    """Codes of a source and a target language.

    >>> str(LanguagePair("en", "de"))
    'en-de'
    """

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    @property
    def reversed(self) -> "LanguagePair":
        """The opposite direction."""
        return LanguagePair(self.target, self.source)


def parse_language_pairs(languages: Sequence[str], name: str = "data.languages") -> tuple[LanguagePair, ...]:
    """Parse language pairs ("en-de", "en-fr"), or one pair as two codes ("en", "fr").

    >>> parse_language_pairs(["en-de", "en-pt-BR"])
    (LanguagePair(source='en', target='de'), LanguagePair(source='en', target='pt-BR'))
    >>> parse_language_pairs(["en", "fr"])
    (LanguagePair(source='en', target='fr'),)
    """
    matches = [_PAIR.fullmatch(entry) for entry in languages]
    if all(matches):
        return tuple(LanguagePair(*match.groups()) for match in matches if match)
    if len(languages) == 2 and not any(matches):
        return (LanguagePair(*languages),)
    raise RegardError(
        f"{name} = {list(languages)}; expected two language codes, or pairs of codes.",
        "Pass source and target (en fr), or one pair per file (en-de en-fr).",
    )


def format_language_pairs(pairs: Sequence[LanguagePair]) -> list[str]:
    """The notation that `parse_language_pairs` reads; one pair as two codes.

    >>> format_language_pairs([LanguagePair("en", "fr")])
    ['en', 'fr']
    """
    return list(pairs[0]) if len(pairs) == 1 else [str(pair) for pair in pairs]


def add_directions(pairs: Sequence[LanguagePair], both: bool) -> tuple[LanguagePair, ...]:
    """The pairs, each once; with `both`, also in the opposite direction.

    >>> [str(pair) for pair in add_directions([LanguagePair("en", "de")], both=True)]
    ['en-de', 'de-en']
    """
    return tuple(dict.fromkeys(way for pair in pairs for way in ((pair, pair.reversed) if both else (pair,))))


def files_per_pair(files: Sequence[str], pairs: Sequence[LanguagePair], name: str) -> list[tuple[str, ...]]:
    """The files of each language pair: one table, or a source file and a target file.

    >>> files_per_pair(["a.en", "a.de", "b.en", "b.fr"], parse_language_pairs(["en-de", "en-fr"]), "data.files")
    [('a.en', 'a.de'), ('b.en', 'b.fr')]
    """
    if len(pairs) == 1:
        return [tuple(files)]
    for count in (1, 2):
        if len(files) == count * len(pairs) and (count == 2 or all(map(is_table, files))):
            return [tuple(files[i : i + count]) for i in range(0, len(files), count)]
    raise RegardError(
        f"{name}: got {len(files)} files for {len(pairs)} language pairs ({' '.join(map(str, pairs))}).",
        "Pass one table (.tsv, .csv, .jsonl, .parquet) per pair, or a source file and a target file per pair, in the "
        "order of data.languages.",
    )


def language_tag(code: str) -> str:
    """The special token before a source text that names the target language.

    >>> language_tag("fr")
    '<2fr>'
    """
    return f"<2{code}>"


def tag_code(token: str) -> str | None:
    """The language code of a tag; None for other tokens.

    >>> tag_code("<2fr>"), tag_code("<eos>")
    ('fr', None)
    """
    match = re.fullmatch("<2(.+)>", token)
    return match[1] if match else None


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
        names = {field.name for field in dataclasses.fields(LanguageTokens)}
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

    def distance(known_code: str) -> tuple[int, float]:
        pair = known_code.lower(), code.lower()
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


# Unicode blocks of scripts that are written without spaces: kana; Han; Thai and Lao, Burmese, Khmer.
_KANA = ((0x3040, 0x30FF),)
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3134F))
_OTHERS = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))
UNSEGMENTED_BLOCKS = _KANA + _HAN + _OTHERS
# The mean word length is below this in every language that separates words by spaces.
MAX_MEAN_WORD_LENGTH = 15


def is_unsegmented(texts: Iterable[str]) -> bool:
    """Whether texts are written without spaces between words, like Chinese, Japanese and Thai.

    >>> is_unsegmented(["我喜欢猫。", "他在家。"]), is_unsegmented(["The cat sleeps."])
    (True, False)
    """
    texts = list(texts)
    words = [word for text in texts for word in text.split()]
    if _letter_share(texts, UNSEGMENTED_BLOCKS) > 0.3:
        return True
    return bool(words) and fmean(map(len, words)) > MAX_MEAN_WORD_LENGTH


def bleu_tokenizer_for(references: Iterable[str]) -> str:
    """The sacreBLEU tokenizer for these references: by words, or by characters if words are not separated.

    >>> bleu_tokenizer_for(["Le chat dort."]), bleu_tokenizer_for(["我喜欢猫。"])
    ('13a', 'zh')
    """
    references = list(references)
    if not is_unsegmented(references):
        return "13a"
    if _letter_share(references, _KANA) > 0.05:
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    return "zh" if _letter_share(references, _HAN) > 0.3 else "char"


def _letter_share(texts: Iterable[str], blocks: tuple[tuple[int, int], ...]) -> float:
    """Share of the letters in these Unicode blocks."""
    letters = [ord(character) for text in texts for character in text if character.isalpha()]
    return sum(any(low <= code <= high for low, high in blocks) for code in letters) / max(1, len(letters))
