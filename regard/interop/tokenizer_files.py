"""Tokenizer files of a Hugging Face folder, read in all common formats and written as tokenizer.json.

tokenizer.json                        format of the `tokenizers` library
spiece.model, tokenizer.model         sentencepiece: T5, ALBERT, Llama
sentencepiece.bpe.model               sentencepiece with other ids: XLM-RoBERTa
source.spm, target.spm, vocab.json    sentencepiece for source and target, with separate ids: Marian
vocab.txt                             WordPiece: BERT
vocab.json, merges.txt                byte-level BPE: GPT-2, RoBERTa, BART

tokenizer_config.json and special_tokens_map.json define the roles of special tokens.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from regard import config_reader
from regard.config_reader import json_bytes
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.files import read_file, write_atomically
from regard.interop.foreign_config import ForeignConfig
from regard.interop.sentencepiece_files import (
    CONTROL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    Piece,
    PieceModel,
    build_tokenizer,
    make_name_splitter,
    read_pieces,
    to_piece_model,
    write_pieces,
)
from regard.interop.tensor_files import read_json

logger = logging.getLogger("regard")

_SAVE_AS_JSON = "Save the tokenizer as tokenizer.json with transformers."
_MARIAN_FILES = ("source.spm", "target.spm")
# Classes that use tokenizer.json as it is.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ImportedTokenizer(NamedTuple):
    """The tokenizers of source and target (the same object if there is only one), and special ids by role."""

    source: tokenizers.Tokenizer
    target: tokenizers.Tokenizer
    special: dict[str, int]


class _Family(NamedTuple):
    """Special tokens of a model family by role, and the roles that it adds around a text and between two texts."""

    names: dict[str, str]
    begin: str = ""
    end: str = ""
    between: str = ""


_BERT = _Family(dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]"), "cls", "sep")
_SENTENCEPIECE = dict(bos="<s>", eos="</s>", unk="<unk>")
_ROBERTA = _Family(_SENTENCEPIECE | dict(sep="</s>", pad="<pad>", cls="<s>", mask="<mask>"), "bos", "eos", "eos")
_FAMILIES: dict[str, _Family] = {
    "": _Family(_SENTENCEPIECE | dict(pad="<pad>")),
    "albert": _Family(_BERT.names | dict(bos="[CLS]", eos="[SEP]", unk="<unk>", pad="<pad>"), "cls", "sep"),
    "bart": _ROBERTA,
    "bert": _BERT,
    "camembert": _ROBERTA,
    "distilbert": _BERT,
    "electra": _BERT,
    "gpt2": _Family(dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")),
    "llama": _Family(_SENTENCEPIECE, "bos"),
    "marian": _Family(dict(eos="</s>", unk="<unk>", pad="<pad>"), "", "eos"),
    "roberta": _ROBERTA,
    "t5": _Family(dict(eos="</s>", unk="<unk>", pad="<pad>"), "", "eos"),
    "xlmroberta": _ROBERTA,
}


def read_tokenizer(folder: str | Path) -> ImportedTokenizer:
    """Read the tokenizer of a folder; it gives the ids of transformers. No code in the folder is executed.

    Differences from transformers: names of special tokens inside a text are encoded as text; Llama treats leading
    spaces like sentencepiece; and if Marian's vocab.json lacks a piece of its .spm files, a word is split into other
    pieces instead of becoming unknown.

    >>> read_tokenizer("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: the folder does not exist. Pass a folder with a tokenizer.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RegardError(f"{folder}: the folder does not exist.", "Pass a folder with a tokenizer.")
    path = next((folder / name for name in _FORMATS if (folder / name).exists()), None)
    if path is None:
        raise RegardError(f"{folder}: the tokenizer is missing.", f"Expected one of {', '.join(_FORMATS)}.")
    settings = _read_settings(folder)
    family, read = _read_family(folder), _FORMATS[path.name]
    supported = _SUPPORTED_FAMILIES.get(path.name)
    if supported and family not in supported:
        if family:
            raise RegardError(f"{path}: unsupported tokenizer class {family!r} for this file.", _SAVE_AS_JSON)
        family = supported[0]
    libraries = read(path, family, settings)
    source, target = libraries if isinstance(libraries, tuple) else (libraries, libraries)
    tokens = _FAMILIES.get(family, _Family({}))
    special: dict[str, int] = {}
    for library in [source] if source is target else [source, target]:
        _add_tokens(library, folder, settings.table)
        ids = _special_ids(library, settings, tokens)
        if special and ids != special:
            raise RegardError(
                f"{folder}: source and target have different ids of special tokens.",
                "Such a tokenizer cannot be imported.",
            )
        special = ids
        mark_special_tokens(library, special.values())
        if path.name != "tokenizer.json":
            begin = _boundary_role(settings, "add_bos_token", "bos", tokens.begin)
            end = _boundary_role(settings, "add_eos_token", "eos", tokens.end)
            added = special.get(begin), special.get(end), special.get(tokens.between)
            set_special_template(library, *added, segments=tokens.end == "sep")
        # Some files set truncation and padding to a fixed length.
        library.no_truncation()
        library.no_padding()
        if path.name == "tokenizer.json":
            _warn_of_ignored_flags(library, family, settings)
    return ImportedTokenizer(source, target, special)


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: str | Path,
    special: SpecialTokens,
    *,
    segments: bool = False,
    max_len: int | None = None,
) -> None:
    """Write tokenizer.json and the config files of transformers, which then gives the same ids.

    The special ids that the model needs are added around each text; `segments` adds token_type_ids for text pairs.
    """
    folder = Path(folder)
    library = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    boundaries = special.begin, special.end
    has_segments = 1 in library.encode("a", "a").type_ids
    is_separated = special.between in (None, separator_id(library))
    if boundary_ids(library) != boundaries or not is_separated or (segments and not has_segments):
        set_special_template(library, *boundaries, special.between, segments=segments)
    roles = {"bos": special.sos, "eos": special.eos, "unk": special.unk, "pad": special.pad, "mask": special.mask}
    if special.mask is not None:
        roles |= {"cls": special.begin, "sep": special.end}
    names = {f"{role}_token": library.id_to_token(index) for role, index in roles.items() if index is not None}
    for role, name in names.items():
        if name is None:
            raise RegardError(
                f"{folder}: the tokenizer has no entry for the {role}.", "Check that it belongs to the model."
            )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *["token_type_ids"] * segments, "attention_mask"],
        # Regard encodes names of special tokens inside a text as text, except masks.
        "split_special_tokens": special.mask is None,
    }
    config |= names | ({} if max_len is None else {"model_max_length": max_len})
    write_atomically(folder / "tokenizer.json", library.to_str(pretty=True).encode())
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        write_atomically(folder / file, json_bytes(content))


def write_marian_tokenizers(
    source: Tokenizer, target: Tokenizer, folder: str | Path, special: SpecialTokens, *, max_len: int
) -> None:
    """Write separate source and target tokenizers in Marian's format; both must be sentencepiece.

    Each has a file of pieces and a table of ids; a single table if the ids are the same.
    """
    folder = Path(folder)
    piece_models = {
        name: to_piece_model(tokenizer.backend_tokenizer, folder / name)
        for name, tokenizer in zip(_MARIAN_FILES, (source, target))
    }
    ids = [{piece.text: index for index, piece in enumerate(model.pieces)} for model in piece_models.values()]
    names = {
        f"{role}_token": piece_models["source.spm"].pieces[getattr(special, role)].text
        for role in ("eos", "unk", "pad")
    }
    if (special.begin, special.end) != (None, special.eos):
        raise RegardError(
            "Marian's tokenizers add <eos> after each text and nothing else; this model needs other special tokens.",
            "Train with tokenizer.shared = true.",
        )
    config = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": ids[0] != ids[1], "model_max_length": max_len}
    tables: dict[str, Any] = {
        "vocab.json": ids[0],
        "tokenizer_config.json": config | names,
        "special_tokens_map.json": names,
    }
    if ids[0] != ids[1]:
        tables["target_vocab.json"] = ids[1]
    for name, model in piece_models.items():
        write_pieces(model, folder / name)
    for file, content in tables.items():
        write_atomically(folder / file, json_bytes(content))


# -- special tokens ---------------------------------------------------------------------------------------------------


def boundary_ids(library: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """The ids that a tokenizer adds before and after each text, at most one each."""
    encoding = library.encode("a")
    added = [bool(flag) for flag in encoding.special_tokens_mask]
    # If all ids are special (the text is unknown), the first half counts as before.
    before = (len(added) + 1) // 2 if all(added) else added.index(False)
    after = len(added) - before - added[before:].count(False)
    if before > 1 or after > 1:
        raise RegardError(
            "The tokenizer adds several special tokens before or after each text.", "Regard supports one each."
        )
    return encoding.ids[0] if before else None, encoding.ids[-1] if after else None


def separator_id(library: tokenizers.Tokenizer) -> int | None:
    """The id that a tokenizer adds between two texts, after the end of the first (RoBERTa), if any."""
    single, pair, end = library.encode("a").ids, library.encode("a", "a").ids, boundary_ids(library)[1]
    tail = library.encode("a", add_special_tokens=False).ids + ([] if end is None else [end])
    middle = pair[len(single) : len(pair) - len(tail)]
    return middle[0] if len(middle) == 1 and pair == [*single, *middle, *tail] else None


def set_special_template(
    library: tokenizers.Tokenizer,
    begin: int | None,
    end: int | None,
    between: int | None = None,
    *,
    segments: bool = False,
) -> None:
    """Make a tokenizer add these ids before and after each text, and between two texts."""
    names = {index: library.id_to_token(index) for index in (begin, end, between) if index is not None}
    first, last, middle = ([] if index is None else [names[index]] for index in (begin, end, between))
    second = [f"{name}:{int(segments)}" for name in (*middle, "$B", *last)]
    library.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *second],
        special_tokens=[(name, index) for index, name in names.items()],
    )


def _read_family(folder: Path) -> str:
    """The family of the folder's tokenizer class: "bert" for BertTokenizerFast; empty if there is none."""
    tokenizer, config = read_json(folder / "tokenizer_config.json"), read_json(folder / "config.json")
    for name in (tokenizer.get("tokenizer_class"), config.get("tokenizer_class"), config.get("model_type")):
        family = re.sub(r"tokenizer(fast)?$|[-_]", "", name.lower()) if isinstance(name, str) else ""
        if name not in _GENERIC_CLASSES and family:
            return family
    return ""


def _warn_of_ignored_flags(library: tokenizers.Tokenizer, family: str, settings: ForeignConfig) -> None:
    """Warn if add_bos_token or add_eos_token contradicts tokenizer.json, which transformers 5 prefers."""
    if family not in _FLAG_FAMILIES:
        return
    for key, added in zip(("add_bos_token", "add_eos_token"), boundary_ids(library)):
        if settings.table.get(key) is not None and settings.get_bool(key, False) != (added is not None):
            logger.warning("%s: %s = %s is ignored; tokenizer.json decides.", settings.origin, key, settings.table[key])


def _boundary_role(settings: ForeignConfig, key: str, role: str, default: str) -> str:
    """The role of the token at a boundary of each text: of the config, else of the family; empty for none."""
    if settings.table.get(key) is None:
        return default
    return role if settings.get_bool(key, False) else ""


def _read_settings(folder: Path) -> ForeignConfig:
    """The settings in tokenizer_config.json and special_tokens_map.json."""
    path = folder / "tokenizer_config.json"
    table = read_json(path) | {k: v for k, v in read_json(folder / "special_tokens_map.json").items() if v is not None}
    return ForeignConfig(table, str(path))


def special_ids(library: tokenizers.Tokenizer, folder: Path) -> dict[str, int]:
    """The special ids by role, for a tokenizer that replaces the one of the folder."""
    return _special_ids(library, _read_settings(folder), _FAMILIES.get(_read_family(folder), _Family({})))


def _special_ids(library: tokenizers.Tokenizer, settings: ForeignConfig, tokens: _Family) -> dict[str, int]:
    ids = {}
    for role in ROLES:
        name = _token_name(settings, role, tokens)
        index = library.token_to_id(name) if name is not None else None
        if index is not None:
            ids[role] = index
    return ids


def _token_name(settings: ForeignConfig, role: str, tokens: _Family) -> str | None:
    value = settings.table.get(f"{role}_token")
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise RegardError(f"{settings.origin}: {role}_token = {value!r}; expected a name.", "Fix the file.")
    return tokens.names.get(role) if name is None else name


def _add_tokens(library: tokenizers.Tokenizer, folder: Path, table: Mapping[str, Any]) -> None:
    """Add the tokens that extend the vocabulary, from tokenizer_config.json or added_tokens.json."""
    origin = folder / "tokenizer_config.json"
    added = table.get("added_tokens_decoder")
    if added is None:
        origin = folder / "added_tokens.json"
        added = {index: {"content": name} for name, index in read_json(origin).items()}
    try:
        rows = sorted((int(index), AddedToken(**options)) for index, options in added.items())
    except (TypeError, ValueError, AttributeError):
        raise RegardError(f"{origin}: invalid added tokens.", "Fix the file.") from None
    for index, token in rows:
        if library.token_to_id(token.content) is None:
            library.add_tokens([token])
        if library.token_to_id(token.content) != index:
            raise RegardError(
                f"{origin}: expected id {index} for {token.content!r}, got {library.token_to_id(token.content)}.",
                "Check that no tokenizer file is missing.",
            )
        if token.special:
            library.add_special_tokens(_tokens_to_mark_special(library, [index]))


def _tokens_to_mark_special(library: tokenizers.Tokenizer, ids: Iterable[int]) -> list[AddedToken]:
    added = library.get_added_tokens_decoder()
    return [
        AddedToken(library.id_to_token(index), special=True, normalized=False)
        for index in sorted(set(ids))
        if index not in added or not added[index].special
    ]


def mark_special_tokens(library: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
    """Make tokens special. A text that contains the name of a special token is encoded as text, never as that token."""
    library.add_special_tokens(_tokens_to_mark_special(library, ids))
    library.encode_special_tokens = True
    special = {token.content: index for index, token in library.get_added_tokens_decoder().items() if token.special}
    try:
        encodings = [(name, index, library.encode(name, add_special_tokens=False)) for name, index in special.items()]
    except Exception as error:  # the only class that the library raises
        raise RegardError(
            f"The tokenizer cannot encode the names of its special tokens ({error}).", "It cannot be imported."
        ) from None
    encodable = [
        name
        for name, index, encoding in encodings
        if any(i == index and end - start == len(name) for i, (start, end) in zip(encoding.ids, encoding.offsets))
    ]
    pieces = library.get_vocab(with_added_tokens=False).keys() - special.keys()
    splitter = make_name_splitter(encodable, pieces) if encodable else []
    if splitter:
        steps = [] if library.pre_tokenizer is None else [library.pre_tokenizer]
        library.pre_tokenizer = pre_tokenizers.Sequence([*steps, *splitter])


# -- formats ----------------------------------------------------------------------------------------------------------


def _read_library(path: Path, family: str, settings: ForeignConfig) -> tokenizers.Tokenizer:
    """Read tokenizer.json. The class of the tokenizer applies the flags of tokenizer_config.json on top of it."""
    library = Tokenizer.load(path, foreign=True).backend_tokenizer
    if settings.table.get("tokenizer_class") in _GENERIC_CLASSES:
        return library
    normalizer, pre_tokenizer = library.normalizer, library.pre_tokenizer
    if family in _SUPPORTED_FAMILIES["vocab.txt"] and isinstance(normalizer, normalizers.BertNormalizer):
        library.normalizer = _bert_normalizer(settings, clean_text=normalizer.clean_text)
    elif family in (*_SUPPORTED_FAMILIES["vocab.txt"], "albert") and settings.table.get("do_lower_case") is not None:
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
    model = read_pieces(path)
    if family == "xlmroberta":
        model = _reorder_for_xlm_roberta(model, path)
    library = build_tokenizer(model, path)
    if family == "t5":
        extra = settings.get_natural("extra_ids", 100)
        names = [f"<extra_id_{index}>" for index in reversed(range(extra))]
        library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if family == "albert":
        steps: list[normalizers.Normalizer] = [normalizers.Replace(quote, '"') for quote in ("``", "''")]
        if not settings.get_bool("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if settings.get_bool("do_lower_case", True):
            steps.append(normalizers.Lowercase())
        library.normalizer = normalizers.Sequence([*steps, library.normalizer])
    return library


def _reorder_for_xlm_roberta(model: PieceModel, path: Path) -> PieceModel:
    """The pieces in the order of fairseq, which has its special tokens at the first four ids and at the end."""
    if [piece.text for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise RegardError(
            f"{path}: expected <unk>, <s> and </s> as the first pieces.", "Check that it belongs to the model."
        )
    first = [Piece(name, kind=CONTROL) for name in ("<s>", "<pad>", "</s>")]
    pieces = [*first, model.pieces[0], *model.pieces[3:], Piece("<mask>", kind=CONTROL)]
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
        raise RegardError(f"{path}: BPE with ids from another file is not supported.", _SAVE_AS_JSON)
    known = {piece.text: piece for piece in model.pieces if piece.kind not in (UNKNOWN, CONTROL)}
    lowest = min((piece.score for piece in known.values()), default=0.0)
    roles = {_token_name(settings, role, _FAMILIES["marian"]): role for role in ("eos", "pad", "unk")}
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
    unknown = _token_name(settings, "unk", _BERT)
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
_FORMATS: dict[str, Callable[..., Any]] = {
    "tokenizer.json": _read_library,
    "spiece.model": _read_sentencepiece,
    "tokenizer.model": _read_sentencepiece,
    "sentencepiece.bpe.model": _read_sentencepiece,
    "source.spm": _read_marian,
    "vocab.txt": _read_wordpiece,
    "vocab.json": _read_byte_level,
}
# Families that use each file; the first is the default if the folder has no tokenizer class.
_SUPPORTED_FAMILIES: dict[str, tuple[str, ...]] = {
    "spiece.model": ("", "t5", "albert", "llama"),
    "tokenizer.model": ("", "t5", "albert", "llama"),
    "sentencepiece.bpe.model": ("xlmroberta",),
    "source.spm": ("marian",),
    "vocab.txt": ("bert", "distilbert", "electra"),
    "vocab.json": ("gpt2", "roberta", "bart"),
}
# Families whose special tokens around a text depend on add_bos_token and add_eos_token.
_FLAG_FAMILIES = ("", "gpt2", "llama", "qwen2", "qwen3")
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
