"""GPT-2, Llama, Qwen2 and Qwen3 of transformers: mapping tables and configs in both directions."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, replace_defaults, write_fields
from regard.interop.huggingface.single_stack import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    ForeignClass,
    Weights,
    read_single_stack,
    write_single_stack,
)
from regard.interop.weight_mapping import (
    FUSED_QKV,
    TRANSPOSED,
    TRANSPOSED_QKV,
    MappingRow,
    MappingTable,
    block_rows,
    weight_and_bias,
)
from regard.layers.multihead import BiasPlacement
from regard.layers.positions import HIGH_FREQ_FACTOR, LOW_FREQ_FACTOR
from regard.models.gpt import GPTConfig
from regard.ranges import MAX_INT

# -- mapping tables ---------------------------------------------------------------------------------------------------

_QUERY, _KEY_VALUE = "blocks.{i}.attention.query", "blocks.{i}.attention.key_value"

_GPT2 = MappingTable(
    [
        MappingRow("embedding.tokens.weight", "wte.weight"),
        MappingRow("embedding.positions.weight", "wpe.weight"),
        *weight_and_bias("norm", "ln_f"),
    ],
    {
        "blocks": [
            *weight_and_bias("blocks.{i}.attention_norm", "h.{i}.ln_1"),
            MappingRow((f"{_QUERY}.weight", f"{_KEY_VALUE}.weight"), "h.{i}.attn.c_attn.weight", TRANSPOSED_QKV),
            MappingRow((f"{_QUERY}.bias", f"{_KEY_VALUE}.bias"), "h.{i}.attn.c_attn.bias", FUSED_QKV),
            MappingRow("blocks.{i}.attention.out.weight", "h.{i}.attn.c_proj.weight", TRANSPOSED),
            MappingRow("blocks.{i}.attention.out.bias", "h.{i}.attn.c_proj.bias"),
            *weight_and_bias("blocks.{i}.feedforward_norm", "h.{i}.ln_2"),
            MappingRow("blocks.{i}.feedforward.inner.weight", "h.{i}.mlp.c_fc.weight", TRANSPOSED),
            MappingRow("blocks.{i}.feedforward.inner.bias", "h.{i}.mlp.c_fc.bias"),
            MappingRow("blocks.{i}.feedforward.outer.weight", "h.{i}.mlp.c_proj.weight", TRANSPOSED),
            MappingRow("blocks.{i}.feedforward.outer.bias", "h.{i}.mlp.c_proj.bias"),
        ]
    },
    ignored=("*h.*.attn.bias", "*h.*.attn.masked_bias"),  # the causal mask and its large negative value
    prefix="transformer.",
)
# Llama's config decides about biases; Qwen2 has those of queries, keys and values; Qwen3 has norms of queries and keys.
_LLAMA = MappingTable(
    [MappingRow("embedding.tokens.weight", "embed_tokens.weight"), MappingRow("norm.weight", "norm.weight")],
    {
        "blocks": [
            *block_rows(
                "layers.{i}",
                attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
                feedforward=(("mlp.up_proj", "mlp.gate_proj"), "mlp.down_proj"),  # value, then gate
                norms=("input_layernorm", "post_attention_layernorm"),
            ),
            MappingRow("blocks.{i}.attention.query_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
            MappingRow("blocks.{i}.attention.key_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
        ]
    },
    ignored=("*rotary_emb.inv_freq",),
    prefix="model.",
)
_OUTPUT = MappingRow("output.weight", "lm_head.weight")
_GPT2_LM = _GPT2.with_head(_OUTPUT, copies=[("lm_head.weight", "transformer.wte.weight")])
_LLAMA_LM = _LLAMA.with_head(_OUTPUT, copies=[("lm_head.weight", "model.embed_tokens.weight")])

# -- configs ----------------------------------------------------------------------------------------------------------

_GPT2_KEYS = [
    ConfigKey("width", "n_embd", 768),
    ConfigKey("heads", "n_head", 12),
    ConfigKey("layers", "n_layer", 12),
    ConfigKey("dropout", "resid_pdrop", 0.1),
    ConfigKey("norm_eps", "layer_norm_epsilon", 1e-5),
    ConfigKey("activation", "activation_function", "gelu_new", ACTIVATIONS),
    ConfigKey("tied", "tie_word_embeddings", True),
    ConfigKey("max_len", "n_positions", 1024),
    ConfigKey("vocab", "vocab_size", 50257),
]
_LLAMA_KEYS = [
    ConfigKey("width", "hidden_size", 4096),
    ConfigKey("heads", "num_attention_heads", 32),
    ConfigKey("layers", "num_hidden_layers", 32),
    ConfigKey("feedforward", "intermediate_size", 11008),
    ConfigKey("norm_eps", "rms_norm_eps", 1e-6),
    ConfigKey("activation", "hidden_act", "silu", GATED_ACTIVATIONS),
    ConfigKey("tied", "tie_word_embeddings", False),
    ConfigKey("max_len", "max_position_embeddings", 2048),
    ConfigKey("vocab", "vocab_size", 32000),
]
_QWEN_KEYS = replace_defaults(_LLAMA_KEYS, feedforward=22016, max_len=32768, vocab=151936)


def _read_gpt2(settings: ForeignConfig, has_head: bool = True) -> GPTConfig:
    settings.require("scale_attn_by_inverse_layer_idx", False)
    settings.require("add_cross_attention", False)
    fields = read_fields(_GPT2_KEYS, settings)
    return GPTConfig(
        **fields | ({} if has_head else {"tied": True}),
        feedforward=settings.get_count("n_inner", 4 * fields["width"]),
        norm_kind="layer",
        positions="learned",
        score="scaled_dot" if settings.get_bool("scale_attn_weights", True) else "dot",
        qk_norm=False,
        bias="all",
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        **write_fields(_GPT2_KEYS, config),
        "n_inner": config.feedforward,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": config.score != "dot",
    }


LlamaType = Literal["llama", "qwen2", "qwen3"]
# Biases of Llama: (in attention, in feed-forward layers).
_BIASES: dict[tuple[bool, bool], BiasPlacement] = {
    (False, False): "none",
    (True, False): "attention",
    (False, True): "feedforward",
    (True, True): "all",
}


def _read_rope(settings: ForeignConfig) -> dict[str, Any]:
    """Fields of rotary positions. transformers 5 keeps them in one table, earlier versions in several keys."""
    key = "rope_scaling" if settings.table.get("rope_scaling") else "rope_parameters"
    table = settings.table.get(key) or {}
    if not isinstance(table, dict):
        raise settings.unsupported(key, "expected a table")
    rope = ForeignConfig(table, settings.origin)
    rope_type = rope.table.get("rope_type", rope.table.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3"):
        raise settings.unsupported(key, "expected rope_type default, linear or llama3")
    for config in (settings, rope):
        config.require("partial_rotary_factor", 1.0)
    fields: dict[str, Any] = {"rotary_base": rope.get_float("rope_theta", settings.get_float("rope_theta", 10000.0))}
    if rope_type != "default":
        fields["rotary_factor"] = rope.get_float("factor", 0.0)
        if fields["rotary_factor"] < 1:
            raise settings.unsupported(key, "its factor must be at least 1")
    if rope_type == "llama3":
        rope.require("low_freq_factor", LOW_FREQ_FACTOR)
        rope.require("high_freq_factor", HIGH_FREQ_FACTOR)
        fields["rotary_context"] = rope.get_count("original_max_position_embeddings")
    return fields


def _write_rope(config: GPTConfig) -> dict[str, Any]:
    """The keys of transformers 5, and those of earlier versions and other programs."""
    base = {"rope_theta": config.rotary_base}
    if config.rotary_factor == 1.0:
        return {"rope_parameters": {"rope_type": "default", **base}, **base}
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": config.rotary_factor}
    if config.rotary_context:
        scaling |= {"rope_type": "llama3", "low_freq_factor": LOW_FREQ_FACTOR, "high_freq_factor": HIGH_FREQ_FACTOR}
        scaling |= {"original_max_position_embeddings": config.rotary_context}
    return {"rope_parameters": {**scaling, **base}, **base, "rope_scaling": scaling}


def _check_no_windows(settings: ForeignConfig, layers: int) -> None:
    """Raise an error if a layer uses sliding-window attention."""
    types = settings.table.get("layer_types")
    if types is not None:
        if types != ["full_attention"] * layers:
            raise settings.unsupported("layer_types", "expected full_attention in each layer")
    elif settings.get_bool("use_sliding_window", False) and settings.get_natural("max_window_layers", 28) < layers:
        raise settings.unsupported("use_sliding_window", "sliding-window attention is not implemented")


# Settings of similar architectures (Granite, Gemma, Cohere, MiniCPM) and the values that change nothing.
_OTHER_ARCHITECTURES = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "scale_emb": 1.0,
    "scale_depth": None,
}


def _read_llama(settings: ForeignConfig, model_type: LlamaType) -> GPTConfig:
    fields = read_fields(_LLAMA_KEYS if model_type == "llama" else _QWEN_KEYS, settings)
    for key, neutral in _OTHER_ARCHITECTURES.items():
        settings.require(key, neutral)
    if model_type == "llama" and settings.get_natural("sliding_window", MAX_INT) < fields["max_len"]:
        raise settings.unsupported("sliding_window", "sliding-window attention is not implemented")
    attention, feedforward = (settings.get_bool(key, False) for key in ("attention_bias", "mlp_bias"))
    if model_type != "llama":
        _check_no_windows(settings, fields["layers"])
    return GPTConfig(
        **fields,
        **_read_rope(settings),
        dropout=0.0,
        norm_kind="rms",
        positions="rotary",
        kv_heads=settings.get_count("num_key_value_heads", fields["heads"] if model_type == "llama" else 32),
        head_width=settings.get_natural("head_dim", 128 if model_type == "qwen3" else 0),
        qk_norm=model_type == "qwen3",
        bias="qkv" if model_type == "qwen2" else _BIASES[attention, feedforward and model_type == "llama"],
    )


def _write_llama(config: GPTConfig, model_type: LlamaType) -> dict[str, Any]:
    table = {
        "model_type": model_type,
        **write_fields(_LLAMA_KEYS, config),
        **_write_rope(config),
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_width or config.width // config.heads,
    }
    if model_type != "qwen2":
        table["attention_bias"] = config.bias in ("attention", "all")
    if model_type == "llama":
        table["mlp_bias"] = config.bias in ("feedforward", "all")
    return table


# -- classes ----------------------------------------------------------------------------------------------------------


def _llama(model_type: LlamaType) -> ForeignClass:
    return ForeignClass(
        _LLAMA_LM, partial(_read_llama, model_type=model_type), partial(_write_llama, model_type=model_type)
    )


GPT_CLASSES = {
    "GPT2LMHeadModel": ForeignClass(_GPT2_LM, _read_gpt2, _write_gpt2),
    # Saved without its output layer, which is tied to the embedding.
    "GPT2Model": ForeignClass(_GPT2, partial(_read_gpt2, has_head=False), _write_gpt2),
    "LlamaForCausalLM": _llama("llama"),
    "Qwen2ForCausalLM": _llama("qwen2"),
    "Qwen3ForCausalLM": _llama("qwen3"),
}


def read_gpt_model(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> tuple[GPTConfig, SpecialTokens, Weights]:
    """Read a model of the class `name`: config, special ids and weights.

    `table` is config.json, `tokens` are the special ids by role.
    """
    config, weights = read_single_stack(GPT_CLASSES[name], ForeignConfig(table, origin), tensors)
    if "eos" not in tokens:
        raise RegardError(f"{origin}: eos_token_id is missing.", "Add eos_token_id to the file.")
    eos = tokens["eos"]
    sos = tokens.get("bos", eos)
    special = SpecialTokens(
        pad=tokens.get("pad", eos), unk=tokens.get("unk", eos), sos=sos, eos=eos, begin=tokens.get("begin")
    )
    return config, special, weights


def write_gpt_model(
    config: GPTConfig, special: SpecialTokens, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json and the tensors of the matching class; an error if no class matches."""
    name, table, tensors = write_single_stack(GPT_CLASSES, config, weights)
    if name == "LlamaForCausalLM" and config.width % config.heads:
        raise RegardError(
            f"{name}: width = {config.width} is not a multiple of heads = {config.heads}.",
            "Train with supported settings to export the model.",
        )
    ids = {"bos_token_id": special.sos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    return {"architectures": [name]} | table | ids, ids, tensors
