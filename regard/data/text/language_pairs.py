"""Language pairs of translation models, and the tags that name the target language (Johnson et al. 2017)."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from regard.data.text.readers import is_table
from regard.errors import RegardError

# A code as in BCP 47: a language in lower case, then script or region with a capital (pt-BR, zh_Hans) or digits.
_CODE = r"[a-z]{2,8}(?:[-_](?:[A-Z][A-Za-z]*|\d+))*"
_PAIR = re.compile(rf"({_CODE})-({_CODE})")


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
