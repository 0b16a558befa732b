"""Architectures of GGUF files as classes of transformers: configs from metadata, and names of tensors.

llama.cpp changes some tensors when it converts a model; `read_tensors` changes them back:

Llama          rows of queries and keys are reordered, so that rotary positions rotate neighboring channels
Gemma          1 is added to the weights of norms
GPT-2          projections are transposed
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig
from regard.interop.gguf.file import GgufFile
from regard.interop.llama2c import to_half_split
from regard.layers.positions import HIGH_FREQ_FACTOR, LOW_FREQ_FACTOR, Rotary

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
