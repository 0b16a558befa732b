"""Llama and its relatives in transformers (Qwen, Mistral, SmolLM, Phi, OLMo, Gemma): tables and configs, both ways."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, replace_defaults, write_fields
from regard.interop.huggingface.rope import (
    layer_windows,
    read_layer_types,
    read_rope,
    read_rope_by_layer_type,
    write_layer_types,
    write_rope,
    write_rope_by_layer_type,
)
from regard.interop.huggingface.single_stack import GATED_ACTIVATIONS, ForeignClass
from regard.interop.weight_mapping import SWAPPED_HALVES, MappingRow, MappingTable, block_rows, stacked_rows
from regard.layers.blocks import BiasPlacement
from regard.models.gpt import GPTConfig
from regard.ranges import MAX_INT

# -- mapping tables ---------------------------------------------------------------------------------------------------

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_HEAD = [MappingRow("embedding.tokens.weight", "embed_tokens.weight"), MappingRow("norm.weight", "norm.weight")]
_QK_NORMS = [
    MappingRow("blocks.{i}.attention.query_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
    MappingRow("blocks.{i}.attention.key_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
]
OUTPUT = MappingRow("output.weight", "lm_head.weight")


def _table(rows: list[MappingRow]) -> MappingTable:
    table = MappingTable(_HEAD, {"blocks": rows}, ignored=("*rotary_emb.inv_freq",), prefix="model.")
    return table.with_head(OUTPUT, copies=[("lm_head.weight", "model.embed_tokens.weight")])


def _norm_rows(**norms: str) -> list[MappingRow]:
    return [
        MappingRow(f"blocks.{{i}}.{name}.weight", f"layers.{{i}}.{foreign}.weight") for name, foreign in norms.items()
    ]


_BLOCK = dict(attention=_PROJECTIONS, feedforward=(("mlp.up_proj", "mlp.gate_proj"), "mlp.down_proj"))  # value, gate
# Biases depend on the class and its config; Qwen3, Gemma 3 and OLMo 2 have norms of queries and keys.
_LLAMA = _table(
    [*block_rows("layers.{i}", **_BLOCK, norms=("input_layernorm", "post_attention_layernorm")), *_QK_NORMS]  # type: ignore[arg-type]
)
# Norms of the outputs of sublayers; in OLMo 2 these are the only ones.
_OUTPUT_NORMS = _table(
    [
        *block_rows("layers.{i}", **_BLOCK, norms=("input_layernorm", "pre_feedforward_layernorm")),  # type: ignore[arg-type]
        *_QK_NORMS,
        *_norm_rows(
            attention_output_norm="post_attention_layernorm", feedforward_output_norm="post_feedforward_layernorm"
        ),
    ]
)


def _phi3_table(config: GPTConfig) -> MappingTable:
    """Phi-3 has one tensor for queries, keys and values, and one for gate and value."""
    attention, feedforward = "blocks.{i}.attention", "blocks.{i}.feedforward"
    width = config.head_width or config.width // config.heads
    return _table(
        [
            MappingRow(
                (f"{attention}.query.weight", f"{attention}.key_value.weight"),
                "layers.{i}.self_attn.qkv_proj.weight",
                stacked_rows(config.heads * width, 2 * (config.kv_heads or config.heads) * width),
            ),
            MappingRow(f"{attention}.out.weight", "layers.{i}.self_attn.o_proj.weight"),
            MappingRow(f"{feedforward}.fc1.weight", "layers.{i}.mlp.gate_up_proj.weight", SWAPPED_HALVES),
            MappingRow(f"{feedforward}.fc2.weight", "layers.{i}.mlp.down_proj.weight"),
            *_norm_rows(attention_norm="input_layernorm", feedforward_norm="post_attention_layernorm"),
        ]
    )


# -- configs ----------------------------------------------------------------------------------------------------------

_KEYS = [
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
_QWEN_KEYS = replace_defaults(_KEYS, feedforward=22016, max_len=32768, vocab=151936)
# Gemma's "gelu" is the tanh approximation.
_GEMMA_KEYS = replace_defaults(
    [
        key._replace(values={"gelu_pytorch_tanh": "geglu", "gelu": "geglu", **GATED_ACTIVATIONS})
        if key.field == "activation"
        else key
        for key in _KEYS
    ],
    **dict(width=3072, heads=16, layers=28, feedforward=24576, max_len=8192, vocab=256000),
    **dict(activation="gelu_pytorch_tanh", tied=True),
)
_GEMMA2_KEYS = [
    key._replace(key="hidden_activation", values=GATED_ACTIVATIONS) if key.field == "activation" else key
    for key in replace_defaults(_GEMMA_KEYS, width=2304, heads=8, layers=26, feedforward=9216)
]
_GEMMA3_KEYS = replace_defaults(_GEMMA2_KEYS, max_len=131072, vocab=262208)
# Biases: (in attention, in feed-forward layers).
_BIASES: dict[tuple[bool, bool], BiasPlacement] = {
    (False, False): "none",
    (True, False): "attention",
    (False, True): "feedforward",
    (True, True): "all",
}


class LlamaVariant(NamedTuple):
    """How an architecture differs from Llama: keys and their defaults, and fields that have one value."""

    keys: Any = _KEYS
    kv_heads: int = 0
    """default of num_key_value_heads; 0: as many as heads"""
    head_width: int = 0
    """default of head_dim; 0: width / heads"""
    bias_keys: tuple[str, ...] = ("attention_bias",)
    rotary_base: float = 10000.0
    partial_rotary: bool = False
    fixed: Mapping[str, Any] = {}
    table: Any = _LLAMA


_GEMMA_FIELDS = dict(norm_kind="rms_zero_centered", embedding_scale=True)
_VARIANTS = {
    "llama": LlamaVariant(bias_keys=("attention_bias", "mlp_bias")),
    "qwen2": LlamaVariant(_QWEN_KEYS, kv_heads=32, bias_keys=(), fixed={"bias": "qkv"}),
    "qwen3": LlamaVariant(_QWEN_KEYS, kv_heads=32, head_width=128, fixed={"qk_norm": True}),
    "mistral": LlamaVariant(replace_defaults(_KEYS, feedforward=14336, max_len=4096 * 32), kv_heads=8, bias_keys=()),
    "smollm3": LlamaVariant(
        replace_defaults(_KEYS, width=2048, heads=16, layers=36, max_len=32768, vocab=128256, tied=True),
        kv_heads=4,
        bias_keys=("attention_bias", "mlp_bias"),
        rotary_base=2e6,
    ),
    "phi3": LlamaVariant(
        replace_defaults(_KEYS, width=3072, feedforward=8192, max_len=4096, vocab=32064, norm_eps=1e-5),
        bias_keys=(),
        partial_rotary=True,
        table=_phi3_table,
    ),
    "olmo2": LlamaVariant(
        replace_defaults(_KEYS, norm_eps=1e-5, vocab=50304),
        fixed={"norm": "output", "qk_norm": True, "qk_norm_joint": True},
        table=_OUTPUT_NORMS,
    ),
    "gemma": LlamaVariant(_GEMMA_KEYS, kv_heads=16, head_width=256, fixed=_GEMMA_FIELDS),
    "gemma2": LlamaVariant(
        _GEMMA2_KEYS, kv_heads=4, head_width=256, fixed={**_GEMMA_FIELDS, "norm": "sandwich"}, table=_OUTPUT_NORMS
    ),
    "gemma3_text": LlamaVariant(
        _GEMMA3_KEYS,
        kv_heads=4,
        head_width=256,
        fixed={**_GEMMA_FIELDS, "norm": "sandwich", "qk_norm": True},
        table=_OUTPUT_NORMS,
    ),
}
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
_GEMMA2_SETTINGS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def _read(settings: ForeignConfig, model_type: str) -> GPTConfig:
    variant = _VARIANTS[model_type]
    fields = read_fields(variant.keys, settings)
    has_caps = model_type in ("gemma2", "gemma3_text")
    for key, neutral in _OTHER_ARCHITECTURES.items():
        if not (has_caps and key in _GEMMA2_SETTINGS):
            settings.require(key, neutral)
    settings.require("use_bidirectional_attention", False)
    biases = [key in variant.bias_keys and settings.get_bool(key, False) for key in ("attention_bias", "mlp_bias")]
    fields["bias"] = _BIASES[biases[0], biases[1]]
    fields |= _read_windows(settings, model_type, fields["layers"])
    if model_type == "gemma3_text":
        fields |= read_rope_by_layer_type(settings)
    else:
        partial_default = 1.0 if variant.partial_rotary else None
        fields |= read_rope(settings, variant.rotary_base, partial_default)
    if model_type == "phi3" and "rotary_factor" in fields:
        raise settings.unsupported("rope_parameters", "expected rope_type default; LongRoPE is not implemented")
    if model_type == "smollm3":
        fields["unrotated_layers"] = _read_unrotated_layers(settings, fields["layers"])
    if has_caps:
        fields["score_width"] = float(settings.get_count("query_pre_attn_scalar", 256))
        is_first = model_type == "gemma2"
        if not is_first:
            settings.require("attn_logit_softcapping", None)  # transformers ignores it
        fields["score_cap"] = _read_cap(settings, "attn_logit_softcapping", 50.0 if is_first else 0.0)
        fields["logit_cap"] = _read_cap(settings, "final_logit_softcapping", 30.0 if is_first else 0.0)
    kv_heads = fields["heads"] if _is_null(settings, "num_key_value_heads") else variant.kv_heads or fields["heads"]
    return GPTConfig(
        **{"qk_norm": False, **fields, "norm_kind": "rms", **variant.fixed},
        dropout=0.0,
        positions="rotary",
        kv_heads=settings.get_count("num_key_value_heads", kv_heads),
        head_width=settings.get_natural("head_dim", variant.head_width),
    )


def _is_null(settings: ForeignConfig, key: str) -> bool:
    """Whether a key is present but null, which differs from its default."""
    return key in settings.table and settings.table[key] is None


def _read_cap(settings: ForeignConfig, key: str, default: float) -> float:
    cap = 0.0 if _is_null(settings, key) else settings.get_float(key, default)
    if cap < 0 or (cap == 0 and settings.table.get(key) is not None):
        raise settings.unsupported(key, "expected a number above 0, or null")
    return cap


def _read_windows(settings: ForeignConfig, model_type: str, layers: int) -> dict[str, Any]:
    """The field `sliding_windows`."""
    window = settings.get_count("sliding_window", MAX_INT) if settings.table.get("sliding_window") else None
    match model_type:
        case "llama" | "olmo2" | "gemma":
            if settings.get_natural("sliding_window", MAX_INT) < settings.get_count("max_position_embeddings", MAX_INT):
                raise settings.unsupported("sliding_window", "expected none in this class")
            settings.require("layer_types", None)
            return {}
        case "mistral" | "phi3":
            settings.require("layer_types", None)
            if "sliding_window" not in settings.table and model_type == "mistral":
                window = 4096
            return {"sliding_windows": (window,) if window else ()}
        case "gemma2":
            default = [i % 2 == 0 for i in range(layers)]
        case "gemma3_text":
            pattern = settings.get_count("sliding_window_pattern", 6)
            default = [(i + 1) % pattern != 0 for i in range(layers)]
        case "smollm3":
            unrotated = _read_unrotated_layers(settings, layers)
            uses_windows = settings.get_bool("use_sliding_window", False) and window is not None
            default = [uses_windows and i in unrotated for i in range(layers)]
        case _:
            if not settings.get_bool("use_sliding_window", False):
                window = None
            elif "sliding_window" not in settings.table:
                window = 4096
            first = settings.get_natural("max_window_layers", 28)
            default = [window is not None and i >= first for i in range(layers)]
    if "sliding_window" not in settings.table and model_type.startswith("gemma"):
        window = 4096
    return {"sliding_windows": read_layer_types(settings, layers, window, default)}


def _read_unrotated_layers(settings: ForeignConfig, layers: int) -> tuple[int, ...]:
    """The layers of SmolLM3 without rotary positions: zeros in a list or, without the list, each fourth layer."""
    flags = settings.table.get("no_rope_layers")
    if flags is None:
        interval = settings.get_count("no_rope_layer_interval", 4)
        flags = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise settings.unsupported("no_rope_layers", f"expected a list of {layers} numbers, 0 or 1")
    return tuple(i for i in range(layers) if not flags[i])


def _write(config: GPTConfig, model_type: str) -> dict[str, Any]:
    variant = _VARIANTS[model_type]
    if model_type == "phi3" or (model_type == "gemma3_text" and config.rotary_scaling == "dynamic"):
        config = replace(config, rotary_factor=1.0)
    table = {
        "model_type": model_type,
        **write_fields(variant.keys, config),
        **(write_rope_by_layer_type(config) if model_type == "gemma3_text" else write_rope(config)),
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_width or config.width // config.heads,
    }
    if not variant.partial_rotary:
        table.pop("partial_rotary_factor", None)
        table["rope_parameters"].pop("partial_rotary_factor", None)
    if "attention_bias" in variant.bias_keys:
        table["attention_bias"] = config.bias in ("attention", "all")
    if "mlp_bias" in variant.bias_keys:
        table["mlp_bias"] = config.bias in ("feedforward", "all")
    windows = layer_windows(config)
    match model_type:
        case "mistral" | "phi3":
            table["sliding_window"] = windows[0] if windows else None
        case "gemma2" | "gemma3_text":
            table |= write_layer_types(config)
            table["sliding_window"] = table["sliding_window"] or 4096
        case "qwen2" | "qwen3" if windows:
            first = next(i for i, window in enumerate(windows) if window)
            table |= {**write_layer_types(config), "use_sliding_window": True, "max_window_layers": first}
        case "smollm3":
            table |= {**write_layer_types(config), "use_sliding_window": bool(windows)}
            table["no_rope_layers"] = [int(i not in config.unrotated_layers) for i in range(config.layers)]
    if model_type in ("gemma2", "gemma3_text"):
        head_width = config.head_width or config.width // config.heads
        table["query_pre_attn_scalar"] = int(config.score_width) or head_width
        table["final_logit_softcapping"] = config.logit_cap or None
        table["attn_logit_softcapping"] = (config.score_cap or None) if model_type == "gemma2" else None
    return table


def _foreign_class(model_type: str) -> ForeignClass:
    read, write = partial(_read, model_type=model_type), partial(_write, model_type=model_type)
    return ForeignClass(_VARIANTS[model_type].table, read, write)


LLAMA_CLASSES = {
    "LlamaForCausalLM": _foreign_class("llama"),
    "Qwen2ForCausalLM": _foreign_class("qwen2"),
    "Qwen3ForCausalLM": _foreign_class("qwen3"),
    "MistralForCausalLM": _foreign_class("mistral"),
    "SmolLM3ForCausalLM": _foreign_class("smollm3"),
    "Phi3ForCausalLM": _foreign_class("phi3"),
    "Olmo2ForCausalLM": _foreign_class("olmo2"),
    "GemmaForCausalLM": _foreign_class("gemma"),
    "Gemma2ForCausalLM": _foreign_class("gemma2"),
    "Gemma3ForCausalLM": _foreign_class("gemma3_text"),
}
