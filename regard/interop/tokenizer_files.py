"""Tokenizer files of a Hugging Face folder, read in all common formats and written as tokenizer.json.

tokenizer.json                        format of the `tokenizers` library
spiece.model, tokenizer.model         sentencepiece: T5, ALBERT, Llama
spm.model                             sentencepiece: DeBERTa-v2
sentencepiece.bpe.model               sentencepiece with other ids: XLM-RoBERTa, NLLB, mBART; with vocab.json, M2M100
source.spm, target.spm, vocab.json    sentencepiece for source and target, with separate ids: Marian
vocab.txt                             WordPiece: BERT
vocab.json, merges.txt                byte-level BPE: GPT-2, RoBERTa, BART

tokenizer_config.json and special_tokens_map.json define the roles of special tokens.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from regard.config_reader import json_bytes
from regard.data.text.languages import LanguageTokens
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.errors import RegardError
from regard.files import write_atomically
from regard.interop.foreign_config import ForeignConfig
from regard.interop.language_tokenizers import read_language_tokens
from regard.interop.sentencepiece_files import make_name_splitter, to_piece_model, write_pieces
from regard.interop.tensor_files import read_json
from regard.interop.tokenizer_formats import (
    FAMILY_TOKENS,
    FLAG_FAMILIES,
    FORMATS,
    GENERIC_CLASSES,
    MARIAN_FILES,
    SAVE_AS_JSON,
    SUPPORTED_FAMILIES,
    TokenizerFamily,
    token_name,
)

logger = logging.getLogger("regard")

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ImportedTokenizer(NamedTuple):
    """The tokenizers of source and target (the same object if there is only one), and special ids by role.

    A multilingual tokenizer has language tokens, and adds none of them to a text.
    """

    source: tokenizers.Tokenizer
    target: tokenizers.Tokenizer
    special: dict[str, int]
    languages: LanguageTokens | None = None


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
    path = next((folder / name for name in FORMATS if (folder / name).exists()), None)
    if path is None:
        raise RegardError(f"{folder}: the tokenizer is missing.", f"Expected one of {', '.join(FORMATS)}.")
    settings = _read_settings(folder)
    family, read = _read_family(folder), FORMATS[path.name]
    supported = SUPPORTED_FAMILIES.get(path.name)
    if supported and family not in supported:
        if family:
            raise RegardError(f"{path}: unsupported tokenizer class {family!r} for this file.", SAVE_AS_JSON)
        family = supported[0]
    libraries = read(path, family, settings)
    source, target = libraries if isinstance(libraries, tuple) else (libraries, libraries)
    tokens = _family_tokens(folder, family, settings)
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
    languages = read_language_tokens(source, family, settings)
    if languages is not None:
        set_special_template(source, None, special.get("eos"))
    return ImportedTokenizer(source, target, special, languages)


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: str | Path,
    special: SpecialTokens,
    *,
    segments: bool = False,
    names: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write tokenizer.json and the config files of transformers, which then gives the same ids.

    The special ids that the model needs are added around each text; `segments` adds token_type_ids for text pairs.
    `names` are the special tokens by role (`bos_token`, …), if not those of `special`; `settings` are further keys of
    tokenizer_config.json.
    """
    folder = Path(folder)
    library = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    boundaries = special.begin, special.end
    has_segments = 1 in library.encode("a", "a").type_ids
    is_separated = special.between in (None, separator_id(library))
    is_complete = boundary_ids(library) == boundaries and special.after_end is None
    if not is_complete or not is_separated or (segments and not has_segments):
        set_special_template(library, *boundaries, special.between, segments=segments, after_end=special.after_end)
    roles = {"bos": special.sos, "eos": special.eos, "unk": special.unk, "pad": special.pad, "mask": special.mask}
    if special.mask is not None:
        roles |= {"cls": special.begin, "sep": special.end}
    if tokenizer.kind == FOREIGN_KIND:  # an imported model has <eos> in the place of tokens that it lacks
        missing = {"bos", "unk", "pad"} - ({"bos"} if special.begin == special.eos else set())
        roles = {role: index for role, index in roles.items() if role not in missing or index != special.eos}
    if names is None:
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
        "split_special_tokens": True,  # names of special tokens inside a text are text
    }
    config |= {**names, **(settings or {})}
    write_atomically(folder / "tokenizer.json", library.to_str(pretty=True).encode())
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        write_atomically(folder / file, json_bytes(content))


def write_marian_tokenizers(
    source: Tokenizer, target: Tokenizer, folder: str | Path, special: SpecialTokens, settings: Mapping[str, Any]
) -> None:
    """Write separate source and target tokenizers in Marian's format; both must be sentencepiece.

    Each has a file of pieces and a table of ids; a single table if the ids are the same. `settings` are further keys of
    tokenizer_config.json.
    """
    folder = Path(folder)
    piece_models = {
        name: to_piece_model(tokenizer.backend_tokenizer, folder / name)
        for name, tokenizer in zip(MARIAN_FILES, (source, target))
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
    config = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": ids[0] != ids[1], **settings}
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
    after_end: int | None = None,
) -> None:
    """Make a tokenizer add these ids before and after each text, and between two texts."""
    added = (begin, end, between, after_end)
    names = {index: library.id_to_token(index) for index in added if index is not None}
    first, last, middle, after = ([] if index is None else [names[index]] for index in added)
    last += after
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
        if name not in GENERIC_CLASSES and family:
            return family
    return ""


def _warn_of_ignored_flags(library: tokenizers.Tokenizer, family: str, settings: ForeignConfig) -> None:
    """Warn if add_bos_token or add_eos_token contradicts tokenizer.json, which transformers 5 prefers."""
    if family not in FLAG_FAMILIES:
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
    settings = _read_settings(folder)
    return _special_ids(library, settings, _family_tokens(folder, _read_family(folder), settings))


def _family_tokens(folder: Path, family: str, settings: ForeignConfig) -> TokenizerFamily:
    """The special tokens of a family; a class for any tokenizer.json has no names of its own."""
    is_generic = settings.table.get("tokenizer_class") in GENERIC_CLASSES and (folder / "tokenizer.json").exists()
    tokens = FAMILY_TOKENS.get(family, TokenizerFamily({}))
    return tokens._replace(names={}) if is_generic else tokens


def _special_ids(library: tokenizers.Tokenizer, settings: ForeignConfig, tokens: TokenizerFamily) -> dict[str, int]:
    ids = {}
    for role in ROLES:
        name = token_name(settings, role, tokens)
        index = library.token_to_id(name) if name is not None else None
        if index is not None:
            ids[role] = index
    return ids


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
