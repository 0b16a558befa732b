"""Formats of tokenizer files in a Hugging Face folder, and the special tokens of model families."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from regard import config_reader
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.files import read_file
from regard.interop.foreign_config import ForeignConfig
from regard.interop.language_tokenizers import LANGUAGE_FAMILIES, listed_languages, read_m2m100_tokenizer
from regard.interop.sentencepiece_files import (
    CONTROL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    Piece,
    PieceModel,
    build_tokenizer,
    read_pieces,
)

SAVE_AS_JSON = "Save the tokenizer as tokenizer.json with transformers."
MARIAN_FILES = ("source.spm", "target.spm")
# Classes that use tokenizer.json as it is.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")


class TokenizerFamily(NamedTuple):
    """Special tokens of a model family by role, and the roles that it adds around a text and between two texts."""

    names: dict[str, str]
    begin: str = ""
    end: str = ""
    between: str = ""


_BERT = TokenizerFamily(dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]"), "cls", "sep")
_SENTENCEPIECE = dict(bos="<s>", eos="</s>", unk="<unk>")
_ROBERTA = TokenizerFamily(
    _SENTENCEPIECE | dict(sep="</s>", pad="<pad>", cls="<s>", mask="<mask>"), "bos", "eos", "eos"
)
FAMILY_TOKENS: dict[str, TokenizerFamily] = {
    "": TokenizerFamily(_SENTENCEPIECE | dict(pad="<pad>")),
    "albert": TokenizerFamily(_BERT.names | dict(bos="[CLS]", eos="[SEP]", unk="<unk>", pad="<pad>"), "cls", "sep"),
    "bart": _ROBERTA,
    "bert": _BERT,
    "camembert": _ROBERTA,
    "debertav2": TokenizerFamily(_BERT.names | dict(bos="[CLS]", eos="[SEP]"), "cls", "sep"),
    "distilbert": _BERT,
    "electra": _BERT,
    "gpt2": TokenizerFamily(dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")),
    "llama": TokenizerFamily(_SENTENCEPIECE, "bos"),
    **dict.fromkeys(LANGUAGE_FAMILIES, TokenizerFamily(_ROBERTA.names, "", "eos")),
    "marian": TokenizerFamily(dict(eos="</s>", unk="<unk>", pad="<pad>"), "", "eos"),
    "roberta": _ROBERTA,
    "t5": TokenizerFamily(dict(eos="</s>", unk="<unk>", pad="<pad>"), "", "eos"),
    "xlmroberta": _ROBERTA,
}


def token_name(settings: ForeignConfig, role: str, tokens: TokenizerFamily) -> str | None:
    """The name of the token that has a role: of the config, where null means none, else of the family."""
    value = settings.table.get(f"{role}_token", tokens.names.get(role))
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise RegardError(f"{settings.origin}: {role}_token = {value!r}; expected a name.", "Fix the file.")
    return name


def _read_library(path: Path, family: str, settings: ForeignConfig) -> tokenizers.Tokenizer:
    """Read tokenizer.json. The class of the tokenizer applies the flags of tokenizer_config.json on top of it."""
    library = Tokenizer.load(path, foreign=True).backend_tokenizer
    if settings.table.get("tokenizer_class") in GENERIC_CLASSES:
        return library
    normalizer, pre_tokenizer = library.normalizer, library.pre_tokenizer
    if family in SUPPORTED_FAMILIES["vocab.txt"] and isinstance(normalizer, normalizers.BertNormalizer):
        library.normalizer = _bert_normalizer(settings, clean_text=normalizer.clean_text)
    elif family in (*SUPPORTED_FAMILIES["vocab.txt"], "albert") and settings.table.get("do_lower_case") is not None:
        is_lower = normalizer is not None and normalizer.normalize_str("A") == "a"
        if settings.get_bool("do_lower_case", True) != is_lower:
            raise settings.unsupported("do_lower_case", f"the normalizer in {path.name} does the opposite")
    prefix_space = settings.table.get("add_prefix_space")
    if family in _PREFIX_SPACE_FAMILIES and prefix_space is not None:
        if isinstance(pre_tokenizer, pre_tokenizers.ByteLevel):
            pre_tokenizer.add_prefix_space = settings.get_bool("add_prefix_space", False)
            library.pre_tokenizer = pre_tokenizer
        elif settings.get_bool("add_prefix_space", False) != _adds_prefix_space(library):
            raise settings.unsupported("add_prefix_space", f"the tokenizer in {path.name} does the opposite")
    return library


def _bert_normalizer(settings: ForeignConfig, clean_text: bool = True) -> normalizers.BertNormalizer:
    """The normalizer of BERT's tokenizer class: its flags, or their defaults, replace those in tokenizer.json."""
    accents = settings.table.get("strip_accents")
    return normalizers.BertNormalizer(
        clean_text=clean_text,
        lowercase=settings.get_bool("do_lower_case", True),
        handle_chinese_chars=settings.get_bool("tokenize_chinese_chars", True),
        # None: accents are stripped if texts are lowercased.
        strip_accents=None if accents is None else settings.get_bool("strip_accents", False),
    )


def _adds_prefix_space(library: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer puts a space in front of a text."""
    tokens = library.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(("\u2581", "\u0120"))


def _read_sentencepiece(path: Path, family: str, settings: ForeignConfig) -> tokenizers.Tokenizer:
    vocab = path.parent / "vocab.json"
    if family == "m2m100" and vocab.exists():
        return read_m2m100_tokenizer(path, _read_vocab(vocab), settings)
    model = read_pieces(path)
    if path.name == "sentencepiece.bpe.model":
        languages = listed_languages(settings.table)
        if family in LANGUAGE_FAMILIES and not languages:
            raise RegardError(f"{path.parent}: no file lists the languages of the tokenizer.", SAVE_AS_JSON)
        model = _reorder_for_fairseq(model, path, languages)
    library = build_tokenizer(model, path)
    if family == "t5":
        extra = settings.get_natural("extra_ids", 100)
        names = [f"<extra_id_{index}>" for index in reversed(range(extra))]
        library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if family == "debertav2":
        settings.require("split_by_punct", False)
        settings.require("do_lower_case", False)
        mask = token_name(settings, "mask", FAMILY_TOKENS[family])
        if mask is not None and library.token_to_id(mask) is None:  # not in the published files
            library.add_special_tokens([AddedToken(mask, special=True, normalized=False)])
    if family == "albert":
        steps: list[normalizers.Normalizer] = [normalizers.Replace(quote, '"') for quote in ("``", "''")]
        if not settings.get_bool("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if settings.get_bool("do_lower_case", True):
            steps.append(normalizers.Lowercase())
        library.normalizer = normalizers.Sequence([*steps, library.normalizer])
    return library


def _reorder_for_fairseq(model: PieceModel, path: Path, languages: Sequence[str]) -> PieceModel:
    """The pieces in the order of fairseq, which has its special tokens at the first four ids and at the end."""
    if [piece.text for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise RegardError(
            f"{path}: expected <unk>, <s> and </s> as the first pieces.", "Check that it belongs to the model."
        )
    first = [Piece(name, kind=CONTROL) for name in ("<s>", "<pad>", "</s>")]
    last = [Piece(name, kind=CONTROL) for name in (*languages, "<mask>")]
    pieces = [*first, model.pieces[0], *model.pieces[3:], *last]
    return dataclasses.replace(model, pieces=pieces)


def _read_marian(path: Path, family: str, settings: ForeignConfig) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    folder = path.parent
    vocab = folder / "vocab.json"
    target_vocab = folder / "target_vocab.json" if settings.get_bool("separate_vocabs", False) else vocab
    return (
        _assign_ids(path, _read_vocab(vocab), vocab, settings),
        _assign_ids(folder / "target.spm", _read_vocab(target_vocab), target_vocab, settings),
    )


def _assign_ids(path: Path, names: list[str], origin: Path, settings: ForeignConfig) -> tokenizers.Tokenizer:
    """The pieces of one side at the ids of the vocabulary; pieces of the other side are present but unused."""
    model = read_pieces(path)
    if model.type != UNIGRAM:
        raise RegardError(f"{path}: BPE with ids from another file is not supported.", SAVE_AS_JSON)
    known = {piece.text: piece for piece in model.pieces if piece.kind not in (UNKNOWN, CONTROL)}
    lowest = min((piece.score for piece in known.values()), default=0.0)
    roles = {token_name(settings, role, FAMILY_TOKENS["marian"]): role for role in ("eos", "pad", "unk")}
    languages = [name for name in names if re.fullmatch(">>[^<>]+<<", name)]

    def piece(name: str) -> Piece:
        if name in roles:
            return Piece(name, kind=UNKNOWN if roles[name] == "unk" else CONTROL)
        if name in known or name in languages:
            return known.get(name, Piece(name))
        # A single character of the other side is encoded, with the score of an unknown one.
        return Piece(name, lowest - 10.0) if len(name) == 1 else Piece(name, kind=UNUSED)

    pieces = [piece(name) for name in names]
    if not any(candidate.kind == UNKNOWN for candidate in pieces):
        raise RegardError(f"{origin}: the entry for unknown pieces is missing.", "Replace it with an intact copy.")
    library = build_tokenizer(dataclasses.replace(model, pieces=pieces), path)
    # A prefix of the source selects the target language: >>fra<< Hello.
    library.add_tokens([AddedToken(name, normalized=False) for name in languages])
    return library


def _read_wordpiece(path: Path, family: str, settings: ForeignConfig) -> tokenizers.Tokenizer:
    lines = _read_text(path).split("\n")  # not splitlines(): other line separators are entries
    names = [line.removesuffix("\r") for line in lines[: -1 if lines[-1] == "" else None]]
    if len(set(names)) < len(names):
        duplicate = next(name for index, name in enumerate(names) if name in names[:index])
        raise RegardError(f"{path}: duplicate entry {duplicate!r}.", "Replace it with an intact copy.")
    unknown = token_name(settings, "unk", _BERT) or _BERT.names["unk"]
    if unknown not in names:
        raise RegardError(f"{path}: the entry {unknown} is missing.", "Replace it with an intact copy.")
    vocab = {name: index for index, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    library.normalizer = _bert_normalizer(settings)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def _read_byte_level(path: Path, family: str, settings: ForeignConfig) -> tokenizers.Tokenizer:
    names = _read_vocab(path)
    merges_path = path.parent / "merges.txt"
    lines = _read_text(merges_path).split("\n")
    rows = [line.removesuffix("\r") for line in lines if line.strip() and not line.startswith("#version:")]
    library = build_byte_level(names, rows, merges_path, path.name)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get_bool("add_prefix_space", False))
    return library


def build_byte_level(
    names: Sequence[str], rows: Iterable[str], path: Path, vocab: str = "the vocabulary"
) -> tokenizers.Tokenizer:
    """Build byte-level BPE from the names of tokens and the merges, as "left right"; errors name `path` and `vocab`.

    >>> build_byte_level(["a", "b", "ab"], ["a b"], Path("merges.txt")).encode("abb").tokens
    ['ab', 'b']
    """
    merges = [(left, right) for left, _, right in (row.partition(" ") for row in rows)]
    ids = {name: index for index, name in enumerate(names)}
    for merge in merges:
        if not {*merge, "".join(merge)} <= ids.keys():
            raise RegardError(
                f"{path}: {' '.join(merge)!r} does not match {vocab}.", "Check that both belong to the model."
            )
    library = tokenizers.Tokenizer(models.BPE(ids, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


# Supported files in order of precedence, and their readers.
FORMATS: dict[str, Callable[..., Any]] = {
    "tokenizer.json": _read_library,
    "spiece.model": _read_sentencepiece,
    "spm.model": _read_sentencepiece,
    "tokenizer.model": _read_sentencepiece,
    "sentencepiece.bpe.model": _read_sentencepiece,
    "source.spm": _read_marian,
    "vocab.txt": _read_wordpiece,
    "vocab.json": _read_byte_level,
}
# Families that use each file; the first is the default if the folder has no tokenizer class.
SUPPORTED_FAMILIES: dict[str, tuple[str, ...]] = {
    "spiece.model": ("", "t5", "albert", "llama"),
    "spm.model": ("debertav2",),
    "tokenizer.model": ("", "t5", "albert", "llama"),
    "sentencepiece.bpe.model": ("xlmroberta", *LANGUAGE_FAMILIES),
    "source.spm": ("marian",),
    "vocab.txt": ("bert", "distilbert", "electra"),
    "vocab.json": ("gpt2", "roberta", "bart"),
}
# Families whose special tokens around a text depend on add_bos_token and add_eos_token.
FLAG_FAMILIES = ("", "gpt2", "llama", "qwen2", "qwen3")
# Families whose tokenizer class applies add_prefix_space.
_PREFIX_SPACE_FAMILIES = ("gpt2", "roberta", "bart", "llama", "qwen2")


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode()  # keeps line endings
    except UnicodeDecodeError:
        raise RegardError(f"{path}: not valid UTF-8.", "Replace it with an intact copy.") from None


def _read_vocab(path: Path) -> list[str]:
    """The names in a vocab.json in the order of their ids."""
    table = config_reader.read_json(path, unique_keys=False)
    if not table or {type(index) for index in table.values()} != {int} or set(table.values()) != set(range(len(table))):
        raise RegardError(f"{path}: the ids are not 0, 1, 2, …", "Replace it with an intact copy.")
    return sorted(table, key=table.__getitem__)
