"""Files of the sentencepiece program (.model, .spm), opened as objects of the `tokenizers` library, and written.

Such a file is a protocol buffer. Of its many fields these decide how a text is cut:

file         1 a piece, many times   2 trainer   3 normaliser   5 denormaliser
piece        1 text   2 score   3 kind
trainer      3 type (1 unigram, 2 BPE)   24 spaces end words   35 byte fallback   40-43 ids of unk, bos, eos, pad
normaliser   2 character map   3 a space before the text   4 no needless spaces   5 spaces as ▁
"""

import base64
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from regard.data.text.tokenizer import SPACE
from regard.errors import RegardError
from regard.files import read_file, write_whole

UNIGRAM, BPE = 1, 2
# What a piece is. No text becomes an unknown, control or unused piece; user-defined ones go before all others.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# An unused piece has this after its name in our vocabulary: a sign that no text has once its spaces are ▁.
_NEVER = " "
_BYTE_NAME = "<0x[0-9A-F]{2}>"


@dataclass(frozen=True)
class Piece:
    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class PieceModel:
    """What a file of sentencepiece says, as far as it decides the ids of a text."""

    pieces: Sequence[Piece]
    type: int
    charsmap: bytes = b""  # which characters become which others; empty: none does
    prefix: bool = True  # a space goes before the text
    squeeze: bool = True  # spaces around the text go, and of several inside it one stays


def read_sentencepiece(path: str | Path) -> tokenizers.Tokenizer:
    """Opens a file of sentencepiece: unigram, or BPE, with or without byte fallback.

    Ids and decoded texts are those of sentencepiece itself, apart from unknown characters, which decoding leaves out.
    What could not be the same is refused.

    >>> read_sentencepiece("no-such.model")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.model: the file is missing. Is the folder complete?
    """
    return build(read_pieces(path), path)


def write_sentencepiece(tokenizer: tokenizers.Tokenizer, path: str | Path) -> None:
    """Writes a file that sentencepiece opens, and whose ids are those of the tokeniser.

    Tokenisers that `read_sentencepiece` gave can be written, and others that cut texts in the same way, such as
    Llama's. Any other is refused, and so are the kinds that are trained here, for sentencepiece has no way to keep
    words and signs apart.
    """
    write_pieces(piece_model(tokenizer, path), path)


def write_pieces(model: PieceModel, path: str | Path) -> None:
    write_whole(Path(path), _to_bytes(model))


# -- the file --------------------------------------------------------------------------------------------------------


def read_pieces(path: str | Path) -> PieceModel:
    """The pieces of a file and how it treats spaces and characters, checked but not yet made into a tokeniser."""
    content = read_file(path)
    try:
        file = _Message(content)
        trainer, normalizer = _Message(file.bytes(2)), _Message(file.bytes(3))
        pieces = [_piece(_Message(one)) for one in file.all_bytes(1)]
        model = PieceModel(
            pieces, trainer.number(3, UNIGRAM), normalizer.bytes(2), *(bool(normalizer.number(n, 1)) for n in (3, 4))
        )
        escaped, suffixed = normalizer.number(5, 1), trainer.number(24, 0)
        denormalizer = _Message(file.bytes(5)).bytes(2)
        _check_charsmap(model.charsmap)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise RegardError(f"{path}: not a file of sentencepiece, or damaged ({error}).", "Name a good one.") from None
    if _fault(model):
        raise RegardError(f"{path}: it has {_fault(model)}.", "Put a good copy in its place.")
    for wrong, what in (
        (model.type not in (UNIGRAM, BPE), f"type {model.type}, which is neither unigram nor BPE"),
        (not escaped, "spaces that are not written as ▁"),
        (suffixed, "spaces at the ends of words"),
        (denormalizer, "a map of characters for decoding"),
    ):
        if wrong:
            raise RegardError(f"{path}: it has {what}, which Regard does not know.", "Use another tokeniser.")
    return model


class _Message:
    """A protocol buffer: for each number of a field the values it has, varints as int and all others as bytes."""

    def __init__(self, data: bytes) -> None:
        self.fields: dict[int, list[int | bytes]] = {}
        for number, value in _fields(data):
            self.fields.setdefault(number, []).append(value)

    def number(self, field: int, default: int) -> int:
        value = self.fields.get(field, [default])[-1]
        if not isinstance(value, int):
            raise ValueError(f"field {field} is no number")
        return value

    def bytes(self, field: int) -> bytes:
        return b"".join(self.all_bytes(field))  # a message in several parts is the parts, one after the other

    def all_bytes(self, field: int) -> list[bytes]:
        values = self.fields.get(field, [])
        if not all(isinstance(value, bytes) for value in values):
            raise ValueError(f"field {field} is a number")
        return values  # type: ignore[return-value]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if place + size > len(data):
            raise ValueError("cut off")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("cut off")
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value, place
    raise ValueError("a number of too many bytes")


def _piece(message: _Message) -> Piece:
    score = message.bytes(2)
    if len(score) not in (0, 4):
        raise ValueError("a score that is no number")
    value = struct.unpack("<f", score)[0] if score else 0.0
    if not math.isfinite(value):
        raise ValueError("a score that is no number")
    return Piece(message.bytes(1).decode(), value, message.number(3, NORMAL))


def _to_bytes(model: PieceModel) -> bytes:
    names = {piece.text: index for index, piece in enumerate(model.pieces)}
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    ids = [unknown, *(names.get(name, -1) for name in ("<s>", "</s>", "<pad>"))]
    fallback = any(piece.kind == BYTE for piece in model.pieces)
    pieces = (
        _field(1, _field(1, one.text.encode()) + _field(2, struct.pack("<f", one.score), 5) + _field(3, one.kind))
        for one in model.pieces
    )
    trainer: list[tuple[int, int]] = [(3, model.type), (4, len(model.pieces)), (35, fallback), *enumerate(ids, 40)]
    normalizer: list[tuple[int, int | bytes]] = [(2, model.charsmap), (3, model.prefix), (4, model.squeeze), (5, True)]
    return b"".join(
        [
            *pieces,
            _field(2, b"".join(_field(number, value) for number, value in trainer)),
            _field(3, b"".join(_field(number, value) for number, value in normalizer)),
        ]
    )


def _field(number: int, value: int | bytes, wire: int = 2) -> bytes:
    if isinstance(value, int):
        return _as_varint(number << 3) + _as_varint(value % 2**64)
    size = _as_varint(len(value)) if wire == 2 else b""
    return _as_varint(number << 3 | wire) + size + value


def _as_varint(value: int) -> bytes:
    groups = []
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


# -- what could not be expressed -------------------------------------------------------------------------------------


def _fault(model: PieceModel) -> str:
    """What is wrong with the pieces, if anything is."""
    kinds = [piece.kind for piece in model.pieces]
    texts = {piece.text for piece in model.pieces}
    faults = (
        (kinds.count(UNKNOWN) != 1, f"{kinds.count(UNKNOWN)} pieces for what is unknown, where there should be one"),
        (len(texts) < len(kinds) or "" in texts, "a piece twice, or an empty one"),
        (kinds.count(BYTE) not in (0, 256), f"{kinds.count(BYTE)} pieces for bytes, where there should be 256 or none"),
        (not set(kinds) <= set(range(1, 7)), "a piece of an unknown kind"),
    )
    return next((what for wrong, what in faults if wrong), "")


def _check_charsmap(data: bytes) -> None:
    """Whether a map of characters can be walked without falling off: the `tokenizers` library takes that on trust.

    It is a number of bytes, as many bytes of a double-array trie, and the texts that its leaves point to.
    """
    if not data:
        return
    size = int.from_bytes(data[:4], "little")
    if size % 4 or size == 0 or 4 + size >= len(data) or data[-1] != 0:
        raise ValueError("a map of characters of the wrong size")
    units = np.frombuffer(data[4 : 4 + size], dtype="<u4").astype(np.int64)
    texts = data[4 + size :]
    leaf = units >> 31 == 1
    offset = units >> 10 << (units >> 9 & 1) * 8
    # The children of unit p are at p ^ offset ^ label, for labels of one byte.
    reach = (np.arange(len(units)) ^ offset) | 0xFF
    starts = np.concatenate([[0], np.flatnonzero(np.frombuffer(texts, dtype=np.uint8) == 0)[:-1] + 1])
    pointed = units[leaf] & 0x7FFFFFFF
    if (reach[~leaf] >= len(units)).any() or not np.isin(pointed, starts).all():
        raise ValueError("a map of characters that leads nowhere")
    texts.decode()


# -- as an object of the `tokenizers` library --------------------------------------------------------------------------


def build(model: PieceModel, path: str | Path) -> tokenizers.Tokenizer:
    """A tokeniser that gives the ids of sentencepiece; the position of a piece is its id."""
    names = [piece.text + _NEVER * (piece.kind == UNUSED) for piece in model.pieces]
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    fallback = any(piece.kind == BYTE for piece in model.pieces)
    symbols = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED]
    library: tokenizers.Tokenizer
    if model.type == UNIGRAM:
        vocab = [(name, _score(piece)) for name, piece in zip(names, model.pieces)]
        library = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=fallback))
    else:
        library = tokenizers.Tokenizer(
            models.BPE(
                vocab={name: index for index, name in enumerate(names)},
                merges=_merges(model.pieces, path),
                unk_token=names[unknown],
                fuse_unk=True,
                byte_fallback=fallback,
            )
        )
    library.normalizer = _normalizer(model)
    for symbol in symbols:
        # sentencepiece keeps these from being normalised, which an object of the library cannot.
        if library.normalizer.normalize_str(f"a{symbol}a").removeprefix(SPACE) != f"a{symbol}a":
            raise RegardError(f"{path}: the piece {symbol!r} is changed by its own normaliser.", "Use another file.")
    if model.type == BPE and symbols:
        _isolate(library, symbols, model.pieces, path)
    library.pre_tokenizer = _pre_tokenizer(model, symbols)
    library.decoder = _decoder(model, fallback)
    special = [name for name, piece in zip(names, model.pieces) if piece.kind in (UNKNOWN, CONTROL)]
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return library


def _score(piece: Piece) -> float:
    # The lowest score of all decides that of unknown characters; pieces that no text becomes must not have it.
    if piece.kind == USER_DEFINED:
        return 0.1 * (len(piece.text.encode()) - 1)  # so does sentencepiece, whatever the file says
    return piece.score if piece.kind == NORMAL else 0.0


def _merges(pieces: Sequence[Piece], path: str | Path) -> list[tuple[str, str]]:
    """Each way to make a piece of two, best piece first.

    sentencepiece joins, again and again, the two neighbours that make the piece of the highest score.
    """
    if any(piece.kind == UNUSED for piece in pieces):
        raise RegardError(f"{path}: BPE with unused pieces, which Regard does not know.", "Use another tokeniser.")
    normal = sorted((piece for piece in pieces if piece.kind == NORMAL), key=lambda piece: -piece.score)
    known = {piece.text for piece in normal}
    characters = {sign for piece in pieces for sign in piece.text if len(piece.text) == 1}
    joined = [piece for piece in normal if len(piece.text) > 1]
    for one, other in pairwise(joined):
        if one.score == other.score:
            raise RegardError(
                f"{path}: {one.text!r} and {other.text!r} have the same score, so neither goes before the other.",
                "Use another tokeniser.",
            )
    merges = []
    for piece in joined:
        lacking = set(piece.text) - characters
        if lacking:
            raise RegardError(
                f"{path}: there is the piece {piece.text!r}, but not {min(lacking)!r} by itself.",
                "Use another tokeniser.",
            )
        merges += [
            (piece.text[:cut], piece.text[cut:])
            for cut in range(1, len(piece.text))
            if piece.text[:cut] in known and piece.text[cut:] in known
        ]
    return merges


def _isolate(library: tokenizers.Tokenizer, symbols: list[str], pieces: Sequence[Piece], path: str | Path) -> None:
    """Lets words that are pieces be taken whole, as the user-defined ones must be.

    The others are only so taken by sentencepiece if joining its neighbours leads there.
    """
    if all(len(symbol) == 1 for symbol in symbols):
        return
    for piece in pieces:
        if piece.kind == NORMAL and len(library.model.tokenize(piece.text)) != 1:
            raise RegardError(f"{path}: nothing leads to the piece {piece.text!r}.", "Use another tokeniser.")
    library.model.ignore_merges = True


def _normalizer(model: PieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        charsmap = normalizers.Precompiled(model.charsmap)
        steps.append(charsmap)
        # The library looks up a character at a time, and of a short one with its accents takes whatever stands for the
        # character alone. The maps that put accents on letters are those of NFKC, so composing before and after makes
        # up for that; what is left are accents on signs like ①, which are lost.
        if charsmap.normalize_str("e\u0301") == "é":
            steps = [normalizers.NFC(), charsmap, normalizers.NFC()]
    if model.squeeze:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A "), "")]
    if model.prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.squeeze:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _pre_tokenizer(model: PieceModel, symbols: list[str]) -> pre_tokenizers.PreTokenizer | None:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.type == BPE and symbols:
        longest_first = "|".join(re.escape(symbol) for symbol in sorted(symbols, key=len, reverse=True))
        steps.append(pre_tokenizers.Split(Regex(longest_first), "isolated"))
    matching = [piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)]
    # Where no piece goes on over a space, words can be cut apart: it changes nothing, and a word is cut only once.
    if SPACE in matching and not any(SPACE in text[1:] for text in matching):
        steps.append(pre_tokenizers.Split(SPACE, "merged_with_next"))
    reserved = [piece.text for piece in model.pieces if piece.kind in (UNKNOWN, CONTROL)]
    if model.type == UNIGRAM or any(len(symbol) > 1 for symbol in symbols):
        bytes_too = any(piece.kind == BYTE for piece in model.pieces)
        steps += keep_apart(reserved, matching, ["(?<=<)(?=0x[0-9A-F]{2}>)"] * bytes_too)
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def keep_apart(
    names: Iterable[str], pieces: Iterable[str], more: Sequence[str] = ()
) -> list[pre_tokenizers.PreTokenizer]:
    """A pre-tokeniser that cuts each of the names in two, so that a text that spells one is text.

    The cut is where it changes nothing else: inside no piece, and not between two unknown characters, which are one.
    """
    pieces = set(pieces)
    neighbours = {text[i : i + 2] for text in pieces for i in range(len(text) - 1)}

    def harm(name: str, cut: int) -> tuple[bool, bool]:
        return name[cut - 1 : cut + 1] in neighbours, pieces.isdisjoint(name[cut - 1 : cut + 1])

    cuts = [*more]
    for name in names:
        if len(name) > 1:
            cut = min(range(1, len(name)), key=lambda place: harm(name, place))
            cuts.append(f"(?<={re.escape(name[:cut])})(?={re.escape(name[cut:])})")
    return [pre_tokenizers.Split(Regex("|".join(cuts)), "isolated")] if cuts else []


def _decoder(model: PieceModel, fallback: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if any(piece.kind == UNUSED for piece in model.pieces):
        steps.insert(0, decoders.Replace(_NEVER, ""))
    if fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.squeeze:
        steps.append(decoders.Replace(Regex(r"\A +"), ""))
    elif model.prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


# -- and back --------------------------------------------------------------------------------------------------------


def piece_model(tokenizer: tokenizers.Tokenizer, path: str | Path) -> PieceModel:
    """The file from which `build` makes this very tokeniser; if there is none, that is an error."""
    theirs = json.loads(tokenizer.to_str())
    kind = theirs["model"]["type"]
    if kind not in ("Unigram", "BPE"):
        raise _refusal(path, f"it is of type {kind}, where sentencepiece has unigram and BPE")
    steps = _steps(theirs["normalizer"], "normalizers")
    maps = [step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"]
    squeeze = any(step.get("pattern") == {"Regex": " +"} for step in steps)
    model = PieceModel(
        _pieces_of(tokenizer, theirs, path),
        UNIGRAM if kind == "Unigram" else BPE,
        base64.b64decode(maps[0]) if maps else b"",
        prefix=any(step["type"] == "Prepend" for step in steps),
        squeeze=squeeze,
    )
    if _fault(model):
        raise _refusal(path, f"it has {_fault(model)}")
    ours = json.loads(build(model, path).to_str())
    if not theirs["pre_tokenizer"]:  # without cutting at spaces the ids are the same
        ours["pre_tokenizer"] = theirs["pre_tokenizer"]
    for part, what in (("normalizer", "changes"), ("pre_tokenizer", "cuts"), ("model", "joins"), ("decoder", "joins")):
        if _comparable(ours[part]) != _comparable(theirs[part]):
            raise _refusal(path, f"its {part} {what} texts in a way that sentencepiece does not")
    return model


def _refusal(path: str | Path, why: str) -> RegardError:
    return RegardError(
        f"{path}: the tokeniser cannot be written for sentencepiece: {why}.", "Write it as tokenizer.json."
    )


def _steps(part: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[inside] if part["type"] == "Sequence" else [part]


def _isolated(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """The user-defined pieces in the first step of `_pre_tokenizer`, as the pattern has them."""
    first = next(iter(_steps(pre_tokenizer, "pretokenizers")), {})
    return re.split(r"(?<!\\)\|", first.get("pattern", {}).get("Regex", ""))


def _comparable(part: Any) -> Any:
    """A part of a tokeniser, of which it does not matter in what order the ways to make one piece are listed."""
    if not isinstance(part, dict) or "merges" not in part:
        return part
    merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in part["merges"]]
    return part | {"merges": [sorted(ways) for _, ways in groupby(merges, key="".join)]}


def _pieces_of(tokenizer: tokenizers.Tokenizer, theirs: dict[str, Any], path: str | Path) -> list[Piece]:
    model = theirs["model"]
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        names = [name for name, _ in model["vocab"]]
        unknown = names[model["unk_id"]] if model["unk_id"] is not None else None
    else:
        names = sorted(model["vocab"], key=model["vocab"].get)
        if [model["vocab"][name] for name in names] != list(range(len(names))):
            raise _refusal(path, "its ids have gaps")
        made = dict.fromkeys("".join(one) for one in model["merges"])
        order = [*made, *(name for name in names if name not in made)]
        scores = {name: -float(index) for index, name in enumerate(order)}
        unknown = model["unk_token"]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    isolated = _isolated(theirs["pre_tokenizer"])

    def piece(name: str) -> Piece:
        if name == unknown:
            return Piece(name, 0.0, UNKNOWN)
        if name in special:
            return Piece(name, 0.0, CONTROL)
        if model["byte_fallback"] and re.fullmatch(_BYTE_NAME, name):
            return Piece(name, 0.0, BYTE)
        if name.endswith(_NEVER):
            return Piece(name.removesuffix(_NEVER), 0.0, UNUSED)
        if model["type"] == "BPE" and re.escape(name) in isolated:
            return Piece(name, 0.0, USER_DEFINED)
        return Piece(name, scores[name])

    return [piece(name) for name in names]
