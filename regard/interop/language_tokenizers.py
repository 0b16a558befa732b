"""Tokenizers of multilingual translators of transformers: NLLB, M2M100, mBART and mBART-50.

NllbTokenizer, MBart50Tokenizer   tokenizer.json with a special token per language, before a text (eng_Latn, en_XX)
MBartTokenizer                    the same, after the end of a text
M2M100Tokenizer                   sentencepiece.bpe.model, with ids from vocab.json; then a token per language (__en__)
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from regard.data.text.languages import LanguageTokens, SourceRole, TargetRole
from regard.data.text.special_tokens import SpecialTokens
from regard.interop.foreign_config import ForeignConfig
from regard.interop.sentencepiece_files import CONTROL, UNKNOWN, Piece, build_tokenizer, check_pieces, read_pieces

# Families of tokenizer classes, and the roles of source and target language.
LANGUAGE_FAMILIES: dict[str, tuple[SourceRole, TargetRole]] = {
    "nllb": ("begin", "forced"),
    "m2m100": ("begin", "forced"),
    "mbart50": ("begin", "forced"),
    "mbart": ("after_end", "sos"),
}
# Classes that define the roles, whatever tokenizer.json adds to a text.
_CLASSES = {
    "NllbTokenizer": "nllb",
    "M2M100Tokenizer": "m2m100",
    "MBartTokenizer": "mbart",
    "MBart50Tokenizer": "mbart50",
}
# eng_Latn (NLLB), en_XX (mBART), __en__ (M2M100)
_LANGUAGE = re.compile("([a-z]{2,3}_[A-Z][A-Za-z]{1,3})|__([a-z]{2,3})__")
# M2M100 has no file with its languages: `language_codes` names one of these lists, in the order of their ids.
M2M100_CODES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
        "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
        "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}


def read_m2m100_tokenizer(path: Path, names: Sequence[str], settings: ForeignConfig) -> tokenizers.Tokenizer:
    """Read the pieces of M2M100, at the ids of the names in vocab.json, and add its languages.

    If vocab.json lacks a piece, a word is split into other pieces instead of becoming unknown.
    """
    model, unknown = read_pieces(path), settings.get("unk_token", "<unk>")
    known = {piece.text: piece for piece in model.pieces if piece.kind not in (UNKNOWN, CONTROL)}
    lowest = min((piece.score for piece in known.values()), default=0.0)

    def piece(name: str) -> Piece:
        if name in known:
            return known[name]
        if len(name) == 1:  # encoded, with a lower score than all others
            return Piece(name, lowest - 10.0)
        return Piece(name, kind=UNKNOWN if name == unknown else CONTROL)

    model = dataclasses.replace(model, pieces=[piece(name) for name in names])
    check_pieces(model, path)
    library = build_tokenizer(model, path)
    codes = settings.get("language_codes", "m2m100")
    if codes not in M2M100_CODES:
        raise settings.unsupported("language_codes", f"expected one of {', '.join(M2M100_CODES)}")
    tokens = [AddedToken(f"__{code}__", special=True, normalized=False) for code in M2M100_CODES[codes].split()]
    library.add_special_tokens(tokens)
    return library


def listed_languages(table: Mapping[str, Any]) -> list[str]:
    """The language tokens among the additional special tokens in tokenizer_config.json or special_tokens_map.json."""
    listed = table.get("additional_special_tokens") or table.get("extra_special_tokens") or []
    names = [token.get("content") if isinstance(token, dict) else token for token in listed if isinstance(listed, list)]
    return [name for name in names if isinstance(name, str) and _LANGUAGE.fullmatch(name)]


def read_language_tokens(library: tokenizers.Tokenizer, family: str, settings: ForeignConfig) -> LanguageTokens | None:
    """The language tokens of a tokenizer of this family; None if it has none.

    The default languages are `src_lang` and `tgt_lang` in tokenizer_config.json; without them, the language that
    tokenizer.json adds to a text is the default source.
    """
    if family not in LANGUAGE_FAMILIES:
        return None
    special = {index: token.content for index, token in library.get_added_tokens_decoder().items() if token.special}
    matches = {index: _LANGUAGE.fullmatch(name) for index, name in sorted(special.items())}
    ids = {match[1] or match[2]: index for index, match in matches.items() if match}
    if not ids:
        return None
    encoding = library.encode("a")
    added = [index for index, is_added in zip(encoding.ids, encoding.special_tokens_mask) if is_added]
    source, target = LANGUAGE_FAMILIES[family]
    tokens = LanguageTokens(ids, target, source)
    in_template = next((code for code in map(tokens.code, added) if code is not None), None)
    class_name = str(settings.table.get("tokenizer_class")).removesuffix("Fast")
    if class_name == "NllbTokenizer" and settings.get_bool("legacy_behaviour", False):
        tokens = dataclasses.replace(tokens, source="after_end")
    elif class_name not in _CLASSES and in_template is not None:
        is_first = encoding.ids[0] == ids[in_template]
        tokens = dataclasses.replace(tokens, source="begin" if is_first else "after_end")
        if family == "mbart":
            tokens = dataclasses.replace(tokens, target="forced" if is_first else "sos")
    defaults = [settings.table.get(key) for key in ("src_lang", "tgt_lang")]
    default_source, default_target = (code if isinstance(code, str) and code in ids else None for code in defaults)
    return dataclasses.replace(tokens, default_source=default_source or in_template, default_target=default_target)


def move_default_target(special: SpecialTokens, tokens: LanguageTokens) -> tuple[SpecialTokens, LanguageTokens]:
    """The special ids of a model without its target language, which becomes the default language of the tokens.

    >>> tokens = LanguageTokens({"fr": 8}, target="forced", source="begin")
    >>> move_default_target(SpecialTokens(forced=8), tokens)[1].default_target
    'fr'
    """
    if (forced := tokens.code(special.forced)) is not None:
        tokens = dataclasses.replace(tokens, target="forced", default_target=forced)
    elif tokens.target == "sos" and (start := tokens.code(special.sos)) is not None:
        tokens = dataclasses.replace(tokens, default_target=start)
    return tokens.remove(special), tokens
