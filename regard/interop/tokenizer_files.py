"""The tokeniser of a folder in Hugging Face's format: found in whatever files it is kept, and written.

tokenizer.json                        the `tokenizers` library's own
spiece.model, tokenizer.model         sentencepiece: T5, ALBERT, Llama
sentencepiece.bpe.model               the same with other ids: XLM-RoBERTa
source.spm, target.spm, vocab.json    sentencepiece for either side, the ids apart: Marian
vocab.txt                             pieces of words: BERT
vocab.json, merges.txt                byte-pair encoding of bytes: GPT-2, RoBERTa, BART

What its special tokens are for say tokenizer_config.json and special_tokens_map.json.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from regard import config_reader
from regard.config_reader import json_bytes
from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.files import read_file, write_whole
from regard.interop.foreign_config import Settings
from regard.interop.sentencepiece_files import (
    CONTROL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    Piece,
    PieceModel,
    build,
    keep_apart,
    piece_model,
    read_pieces,
    write_pieces,
)
from regard.interop.tensor_files import read_json

_AS_JSON = "Save the tokeniser as tokenizer.json."
_SIDES = ("source.spm", "target.spm")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class FoundTokenizer(NamedTuple):
    """The tokenisers of the two sides (one object where there is but one), and special ids by their role."""

    source: tokenizers.Tokenizer
    target: tokenizers.Tokenizer
    special: dict[str, int]


class _Family(NamedTuple):
    """What a family of models calls its special tokens, and which of them it puts around a text and between two."""

    names: dict[str, str]
    begin: str = ""
    end: str = ""
    between: str = ""


_BERT = _Family(dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]"), "cls", "sep")
_SENTENCES = dict(bos="<s>", eos="</s>", unk="<unk>")
_ROBERTA = _Family(_SENTENCES | dict(sep="</s>", pad="<pad>", cls="<s>", mask="<mask>"), "bos", "eos", "eos")
_FAMILIES: dict[str, _Family] = {
    "": _Family(_SENTENCES | dict(pad="<pad>")),
    "albert": _Family(_BERT.names | dict(bos="[CLS]", eos="[SEP]", unk="<unk>", pad="<pad>"), "cls", "sep"),
    "bart": _ROBERTA,
    "bert": _BERT,
    "camembert": _ROBERTA,
    "distilbert": _BERT,
    "electra": _BERT,
    "gpt2": _Family(dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")),
    "llama": _Family(_SENTENCES, "bos"),
    "marian": _Family(dict(eos="</s>", unk="<unk>", pad="<pad>"), "", "eos"),
    "roberta": _ROBERTA,
    "t5": _Family(dict(eos="</s>", unk="<unk>", pad="<pad>"), "", "eos"),
    "xlmroberta": _ROBERTA,
}


def read_tokenizer(folder: str | Path) -> FoundTokenizer:
    """Opens the tokeniser of a folder. The ids are those of transformers; no code in the folder is run.

    What it does otherwise: the names of special tokens inside a text are text; spaces before a text are to Llama what
    they are to sentencepiece; and where Marian's vocab.json lacks a piece of its .spm files, a text is cut into the
    pieces that it has, instead of being unknown.

    >>> read_tokenizer("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder: there is no such folder. Name one that holds a tokeniser.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RegardError(f"{folder}: there is no such folder.", "Name one that holds a tokeniser.")
    path = next((folder / name for name in _FORMATS if (folder / name).exists()), None)
    if path is None:
        raise RegardError(f"{folder}: there is no tokeniser.", f"It should hold one of {', '.join(_FORMATS)}.")
    settings = _settings(folder)
    family, read = _family(folder), _FORMATS[path.name]
    known = _KNOWN.get(path.name)
    if known and family not in known:
        if family:
            raise RegardError(f"{path}: how the class {family!r} reads it is not known.", _AS_JSON)
        family = known[0]
    found = read(path, family, settings)
    source, target = found if isinstance(found, tuple) else (found, found)
    about = _FAMILIES.get(family, _Family({}))
    special: dict[str, int] = {}
    for library in [source] if source is target else [source, target]:
        _add_tokens(library, folder, settings.table)
        ids = _special_ids(library, settings, about)
        if special and ids != special:
            raise RegardError(f"{folder}: special tokens have other ids on the other side.", "Such are not supported.")
        special = ids
        library.add_special_tokens(_not_yet_special(library, special.values()))
        _keep_names_apart(library)
        if path.name != "tokenizer.json":
            begin = _unless_said(settings, "add_bos_token", "bos", about.begin)
            end = _unless_said(settings, "add_eos_token", "eos", about.end)
            frame(library, special.get(begin), special.get(end), special.get(about.between))
        # Some files say that every text be cut or filled up to some length.
        library.no_truncation()
        library.no_padding()
    return FoundTokenizer(source, target, special)


def write_tokenizer(
    tokenizer: Tokenizer, folder: str | Path, special: Special, *, segments: bool = False, max_len: int | None = None
) -> None:
    """Writes tokenizer.json and what transformers needs beside it, so that it gives a text the same ids.

    The special ids that frame a text for the model go around each text; `segments` tells the two texts of a pair apart.
    """
    folder = Path(folder)
    library = tokenizers.Tokenizer.from_str(tokenizer.library.to_str())
    wanted = special.begin, special.end
    if framing(library) != wanted or special.between not in (None, separating(library)):
        frame(library, *wanted, special.between, segments=segments)
    roles = {"bos": special.sos, "eos": special.eos, "unk": special.unk, "pad": special.pad, "mask": special.mask}
    if special.mask is not None:
        roles |= {"cls": special.begin, "sep": special.end}
    names = {f"{role}_token": library.id_to_token(index) for role, index in roles.items() if index is not None}
    for role, name in names.items():
        if name is None:
            raise RegardError(f"{folder}: the tokeniser has no entry for the {role}.", "Is it the model's own?")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *["token_type_ids"] * segments, "attention_mask"],
        # In Regard the names of special tokens inside a text are text; only what is to be filled in is marked so.
        "split_special_tokens": special.mask is None,
    }
    config |= names | ({} if max_len is None else {"model_max_length": max_len})
    write_whole(folder / "tokenizer.json", library.to_str(pretty=True).encode())
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        write_whole(folder / file, json_bytes(content))


def write_two_tokenizers(
    source: Tokenizer, target: Tokenizer, folder: str | Path, special: Special, *, max_len: int
) -> None:
    """Writes the tokenisers of a model that has one a side, as Marian keeps them: both must be of sentencepiece.

    A side's file has the pieces, and a table their ids: one table for both where they are the same.
    """
    folder = Path(folder)
    sides = {name: piece_model(one.library, folder / name) for name, one in zip(_SIDES, (source, target))}
    ids = [{piece.text: index for index, piece in enumerate(model.pieces)} for model in sides.values()]
    names = {f"{role}_token": sides["source.spm"].pieces[getattr(special, role)].text for role in ("eos", "unk", "pad")}
    if (special.begin, special.end) != (None, special.eos):
        raise RegardError("Marian's tokenisers put the end after each text, and nothing else.", "Share one tokeniser.")
    config = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": ids[0] != ids[1], "model_max_length": max_len}
    tables: dict[str, Any] = {
        "vocab.json": ids[0],
        "tokenizer_config.json": config | names,
        "special_tokens_map.json": names,
    }
    if ids[0] != ids[1]:
        tables["target_vocab.json"] = ids[1]
    for name, model in sides.items():
        write_pieces(model, folder / name)
    for file, content in tables.items():
        write_whole(folder / file, json_bytes(content))


# -- special tokens --------------------------------------------------------------------------------------------------


def framing(library: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """The ids that a tokeniser puts before and after each text, one a side."""
    encoding = library.encode("a")
    added = [bool(one) for one in encoding.special_tokens_mask]
    # Where nothing is known of the text, there is no telling before from after but by halves.
    before = (len(added) + 1) // 2 if all(added) else added.index(False)
    after = len(added) - before - added[before:].count(False)
    if before > 1 or after > 1:
        raise RegardError("The tokeniser puts several tokens around each text.", "Regard knows one a side.")
    return encoding.ids[0] if before else None, encoding.ids[-1] if after else None


def separating(library: tokenizers.Tokenizer) -> int | None:
    """The id that a tokeniser puts before the second of two texts, after the first one's end (RoBERTa and its kin)."""
    one, two, end = library.encode("a").ids, library.encode("a", "a").ids, framing(library)[1]
    tail = library.encode("a", add_special_tokens=False).ids + ([] if end is None else [end])
    middle = two[len(one) : len(two) - len(tail)]
    return middle[0] if len(middle) == 1 and two == [*one, *middle, *tail] else None


def frame(
    library: tokenizers.Tokenizer,
    begin: int | None,
    end: int | None,
    between: int | None = None,
    *,
    segments: bool = False,
) -> None:
    """Has a tokeniser put these ids before and after each text, and before the second of two."""
    names = {index: library.id_to_token(index) for index in (begin, end, between) if index is not None}
    first, last, middle = ([] if index is None else [names[index]] for index in (begin, end, between))
    second = [f"{name}:{int(segments)}" for name in (*middle, "$B", *last)]
    library.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *second],
        special_tokens=[(name, index) for index, name in names.items()],
    )


def _family(folder: Path) -> str:
    """The family of the class that a folder names: "bert" for BertTokenizerFast; empty where it names none."""
    tokenizer, config = read_json(folder / "tokenizer_config.json"), read_json(folder / "config.json")
    for stated in (tokenizer.get("tokenizer_class"), config.get("tokenizer_class"), config.get("model_type")):
        family = re.sub(r"tokenizer(fast)?$|[-_]", "", stated.lower()) if isinstance(stated, str) else ""
        if family not in ("", "pretrained", "tokenizersbackend"):  # which are any
            return family
    return ""


def _unless_said(settings: Settings, key: str, role: str, usual: str) -> str:
    """The role of a token around each text; empty where there is none."""
    if settings.table.get(key) is None:
        return usual
    return role if settings.flag(key, False) else ""


def _settings(folder: Path) -> Settings:
    """What the files beside a tokeniser say of it."""
    own = folder / "tokenizer_config.json"
    table = read_json(own) | {k: v for k, v in read_json(folder / "special_tokens_map.json").items() if v is not None}
    return Settings(table, str(own))


def special_ids(library: tokenizers.Tokenizer, folder: Path) -> dict[str, int]:
    """The special ids by their role, where a tokeniser from elsewhere stands in for the folder's own."""
    return _special_ids(library, _settings(folder), _FAMILIES.get(_family(folder), _Family({})))


def _special_ids(library: tokenizers.Tokenizer, settings: Settings, about: _Family) -> dict[str, int]:
    found = {}
    for role in ROLES:
        name = _name(settings, role, about)
        index = library.token_to_id(name) if name is not None else None
        if index is not None:
            found[role] = index
    return found


def _name(settings: Settings, role: str, about: _Family) -> str | None:
    stated = settings.table.get(f"{role}_token")
    name = stated.get("content") if isinstance(stated, dict) else stated
    if name is not None and not isinstance(name, str):
        raise RegardError(f"{settings.origin}: {role}_token = {stated!r} is no name.", "Fix the file.")
    return about.names.get(role) if name is None else name


def _add_tokens(library: tokenizers.Tokenizer, folder: Path, table: Mapping[str, Any]) -> None:
    """The tokens that were added to a vocabulary later: added_tokens_decoder in one file, or a file of their own."""
    origin = folder / "tokenizer_config.json"
    stated = table.get("added_tokens_decoder")
    if stated is None:
        origin = folder / "added_tokens.json"
        stated = {index: {"content": name} for name, index in read_json(origin).items()}
    try:
        rows = sorted((int(index), AddedToken(**about)) for index, about in stated.items())
    except (TypeError, ValueError, AttributeError):
        raise RegardError(f"{origin}: its added tokens cannot be read.", "Fix the file.") from None
    for index, token in rows:
        if library.token_to_id(token.content) is None:
            library.add_tokens([token])
        if library.token_to_id(token.content) != index:
            raise RegardError(
                f"{origin}: {token.content!r} should have id {index}, and has {library.token_to_id(token.content)}.",
                "Is a file missing?",
            )
        if token.special:
            library.add_special_tokens(_not_yet_special(library, [index]))


def _not_yet_special(library: tokenizers.Tokenizer, ids: Iterable[int]) -> list[AddedToken]:
    added = library.get_added_tokens_decoder()
    return [
        AddedToken(library.id_to_token(index), special=True, normalized=False)
        for index in sorted(set(ids))
        if index not in added or not added[index].special
    ]


def _keep_names_apart(library: tokenizers.Tokenizer) -> None:
    """Sees to it that no text makes a special token, not even one that spells its name."""
    library.encode_special_tokens = True
    special = {token.content: index for index, token in library.get_added_tokens_decoder().items() if token.special}
    spelt = [
        name
        for name, index in special.items()
        for encoding in [library.encode(name, add_special_tokens=False)]
        if any(one == index and end - start == len(name) for one, (start, end) in zip(encoding.ids, encoding.offsets))
    ]
    guard = keep_apart(spelt, library.get_vocab(with_added_tokens=False).keys() - special.keys()) if spelt else []
    if guard:
        steps = [] if library.pre_tokenizer is None else [library.pre_tokenizer]
        library.pre_tokenizer = pre_tokenizers.Sequence([*steps, *guard])


# -- the formats -----------------------------------------------------------------------------------------------------


def _read_library(path: Path, family: str, settings: Settings) -> tokenizers.Tokenizer:
    return Tokenizer.load(path, foreign=True).library


def _read_sentencepiece(path: Path, family: str, settings: Settings) -> tokenizers.Tokenizer:
    model = read_pieces(path)
    if family == "xlmroberta":
        model = _xlm_roberta(model, path)
    library = build(model, path)
    if family == "t5":
        extra = settings.number("extra_ids", 100)
        names = [f"<extra_id_{index}>" for index in reversed(range(extra))]
        library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if family == "albert":
        steps: list[normalizers.Normalizer] = [normalizers.Replace(quote, '"') for quote in ("``", "''")]
        if not settings.flag("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if settings.flag("do_lower_case", True):
            steps.append(normalizers.Lowercase())
        library.normalizer = normalizers.Sequence([*steps, library.normalizer])
    return library


def _xlm_roberta(model: PieceModel, path: Path) -> PieceModel:
    """The pieces in the order of fairseq, which has its own special tokens at the first four ids and at the end."""
    if [piece.text for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise RegardError(f"{path}: it should begin with <unk>, <s> and </s>.", "Is it the model's own?")
    first = [Piece(name, kind=CONTROL) for name in ("<s>", "<pad>", "</s>")]
    pieces = [*first, model.pieces[0], *model.pieces[3:], Piece("<mask>", kind=CONTROL)]
    return PieceModel(pieces, model.type, model.charsmap, model.prefix, model.squeeze)


def _read_marian(path: Path, family: str, settings: Settings) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    folder = path.parent
    vocab = folder / "vocab.json"
    target_vocab = folder / "target_vocab.json" if settings.flag("separate_vocabs", False) else vocab
    return (
        _renumbered(path, _by_id(vocab), vocab, settings),
        _renumbered(folder / "target.spm", _by_id(target_vocab), target_vocab, settings),
    )


def _renumbered(path: Path, names: list[str], origin: Path, settings: Settings) -> tokenizers.Tokenizer:
    """One side's pieces at the ids that the vocabulary gives them; those of the other side are there and never used."""
    model = read_pieces(path)
    if model.type != UNIGRAM:
        raise RegardError(
            f"{path}: BPE with ids of another file is not known.", "Save its tokeniser as tokenizer.json."
        )
    own = {piece.text: piece for piece in model.pieces if piece.kind not in (UNKNOWN, CONTROL)}
    lowest = min((piece.score for piece in own.values()), default=0.0)
    roles = {_name(settings, role, _FAMILIES["marian"]): role for role in ("eos", "pad", "unk")}
    languages = [name for name in names if re.fullmatch(">>[^<>]+<<", name)]

    def piece(name: str) -> Piece:
        if name in roles:
            return Piece(name, kind=UNKNOWN if roles[name] == "unk" else CONTROL)
        if name in own or name in languages:
            return own.get(name, Piece(name))
        # A character that only the other side knows is read, at the cost of an unknown one.
        return Piece(name, lowest - 10.0) if len(name) == 1 else Piece(name, kind=UNUSED)

    pieces = [piece(name) for name in names]
    if not any(one.kind == UNKNOWN for one in pieces):
        raise RegardError(f"{origin}: there is no entry for unknown pieces.", "Put a good copy in its place.")
    library = build(PieceModel(pieces, model.type, model.charsmap, model.prefix, model.squeeze), path)
    # Which language to write, the source says in front: >>fra<< Hello.
    library.add_tokens([AddedToken(name, normalized=False) for name in languages])
    return library


def _read_wordpiece(path: Path, family: str, settings: Settings) -> tokenizers.Tokenizer:
    lines = _text(path).split("\n")  # and at no other sign: some are entries
    names = [line.removesuffix("\r") for line in lines[: -1 if lines[-1] == "" else None]]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise RegardError(f"{path}: {twice!r} is there twice.", "Put a good copy in its place.")
    unknown = _name(settings, "unk", _BERT)
    if unknown not in names:
        raise RegardError(f"{path}: there is no {unknown}.", "Put a good copy in its place.")
    vocab = {name: index for index, name in enumerate(names)}
    accents = settings.table.get("strip_accents")
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=settings.flag("do_lower_case", True),
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        # Accents go with capitals unless said otherwise.
        strip_accents=None if accents is None else settings.flag("strip_accents", False),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def _read_byte_level(path: Path, family: str, settings: Settings) -> tokenizers.Tokenizer:
    names = _by_id(path)
    merges_path = path.parent / "merges.txt"
    lines = _text(merges_path).split("\n")
    rows = [line.removesuffix("\r") for line in lines if line.strip() and not line.startswith("#version:")]
    merges = [(left, right) for left, _, right in (row.partition(" ") for row in rows)]
    vocab = {name: index for index, name in enumerate(names)}
    for merge in merges:
        if not {*merge, "".join(merge)} <= vocab.keys():
            raise RegardError(f"{merges_path}: {' '.join(merge)!r} does not fit {path.name}.", "Is it the model's own?")
    library = tokenizers.Tokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.flag("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    return library


# What is looked for, in this order, and how it is read.
_FORMATS: dict[str, Callable[..., Any]] = {
    "tokenizer.json": _read_library,
    "spiece.model": _read_sentencepiece,
    "tokenizer.model": _read_sentencepiece,
    "sentencepiece.bpe.model": _read_sentencepiece,
    "source.spm": _read_marian,
    "vocab.txt": _read_wordpiece,
    "vocab.json": _read_byte_level,
}
# Which families have their tokeniser in such a file; the first is taken where the folder names none.
_KNOWN: dict[str, tuple[str, ...]] = {
    "spiece.model": ("", "t5", "albert", "llama"),
    "tokenizer.model": ("", "t5", "albert", "llama"),
    "sentencepiece.bpe.model": ("xlmroberta",),
    "source.spm": ("marian",),
    "vocab.txt": ("bert", "distilbert", "electra"),
    "vocab.json": ("gpt2", "roberta", "bart"),
}


def _text(path: Path) -> str:
    try:
        return read_file(path).decode()  # line ends as they are
    except UnicodeDecodeError:
        raise RegardError(f"{path}: not a text in UTF-8.", "Put a good copy in its place.") from None


def _by_id(path: Path) -> list[str]:
    """The names in a vocab.json, at their ids."""
    table = config_reader.read_json(path, unique_keys=False)
    if not table or {type(index) for index in table.values()} != {int} or set(table.values()) != set(range(len(table))):
        raise RegardError(f"{path}: its ids are not 0, 1, 2 and so on.", "Put a good copy in its place.")
    return sorted(table, key=table.__getitem__)
