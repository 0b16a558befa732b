"""Import of language models from GGUF files, the format of llama.cpp.

header       magic "GGUF"   version   number of tensors   number of metadata entries
metadata     name   type   value (repeated); an array is a type, a length and its values
tensors      name   number of dimensions   sizes, innermost first   type   offset of its data (repeated)
data         blocks of quantized numbers, or floats; aligned

All numbers are little-endian; strings have their length in front. Nothing in a file is executed, and each length is
checked before it is used.

llama.cpp changes some tensors when it converts a model; `read_tensors` changes them back:

Llama          rows of queries and keys are reordered, so that rotary positions rotate neighboring channels
Gemma          1 is added to the weights of norms
GPT-2          projections are transposed

The metadata holds the tokenizer:

tokenizer.ggml.model = llama    pieces with scores, merged as in sentencepiece
tokenizer.ggml.model = gpt2     byte-level BPE with merges; tokenizer.ggml.pre names the splitting into words
"""

import dataclasses
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from torch import Tensor

from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.errors import RegardError, require_package
from regard.interop.foreign_config import ForeignConfig
from regard.interop.huggingface.folder import check_vocabulary, describe_special_tokens, read_special_tokens
from regard.interop.huggingface.gpt import read_gpt_model
from regard.interop.llama2c import to_half_split
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
from regard.interop.tokenizer_files import ROLES, ImportedTokenizer, mark_special_tokens, set_special_template
from regard.interop.tokenizer_formats import build_byte_level
from regard.layers.positions import HIGH_FREQ_FACTOR, LOW_FREQ_FACTOR, Rotary
from regard.pipelines import TextGenerator, model_from_weights

_INTACT = "Replace it with an intact copy."
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Other types of metadata values by their number.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMENSIONS = 4

T = TypeVar("T")


def import_gguf(path: str | Path) -> TextGenerator:
    """Import a language model from a GGUF file. Quantized weights become float32; nothing in the file is executed.

    >>> import_gguf("no-such.gguf")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.gguf: the file is missing. Pass a GGUF file.
    """
    file = read_gguf(path)
    name, architecture = read_architecture(file)
    table = read_config(file)
    library, ids = read_gguf_tokenizer(file)
    imported = ImportedTokenizer(library, library, {})
    tokens, other_eos = read_special_tokens(ids, imported)
    config, special, weights = read_gpt_model(
        architecture.class_name, table, tokens, read_tensors(file, table), str(file.path)
    )
    special = dataclasses.replace(special, other_eos=other_eos)
    check_vocabulary(config, special, [library], str(file.path))
    model = model_from_weights(config, weights, file.path)
    provenance: dict[str, Any] = {"class": architecture.class_name, "file": file.path.name, "architecture": name}
    provenance |= describe_special_tokens(library, {role: tokens[role] for role in ROLES if role in tokens}, tokens)
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        provenance["chat_template"] = template
    return TextGenerator(model.eval(), Tokenizer(library, FOREIGN_KIND), {"imported": provenance}, special)


# -- the file ---------------------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor of a file: its shape, the number of its type, and the bytes of its rows."""

    shape: tuple[int, ...]
    type: int
    rows: np.ndarray


class GgufFile(NamedTuple):
    """The content of a GGUF file; the data of tensors is mapped, not read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def read_tensor(self, name: str) -> Tensor:
        """A tensor as float32."""
        stored = self.tensors[name]
        kind = _tensor_type(stored.type, self.path, name)
        try:
            numbers = require_package("gguf", "gguf").dequantize(stored.rows, kind)
        except NotImplementedError:
            raise _unsupported_type(self.path, name, kind.name) from None
        return torch.from_numpy(np.array(numbers, dtype=np.float32, order="C")).view(stored.shape)


def read_gguf(path: str | Path) -> GgufFile:
    """Read the metadata of a GGUF file, and find its tensors.

    >>> read_gguf("no-such.gguf")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.gguf: the file is missing. Pass a GGUF file.
    """
    path = Path(path)
    if not path.is_file():
        raise RegardError(f"{path}: the file is missing.", "Pass a GGUF file.")
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise RegardError(f"{path}: cannot be read ({error}).", _INTACT) from None
    try:
        return _read(path, content)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise RegardError(f"{path}: not a GGUF file, or damaged ({error}).", _INTACT) from None


class _Reader:
    """Reads numbers and strings in turn; beyond the end of the file, it raises ValueError."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.offset = content, 0

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.offset:
            raise ValueError("truncated")
        self.offset += size
        return self.content[self.offset - size : self.offset].tobytes()

    def number(self, code: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def repeat(self, count: int, min_size: int, read: Callable[[], T]) -> list[T]:
        """Several values of at least `min_size` bytes each."""
        if count * min_size > len(self.content) - self.offset:
            raise ValueError("truncated")
        return [read() for _ in range(count)]

    def value(self, kind: int, is_nested: bool = False) -> Any:
        """A value of the metadata."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and not is_nested:
            item_kind, count = self.number("I"), self.number("Q")
            if item_kind in _NUMBERS:
                return self._numbers(item_kind, count)
            return self.repeat(count, 8, lambda: self.value(item_kind, is_nested=True))
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        raise ValueError(f"metadata of type {kind}")

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            return [bool(value) for value in values]
        # The shortest decimal number: 1e-05 instead of 9.999999747378752e-06.
        return [float(str(value)) for value in values] if dtype.kind == "f" else values.tolist()


def _read(path: Path, content: np.ndarray) -> GgufFile:
    reader = _Reader(content)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise RegardError(
            f"{path}: version {version} of GGUF is unsupported; expected 2 or 3, little-endian.",
            "Convert the model with a current version of llama.cpp.",
        )
    tensor_count, metadata_count = reader.number("Q"), reader.number("Q")
    metadata = _unique(reader.repeat(metadata_count, 13, lambda: (reader.string(), reader.value(reader.number("I")))))
    entries = _unique(reader.repeat(tensor_count, 24, lambda: (reader.string(), _read_entry(reader))))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment = {alignment!r}")
    start = math.ceil(reader.offset / alignment) * alignment
    tensors = {name: _find_rows(path, name, content[start:], *entry) for name, entry in entries.items()}
    return GgufFile(path, metadata, tensors)


def _unique(pairs: list[tuple[str, T]]) -> dict[str, T]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _read_entry(reader: _Reader) -> tuple[tuple[int, ...], int, int]:
    """Shape, type and offset of a tensor."""
    dimensions = reader.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"a tensor with {dimensions} dimensions")
    shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
    return shape, reader.number("I"), reader.number("Q")


def _find_rows(
    path: Path, name: str, data: np.ndarray, shape: tuple[int, ...], number: int, offset: int
) -> StoredTensor:
    kind = _tensor_type(number, path, name)
    block, block_bytes = require_package("gguf", "gguf").GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"the tensor {name} has the shape {shape}, but blocks of {block} numbers")
    row_bytes = shape[-1] // block * block_bytes
    end = offset + math.prod(shape[:-1]) * row_bytes
    if end > len(data):
        raise ValueError(f"truncated: the data of {name} is missing")
    return StoredTensor(shape, number, data[offset:end].reshape(*shape[:-1], row_bytes))


def _tensor_type(number: int, path: Path, name: str) -> Any:
    try:
        return require_package("gguf", "gguf").GGMLQuantizationType(number)
    except ValueError:
        raise _unsupported_type(path, name, str(number)) from None


def _unsupported_type(path: Path, name: str, kind: str) -> RegardError:
    return RegardError(
        f"{path}: the type {kind} of the tensor {name} is unsupported.", "Quantize the model to another type, as Q8_0."
    )


# -- names of tensors -------------------------------------------------------------------------------------------------

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_qkv": "model.layers.{i}.self_attn.qkv_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
_PHI3_NAMES = _LLAMA_NAMES | {"blk.{i}.ffn_up": "model.layers.{i}.mlp.gate_up_proj"}
# Norms of the outputs of sublayers.
_GEMMA2_NAMES = _LLAMA_NAMES | {
    "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{i}.attn_norm": "transformer.h.{i}.ln_1",
    "blk.{i}.attn_qkv": "transformer.h.{i}.attn.c_attn",
    "blk.{i}.attn_output": "transformer.h.{i}.attn.c_proj",
    "blk.{i}.ffn_norm": "transformer.h.{i}.ln_2",
    "blk.{i}.ffn_up": "transformer.h.{i}.mlp.c_fc",
    "blk.{i}.ffn_down": "transformer.h.{i}.mlp.c_proj",
}


# -- architectures ----------------------------------------------------------------------------------------------------


class GgufArchitecture(NamedTuple):
    """The class of transformers, the names of its tensors, and changes that llama.cpp made to them."""

    class_name: str
    names: Mapping[str, str] = _LLAMA_NAMES
    is_interleaved: bool = False
    """queries and keys are ordered for rotation of neighboring channels"""
    is_shifted: bool = False
    """weights of norms have 1 added"""
    has_windows: bool = False
    """layers may have a sliding window"""


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", is_interleaved=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _PHI3_NAMES, has_windows=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", _GEMMA2_NAMES),
    "gemma": GgufArchitecture("GemmaForCausalLM", is_shifted=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _GEMMA2_NAMES, is_shifted=True, has_windows=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _GEMMA2_NAMES, is_shifted=True, has_windows=True),
    "gpt2": GgufArchitecture("GPT2LMHeadModel", _GPT2_NAMES),
}
# Keys of an architecture that the config is made of, or that change nothing.
_KNOWN_KEYS = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length", "sliding_window")),
    *(f"attention.{name}" for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon", "sliding_window_pattern")),
    *(f"rope.{name}" for name in ("dimension_count", "freq_base", "freq_base_swa", "scale_linear")),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")),
    *("attn_logit_softcapping", "final_logit_softcapping", "expert_count", "expert_used_count"),
}
# The numbers of layers of the models whose scores are divided by another number than the square root of the head width.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Divisors of the frequencies of rotary positions, and the contexts of the scaling that they may follow.
_ROPE_FACTORS = "rope_freqs.weight"
_CONTEXTS = [2**n for n in (13, *range(6, 20))]


def read_architecture(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """The architecture that a file names; an error if it is not supported."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise RegardError(
            f"{file.path}: unsupported architecture {name!r}.", f"Supported architectures: {', '.join(ARCHITECTURES)}."
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise RegardError(
            f"{file.path}: one of {file.metadata['split.count']} parts of a model.",
            "Join them first: llama-gguf-split --merge.",
        )
    return name, ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config of the class of transformers; a missing or unsupported value is an error that names its key."""
    name, architecture = read_architecture(file)
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    settings = ForeignConfig(own, f"{file.path}: {name}")
    unknown = next((key for key in own if key not in _KNOWN_KEYS), None)
    if unknown is not None:
        raise settings.unsupported(unknown, "this key is not known to Regard")
    settings.require("expert_count", 0)
    vocab = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    sizes = {
        "layers": settings.get_count("block_count"),
        "width": settings.get_count("embedding_length"),
        "heads": settings.get_count("attention.head_count"),
        "feedforward": settings.get_count("feed_forward_length"),
        "max_len": settings.get_count("context_length"),
    }
    is_tied = "output.weight" not in file.tensors
    if name == "gpt2":
        return {
            "n_layer": sizes["layers"],
            "n_embd": sizes["width"],
            "n_head": sizes["heads"],
            "n_inner": sizes["feedforward"],
            "n_positions": sizes["max_len"],
            "layer_norm_epsilon": _read_epsilon(settings, "attention.layer_norm_epsilon"),
            "vocab_size": vocab,
            "tie_word_embeddings": is_tied or _is_copy(file),
        }
    head_width = settings.get_count("attention.key_length", max(sizes["width"] // sizes["heads"], 1))
    settings.require("attention.value_length", head_width)
    config = {
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["width"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": settings.get_count("attention.head_count_kv", sizes["heads"]),
        "head_dim": head_width,
        "intermediate_size": sizes["feedforward"],
        "max_position_embeddings": sizes["max_len"],
        "rms_norm_eps": _read_epsilon(settings, "attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab,
        "tie_word_embeddings": is_tied,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "sliding_window": None,
        **_read_rope(file, settings, head_width, is_partial=name == "phi3"),
    }
    if architecture.has_windows:
        config["sliding_window"] = settings.get_natural("attention.sliding_window", 0) or None
    else:
        settings.require("attention.sliding_window", 0)
    if name in ("gemma2", "gemma3"):
        is_27b = sizes["layers"] == _GEMMA_27B_LAYERS[name]
        config["query_pre_attn_scalar"] = sizes["width"] // sizes["heads"] if is_27b else head_width
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            config[key] = settings.get_float(key, 0.0) or None
    else:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            settings.require(key, 0.0)
    if name == "gemma3":
        config["sliding_window_pattern"] = settings.get_count("attention.sliding_window_pattern", 6)
        config["rope_local_base_freq"] = settings.get_float("rope.freq_base_swa", 10000.0)
    else:
        settings.require("attention.sliding_window_pattern", 2 if name == "gemma2" else None)
        settings.require("rope.freq_base_swa", config["rope_theta"])
    return config


def _read_epsilon(settings: ForeignConfig, key: str) -> float:
    if key not in settings.table:
        raise RegardError(f"{settings.origin}.{key} is missing.", "Convert the model again.")
    return settings.get_float(key, 0.0)


def _is_copy(file: GgufFile) -> bool:
    """Whether the output layer is stored although it equals the embedding."""
    return torch.equal(file.read_tensor("output.weight"), file.read_tensor("token_embd.weight"))


def _read_rope(file: GgufFile, settings: ForeignConfig, head_width: int, is_partial: bool) -> dict[str, Any]:
    """Keys of rotary positions."""
    base = settings.get_float("rope.freq_base", 10000.0)
    rotated = settings.get_count("rope.dimension_count", head_width)
    config: dict[str, Any] = {"rope_theta": base}
    if rotated != head_width and not is_partial:
        raise settings.unsupported("rope.dimension_count", f"expected the width of a head, {head_width}")
    if is_partial:
        config["partial_rotary_factor"] = rotated / head_width
    settings.require("rope.scale_linear", 1.0)
    kind = settings.get("rope.scaling.type", "none")
    context = settings.get_count("rope.scaling.original_context_length", settings.get_count("context_length"))
    if kind not in ("none", "linear", "yarn"):
        raise settings.unsupported("rope.scaling.type", "expected none, linear or yarn")
    if kind != "none":
        config["rope_scaling"] = {"rope_type": kind, "factor": settings.get_float("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            config["rope_scaling"]["original_max_position_embeddings"] = context
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise settings.unsupported("rope.scaling.type", f"expected none beside the tensor {_ROPE_FACTORS}")
        config["rope_scaling"] = _read_llama3_scaling(file, head_width, base)
    return config


def _read_llama3_scaling(file: GgufFile, head_width: int, base: float) -> dict[str, Any]:
    """The scaling of Llama 3 that gives the stored divisors of the frequencies; an error if none does."""
    divisors = file.read_tensor(_ROPE_FACTORS)
    factor = float(divisors.max())
    for context in _CONTEXTS if len(divisors) == head_width // 2 and factor >= 1 else ():
        scaled = Rotary(head_width, base, factor=factor, context=context).rates * divisors
        if torch.allclose(scaled, Rotary(head_width, base).rates, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW_FREQ_FACTOR,
                "high_freq_factor": HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": context,
            }
    raise RegardError(
        f"{file.path}: the tensor {_ROPE_FACTORS} is not a scaling of Llama 3.", "Such a model cannot be imported."
    )


# -- tensors ----------------------------------------------------------------------------------------------------------


def read_tensors(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under the names of transformers, as they were before conversion to GGUF."""
    _, architecture = read_architecture(file)
    tensors = {}
    for name in file.tensors.keys() - {_ROPE_FACTORS}:
        layer = re.match(r"blk\.(\d+)\.", name)
        stem, _, part = name.rpartition(".")
        generic = stem if layer is None else stem.replace(layer[0], "blk.{i}.", 1)
        foreign = architecture.names.get(generic, stem).replace("{i}", layer[1] if layer else "")
        tensor = file.read_tensor(name)
        if architecture.is_interleaved and generic in ("blk.{i}.attn_q", "blk.{i}.attn_k"):
            if len(tensor) % config["head_dim"] or config["head_dim"] % 2:
                raise RegardError(
                    f"{file.path}: the tensor {name} has {len(tensor)} rows, but heads of {config['head_dim']}.",
                    "Check that the file is complete.",
                )
            tensor = to_half_split(tensor, config["head_dim"])
        if architecture.is_shifted and generic.endswith("norm"):
            tensor = tensor - 1
        if architecture.names is _GPT2_NAMES and layer and tensor.ndim == 2:
            tensor = tensor.T
        tensors[f"{foreign}.{part}"] = tensor
    return tensors


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
