"""Tokenizers in the metadata of GGUF files.

tokenizer.ggml.model = llama    pieces with scores, merged as in sentencepiece
tokenizer.ggml.model = gpt2     byte-level BPE with merges; tokenizer.ggml.pre names the splitting into words
"""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig
from regard.interop.gguf.file import GgufFile
from regard.interop.sentencepiece_files import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    PieceModel,
    build_tokenizer,
    check_pieces,
)
from regard.interop.tokenizer_files import mark_special_tokens, set_special_template
from regard.interop.tokenizer_formats import build_byte_level

_PREFIX = "tokenizer.ggml."
# Special ids by role.
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
# End of a turn in a dialog: it ends a text too.
_TURN_END = "eot_token_id"
# Kinds of splitting into words (tokenizer.ggml.pre), and those of files without a name, by architecture.
_SPLITTERS = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    "smollm": "smollm",
}
_DEFAULT_SPLITTERS = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}
_CONTRACTIONS, _LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_gguf_tokenizer(file: GgufFile) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and special ids as keys of a config of transformers.

    A text that contains the name of a special token is encoded as text, never as that token.
    """
    table = {key.removeprefix(_PREFIX): value for key, value in file.metadata.items() if key.startswith(_PREFIX)}
    settings = ForeignConfig(table, f"{file.path}: {_PREFIX.removesuffix('.')}")
    names = _read_list(settings, "tokens", str)
    kinds = _read_list(settings, "token_type", int, len(names)) or [NORMAL] * len(names)
    if len(set(names)) < len(names) or not names:
        raise RegardError(f"{file.path}: the tokenizer has no tokens, or a token twice.", "Convert the model again.")
    kind = settings.get("model")
    if kind == "llama":
        library = _read_pieces(file, settings, names, kinds)
    elif kind == "gpt2":
        library = _read_byte_level(file, settings, names, kinds)
    else:
        raise settings.unsupported("model", "expected llama or gpt2")
    ids = {role: settings.get_natural(key) for role, key in _ROLES.items() if key in table}
    outside = [f"{role} = {index}" for role, index in ids.items() if index >= len(names)]
    if outside:
        raise RegardError(
            f"{file.path}: special ids outside the {len(names)} tokens: {', '.join(outside)}.",
            "Convert the model again.",
        )
    is_llama = kind == "llama" or _splitter(file, settings) == "llama3"
    begin = ids.get("bos") if settings.get_bool("add_bos_token", is_llama) else None
    end = ids.get("eos") if settings.get_bool("add_eos_token", False) else None
    mark_special_tokens(library, ids.values())
    set_special_template(library, begin, end)
    config: dict[str, Any] = {f"{role}_token_id": index for role, index in ids.items()}
    if "eos" in ids and settings.get_natural(_TURN_END, ids["eos"]) != ids["eos"]:
        config["eos_token_id"] = [ids["eos"], settings.get_natural(_TURN_END)]
    return library, config


def _read_list(settings: ForeignConfig, key: str, kind: type, length: int | None = None) -> list:
    values = settings.table.get(key, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise RegardError(
            f"{settings.origin}.{key}: expected a list of type {kind.__name__}.", "Convert the model again."
        )
    if values and length is not None and len(values) != length:
        raise RegardError(
            f"{settings.origin}.{key}: {len(values)} values, expected {length}.", "Convert the model again."
        )
    return values


def _read_pieces(
    file: GgufFile, settings: ForeignConfig, names: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = _read_list(settings, "scores", float, len(names))
    if not scores:
        raise RegardError(f"{settings.origin}.scores is missing.", "Convert the model again.")
    unknown = settings.get_natural("unknown_token_id", kinds.index(UNKNOWN) if UNKNOWN in kinds else 0)
    # Tokens that fill up the vocabulary are unused, or of the type of the unknown token.
    kinds = [CONTROL if kind in (UNUSED, UNKNOWN) else kind for kind in kinds]
    if unknown < len(kinds):
        kinds[unknown] = UNKNOWN
    pieces = list(map(Piece, names, scores, kinds))
    model = PieceModel(
        pieces,
        BPE,
        add_dummy_prefix=settings.get_bool("add_space_prefix", True),
        remove_extra_whitespaces=settings.get_bool("remove_extra_whitespaces", False),
    )
    settings.require("precompiled_charsmap", None)
    check_pieces(model, file.path)
    return build_tokenizer(model, file.path)


def _splitter(file: GgufFile, settings: ForeignConfig) -> str:
    default = _DEFAULT_SPLITTERS.get(file.metadata.get("general.architecture", ""), "default")
    name = settings.get("pre", default)
    name = default if name == "default" else name
    if name not in _SPLITTERS:
        raise settings.replace({"pre": name}).unsupported("pre", f"expected one of {', '.join(_SPLITTERS)}")
    return _SPLITTERS[name]


def _read_byte_level(
    file: GgufFile, settings: ForeignConfig, names: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    library = build_byte_level(names, _read_list(settings, "merges", str), file.path)
    words = pre_tokenizers.ByteLevel(add_prefix_space=settings.get_bool("add_space_prefix", False))
    match _splitter(file, settings):
        case "gpt2":
            library.pre_tokenizer = words
        case "smollm":
            library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        case "llama3":
            library.pre_tokenizer = _split_words(r"\p{N}{1,3}")
            library.model.ignore_merges = True
        case "qwen2":
            library.pre_tokenizer = _split_words(r"\p{N}")
            library.normalizer = normalizers.NFC()
    special = [name for name, kind in zip(names, kinds) if kind in (UNKNOWN, CONTROL, UNUSED, BYTE)]
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    whole = [name for name, kind in zip(names, kinds) if kind == USER_DEFINED]
    library.add_tokens([AddedToken(name, normalized=False) for name in whole])
    return library


def _split_words(numbers: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex("|".join((_CONTRACTIONS, _LETTERS, numbers, _OTHERS)))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
