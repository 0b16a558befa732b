"""sentencepiece files (.model, .spm), read as tokenizers of the `tokenizers` library, and written.

A file is a protocol buffer. These of its fields determine how a text is segmented:

file         1 piece (repeated)   2 trainer   3 normalizer   5 denormalizer
piece        1 text   2 score   3 kind
trainer      3 type (1 unigram, 2 BPE)   24 spaces as suffixes   35 byte fallback   40-43 ids of unk, bos, eos, pad
normalizer   2 character map   3 dummy prefix   4 remove extra whitespace   5 escape spaces as ▁
"""

import base64
import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from regard.data.text.tokenizer import SPACE, piece_splits
from regard.errors import RegardError
from regard.files import read_file, write_atomically

UNIGRAM, BPE = 1, 2
# Types of pieces. No text is encoded as unknown, control or unused pieces; user-defined ones take precedence.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Suffix of unused pieces in the vocabulary: no text contains a space once its spaces are escaped as ▁.
_UNUSED_SUFFIX = " "
_BYTE_NAME = "<0x[0-9A-F]{2}>"


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary of sentencepiece."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class PieceModel:
    """The parts of a sentencepiece file that determine the ids of a text."""

    pieces: Sequence[Piece]
    type: int
    charsmap: bytes = b""  # normalization of characters; empty: none
    add_dummy_prefix: bool = True  # add a space before the text
    remove_extra_whitespaces: bool = True  # strip the text and collapse runs of spaces


def read_sentencepiece(path: str | Path) -> tokenizers.Tokenizer:
    """Read a sentencepiece file: unigram or BPE, with or without byte fallback.

    Ids and decoded texts equal those of sentencepiece, except that decoding omits unknown characters. Files for which
    this cannot be guaranteed are an error.

    >>> read_sentencepiece("no-such.model")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.model: the file is missing. Is the folder complete?
    """
    return build_tokenizer(read_pieces(path), path)


def write_sentencepiece(tokenizer: tokenizers.Tokenizer, path: str | Path) -> None:
    """Write a sentencepiece file that gives the same ids as the tokenizer.

    Supported are tokenizers from `read_sentencepiece`, those of the kind `sentencepiece` that Regard trains, and others
    that segment texts in the same way, such as Llama's. All others are an error, including other kinds: sentencepiece
    cannot separate words and punctuation.
    """
    write_pieces(to_piece_model(tokenizer, path), path)


def write_pieces(model: PieceModel, path: str | Path) -> None:
    """Write a sentencepiece file."""
    write_atomically(Path(path), _to_bytes(model))


# -- files ------------------------------------------------------------------------------------------------------------


def read_pieces(path: str | Path) -> PieceModel:
    """Read and check the pieces and the normalization of a file."""
    content = read_file(path)
    try:
        file = _Message(content)
        trainer, normalizer = _Message(file.bytes(2)), _Message(file.bytes(3))
        pieces = [_read_piece(_Message(data)) for data in file.all_bytes(1)]
        model = PieceModel(
            pieces, trainer.number(3, UNIGRAM), normalizer.bytes(2), *(bool(normalizer.number(n, 1)) for n in (3, 4))
        )
        is_escaped, has_suffixes = normalizer.number(5, 1), trainer.number(24, 0)
        denormalizer = _Message(file.bytes(5)).bytes(2)
        _check_charsmap(model.charsmap)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise RegardError(
            f"{path}: not a sentencepiece file, or damaged ({error}).", "Replace it with an intact copy."
        ) from None
    check_pieces(model, path)
    for is_unsupported, feature in (
        (model.type not in (UNIGRAM, BPE), f"type {model.type}, neither unigram nor BPE"),
        (not is_escaped, "spaces that are not escaped as ▁"),
        (has_suffixes, "spaces as suffixes of words"),
        (denormalizer, "a denormalizer"),
    ):
        if is_unsupported:
            raise RegardError(f"{path}: unsupported: {feature}.", "Use another tokenizer.")
    return model


class _Message:
    """A protocol buffer message: the values of each field by its number, varints as int and all others as bytes."""

    def __init__(self, data: bytes) -> None:
        self.fields: dict[int, list[int | bytes]] = {}
        for number, value in _decode_fields(data):
            self.fields.setdefault(number, []).append(value)

    def number(self, field: int, default: int) -> int:
        value = self.fields.get(field, [default])[-1]
        if not isinstance(value, int):
            raise ValueError(f"field {field} is not an integer")
        return value

    def bytes(self, field: int) -> bytes:
        return b"".join(self.all_bytes(field))  # repeated parts of a message are concatenated

    def all_bytes(self, field: int) -> list[bytes]:
        values = self.fields.get(field, [])
        if not all(isinstance(value, bytes) for value in values):
            raise ValueError(f"field {field} is an integer")
        return values  # type: ignore[return-value]


def _decode_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    offset = 0
    while offset < len(data):
        key, offset = _decode_varint(data, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = _decode_varint(data, offset)
            yield number, value
            continue
        if wire == 2:
            size, offset = _decode_varint(data, offset)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if offset + size > len(data):
            raise ValueError("truncated")
        yield number, data[offset : offset + size]
        offset += size


def _decode_varint(data: bytes, offset: int) -> tuple[int, int]:
    """An integer in groups of seven bits, lowest first, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            raise ValueError("truncated")
        value |= (data[offset] & 0x7F) << shift
        offset += 1
        if data[offset - 1] < 0x80:
            return value, offset
    raise ValueError("an integer of too many bytes")


def _read_piece(message: _Message) -> Piece:
    score = message.bytes(2)
    if len(score) not in (0, 4):
        raise ValueError("a score that is not a finite number")
    value = struct.unpack("<f", score)[0] if score else 0.0
    if not math.isfinite(value):
        raise ValueError("a score that is not a finite number")
    return Piece(message.bytes(1).decode(), value, message.number(3, NORMAL))


def _to_bytes(model: PieceModel) -> bytes:
    names = {piece.text: index for index, piece in enumerate(model.pieces)}
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    ids = [unknown, *(names.get(name, -1) for name in ("<s>", "</s>", "<pad>"))]
    has_fallback = any(piece.kind == BYTE for piece in model.pieces)
    pieces = (
        _encode_field(
            1,
            _encode_field(1, piece.text.encode())
            + _encode_field(2, struct.pack("<f", piece.score), 5)
            + _encode_field(3, piece.kind),
        )
        for piece in model.pieces
    )
    trainer: list[tuple[int, int]] = [(3, model.type), (4, len(model.pieces)), (35, has_fallback), *enumerate(ids, 40)]
    normalizer: list[tuple[int, int | bytes]] = [
        (2, model.charsmap),
        (3, model.add_dummy_prefix),
        (4, model.remove_extra_whitespaces),
        (5, True),
    ]
    return b"".join(
        [
            *pieces,
            _encode_field(2, b"".join(_encode_field(number, value) for number, value in trainer)),
            _encode_field(3, b"".join(_encode_field(number, value) for number, value in normalizer)),
        ]
    )


def _encode_field(number: int, value: int | bytes, wire: int = 2) -> bytes:
    if isinstance(value, int):
        return _encode_varint(number << 3) + _encode_varint(value % 2**64)
    size = _encode_varint(len(value)) if wire == 2 else b""
    return _encode_varint(number << 3 | wire) + size + value


def _encode_varint(value: int) -> bytes:
    groups = []
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


# -- checks -----------------------------------------------------------------------------------------------------------


def check_pieces(model: PieceModel, path: str | Path) -> None:
    """Raise an error if the pieces are invalid."""
    problem = _find_problem(model)
    if problem:
        raise RegardError(f"{path}: the file has {problem}.", "Replace it with an intact copy.")


def _find_problem(model: PieceModel) -> str:
    """Describe what is wrong with the pieces; empty if nothing is."""
    kinds = [piece.kind for piece in model.pieces]
    texts = {piece.text for piece in model.pieces}
    problems = (
        (kinds.count(UNKNOWN) != 1, f"{kinds.count(UNKNOWN)} unknown pieces, expected 1"),
        (len(texts) < len(kinds) or "" in texts, "duplicate or empty pieces"),
        (kinds.count(BYTE) not in (0, 256), f"{kinds.count(BYTE)} byte pieces, expected 0 or 256"),
        (not set(kinds) <= set(range(1, 7)), "a piece of an invalid type"),
    )
    return next((problem for is_present, problem in problems if is_present), "")


def _check_charsmap(data: bytes) -> None:
    """Raise an error if a lookup in the character map could leave its bounds; the `tokenizers` library does not check.

    The map is the size of a double-array trie in bytes, the trie, and the texts that its leaves point to.
    """
    if not data:
        return
    size = int.from_bytes(data[:4], "little")
    if size % 4 or size == 0 or 4 + size >= len(data) or data[-1] != 0:
        raise ValueError("a character map of the wrong size")
    units = np.frombuffer(data[4 : 4 + size], dtype="<u4").astype(np.int64)
    texts = data[4 + size :]
    is_leaf = units >> 31 == 1
    offset = units >> 10 << (units >> 9 & 1) * 8
    # The children of unit p are at p ^ offset ^ label, for labels of one byte.
    last_child = (np.arange(len(units)) ^ offset) | 0xFF
    starts = np.concatenate([[0], np.flatnonzero(np.frombuffer(texts, dtype=np.uint8) == 0)[:-1] + 1])
    targets = units[is_leaf] & 0x7FFFFFFF
    if (last_child[~is_leaf] >= len(units)).any() or not np.isin(targets, starts).all():
        raise ValueError("a character map with invalid offsets")
    texts.decode()


# -- from sentencepiece to the `tokenizers` library -------------------------------------------------------------------


def build_tokenizer(model: PieceModel, path: str | Path) -> tokenizers.Tokenizer:
    """Build a tokenizer that gives the ids of sentencepiece; the index of a piece is its id."""
    names = [piece.text + _UNUSED_SUFFIX * (piece.kind == UNUSED) for piece in model.pieces]
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    has_fallback = any(piece.kind == BYTE for piece in model.pieces)
    symbols = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED]
    library: tokenizers.Tokenizer
    if model.type == UNIGRAM:
        vocab = [(name, _score(piece)) for name, piece in zip(names, model.pieces)]
        library = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=has_fallback))
    else:
        library = tokenizers.Tokenizer(
            models.BPE(
                vocab={name: index for index, name in enumerate(names)},
                merges=_merges(model.pieces, path),
                unk_token=names[unknown],
                fuse_unk=True,
                byte_fallback=has_fallback,
            )
        )
    library.normalizer = _normalizer(model)
    for symbol in symbols:
        # sentencepiece does not normalize user-defined pieces; the `tokenizers` library would.
        if library.normalizer.normalize_str(f"a{symbol}a").removeprefix(SPACE) != f"a{symbol}a":
            raise RegardError(
                f"{path}: the user-defined piece {symbol!r} is changed by normalization.", "Use another tokenizer."
            )
    if model.type == BPE and symbols:
        _allow_whole_words(library, symbols, model.pieces, path)
    library.pre_tokenizer = _pre_tokenizer(model, symbols)
    library.decoder = _decoder(model, has_fallback)
    special = [name for name, piece in zip(names, model.pieces) if piece.kind in (UNKNOWN, CONTROL)]
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return library


def _score(piece: Piece) -> float:
    # The lowest score determines the score of unknown characters; pieces that are never used must not have it.
    if piece.kind == USER_DEFINED:
        return 0.1 * (len(piece.text.encode()) - 1)  # as sentencepiece does, regardless of the file
    return piece.score if piece.kind == NORMAL else 0.0


def _merges(pieces: Sequence[Piece], path: str | Path) -> list[tuple[str, str]]:
    """All ways to split a piece in two, by descending score of the piece.

    sentencepiece repeatedly merges the adjacent pair whose result has the highest score.
    """
    if any(piece.kind == UNUSED for piece in pieces):
        raise RegardError(f"{path}: unsupported: BPE with unused pieces.", "Use another tokenizer.")
    # Of equal scores, the leftmost pair is merged. For runs of one character (the spaces of Llama), this is the same as
    # to merge the longest first.
    normal = sorted((p for p in pieces if p.kind == NORMAL), key=lambda piece: (-piece.score, -len(piece.text)))
    known = {piece.text for piece in normal}
    characters = {piece.text for piece in pieces if len(piece.text) == 1}
    merged = [piece for piece in normal if len(piece.text) > 1]
    for piece, following in pairwise(merged):
        if piece.score == following.score and not _are_separate_runs(piece.text, following.text, known):
            raise RegardError(
                f"{path}: {piece.text!r} and {following.text!r} have the same score; the order of merges is ambiguous.",
                "Use another tokenizer.",
            )
    for piece in merged:
        missing = set(piece.text) - characters
        if missing:
            raise RegardError(
                f"{path}: the piece {piece.text!r} contains {min(missing)!r}, which is not a piece.",
                "Use another tokenizer.",
            )
    return piece_splits((piece.text for piece in merged), known)


def _are_separate_runs(piece: str, other: str, known: Collection[str]) -> bool:
    """Whether two pieces consist of one character, and no piece has several of these next to other characters."""
    [character, *others] = set(piece + other)
    return not others and not any(2 * character in text and text.strip(character) for text in known)


def _allow_whole_words(
    library: tokenizers.Tokenizer, symbols: list[str], pieces: Sequence[Piece], path: str | Path
) -> None:
    """Make BPE encode words that are pieces as one piece, as user-defined pieces require.

    sentencepiece does so for the other pieces only if merges lead to them.
    """
    if all(len(symbol) == 1 for symbol in symbols):
        return
    for piece in pieces:
        if piece.kind == NORMAL and len(library.model.tokenize(piece.text)) != 1:
            raise RegardError(f"{path}: no merges lead to the piece {piece.text!r}.", "Use another tokenizer.")
    library.model.ignore_merges = True


def _normalizer(model: PieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        charsmap = normalizers.Precompiled(model.charsmap)
        steps.append(charsmap)
        # The library looks up one grapheme at a time, and replaces a short one by the mapping of its base character, so
        # that combining accents are lost. Maps that compose accents follow NFKC, so composing before and after restores
        # them on letters; accents on symbols such as ① are still lost.
        if charsmap.normalize_str("e\u0301") == "é":
            steps = [normalizers.NFC(), charsmap, normalizers.NFC()]
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A "), "")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _pre_tokenizer(model: PieceModel, symbols: list[str]) -> pre_tokenizers.PreTokenizer | None:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.type == BPE and symbols:
        longest_first = "|".join(re.escape(symbol) for symbol in sorted(symbols, key=len, reverse=True))
        steps.append(pre_tokenizers.Split(Regex(longest_first), "isolated"))
    encodable = [piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)]
    # If no piece spans a space, splitting at spaces changes no ids, and the words can be cached.
    if SPACE in encodable and not any(SPACE in text[1:] for text in encodable):
        steps.append(pre_tokenizers.Split(SPACE, "merged_with_next"))
    reserved = [piece.text for piece in model.pieces if piece.kind in (UNKNOWN, CONTROL)]
    if model.type == UNIGRAM or any(len(symbol) > 1 for symbol in symbols):
        has_bytes = any(piece.kind == BYTE for piece in model.pieces)
        steps += make_name_splitter(reserved, encodable, ["(?<=<)(?=0x[0-9A-F]{2}>)"] * has_bytes)
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def make_name_splitter(
    names: Iterable[str], pieces: Iterable[str], more_patterns: Sequence[str] = ()
) -> list[pre_tokenizers.PreTokenizer]:
    """A pre-tokenizer that splits each name in two, so that a text that contains it is not encoded as a special token.

    The split is placed where it changes nothing else: not inside a piece, and not between two unknown characters, which
    are one token.
    """
    pieces = set(pieces)
    bigrams = {text[i : i + 2] for text in pieces for i in range(len(text) - 1)}

    def cost(name: str, cut: int) -> tuple[bool, bool]:
        return name[cut - 1 : cut + 1] in bigrams, pieces.isdisjoint(name[cut - 1 : cut + 1])

    patterns = [*more_patterns]
    for name in names:
        if len(name) > 1:
            cut = min(range(1, len(name)), key=lambda cut: cost(name, cut))
            patterns.append(f"(?<={re.escape(name[:cut])})(?={re.escape(name[cut:])})")
    return [pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")] if patterns else []


def _decoder(model: PieceModel, has_fallback: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if any(piece.kind == UNUSED for piece in model.pieces):
        steps.insert(0, decoders.Replace(_UNUSED_SUFFIX, ""))
    if has_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.remove_extra_whitespaces:
        steps.append(decoders.Replace(Regex(r"\A +"), ""))
    elif model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


# -- from the `tokenizers` library to sentencepiece -------------------------------------------------------------------


def to_piece_model(tokenizer: tokenizers.Tokenizer, path: str | Path) -> PieceModel:
    """The sentencepiece model from which `build_tokenizer` builds this tokenizer; an error if there is none."""
    table = json.loads(tokenizer.to_str())
    kind = table["model"]["type"]
    if kind not in ("Unigram", "BPE"):
        raise _not_writable(path, f"its type is {kind}, and sentencepiece supports Unigram and BPE")
    steps = _steps(table["normalizer"], "normalizers")
    maps = [step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"]
    remove_extra_whitespaces = any(step.get("pattern") == {"Regex": " +"} for step in steps)
    model = PieceModel(
        _extract_pieces(tokenizer, table, path),
        UNIGRAM if kind == "Unigram" else BPE,
        base64.b64decode(maps[0]) if maps else b"",
        add_dummy_prefix=any(step["type"] == "Prepend" for step in steps),
        remove_extra_whitespaces=remove_extra_whitespaces,
    )
    problem = _find_problem(model)
    if problem:
        raise _not_writable(path, f"it has {problem}")
    rebuilt = json.loads(build_tokenizer(model, path).to_str())
    if not table["pre_tokenizer"]:  # splitting at spaces does not change the ids
        rebuilt["pre_tokenizer"] = table["pre_tokenizer"]
    for part in ("normalizer", "pre_tokenizer", "model", "decoder"):
        if _comparable(rebuilt[part]) != _comparable(table[part]):
            raise _not_writable(path, f"sentencepiece has no equivalent of its {part}")
    return model


def _not_writable(path: str | Path, reason: str) -> RegardError:
    return RegardError(
        f"{path}: the tokenizer cannot be written as a sentencepiece file: {reason}.", "Save it as tokenizer.json."
    )


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _user_defined_patterns(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """The escaped user-defined pieces in the first step of `_pre_tokenizer`."""
    first = next(iter(_steps(pre_tokenizer, "pretokenizers")), {})
    return re.split(r"(?<!\\)\|", first.get("pattern", {}).get("Regex", ""))


def _comparable(part: Any) -> Any:
    """A part of a tokenizer in a form that does not depend on the order of the merges of one piece."""
    if not isinstance(part, dict) or "merges" not in part:
        return part
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in part["merges"]]
    return part | {"merges": [sorted(ways) for _, ways in groupby(merges, key="".join)]}


def _extract_pieces(tokenizer: tokenizers.Tokenizer, table: dict[str, Any], path: str | Path) -> list[Piece]:
    model = table["model"]
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        names = [name for name, _ in model["vocab"]]
        unknown = names[model["unk_id"]] if model["unk_id"] is not None else None
    else:
        names = sorted(model["vocab"], key=model["vocab"].get)
        if [model["vocab"][name] for name in names] != list(range(len(names))):
            raise _not_writable(path, "its ids have gaps")
        merged = dict.fromkeys("".join(merge) for merge in model["merges"])
        order = [*merged, *(name for name in names if name not in merged)]
        scores = {name: -float(index) for index, name in enumerate(order)}
        unknown = model["unk_token"]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    user_defined = _user_defined_patterns(table["pre_tokenizer"])

    def piece(name: str) -> Piece:
        if name == unknown:
            return Piece(name, 0.0, UNKNOWN)
        if name in special:
            return Piece(name, 0.0, CONTROL)
        if model["byte_fallback"] and re.fullmatch(_BYTE_NAME, name):
            return Piece(name, 0.0, BYTE)
        if name.endswith(_UNUSED_SUFFIX):
            return Piece(name.removesuffix(_UNUSED_SUFFIX), 0.0, UNUSED)
        if model["type"] == "BPE" and re.escape(name) in user_defined:
            return Piece(name, 0.0, USER_DEFINED)
        return Piece(name, scores[name])

    return [piece(name) for name in names]
