"""ModernBERT of transformers: mapping table and config in both directions."""

from typing import Any

from regard.interop.foreign_config import ConfigKey, ForeignConfig, foreign_value, read_fields, write_fields
from regard.interop.huggingface.bert import CLASSIFIER, encoder_classes, write_label_keys
from regard.interop.huggingface.rope import (
    layer_windows,
    read_layer_types,
    read_rope_by_layer_type,
    write_rope_by_layer_type,
)
from regard.interop.huggingface.single_stack import ACTIVATIONS, read_labels, read_problem_type
from regard.interop.weight_mapping import (
    SWAPPED_HALVES,
    MappingRow,
    MappingTable,
    attention_rows,
    weight_and_bias,
)
from regard.models.bert import BertConfig, Head

# -- mapping tables ---------------------------------------------------------------------------------------------------

_ROWS = [
    MappingRow("embedding.tokens.weight", "embeddings.tok_embeddings.weight"),
    *weight_and_bias("embedding.norm", "embeddings.norm"),
    *weight_and_bias("norm", "final_norm"),
]
_LAYER = [
    *weight_and_bias("blocks.{i}.attention_norm", "layers.{i}.attn_norm"),
    *attention_rows("blocks.{i}.attention", "layers.{i}.attn", ("Wqkv", "Wo")),
    *weight_and_bias("blocks.{i}.feedforward_norm", "layers.{i}.mlp_norm"),
    *weight_and_bias("blocks.{i}.feedforward.inner", "layers.{i}.mlp.Wi", SWAPPED_HALVES),
    *weight_and_bias("blocks.{i}.feedforward.outer", "layers.{i}.mlp.Wo"),
]
_TABLE = MappingTable(_ROWS, {"blocks": _LAYER}, unused=("head.*", "decoder.*", "classifier.*"), prefix="model.")
_TRANSFORM = [*weight_and_bias("mask_head.dense", "head.dense"), *weight_and_bias("mask_head.norm", "head.norm")]
_CLASSIFY = _TABLE.with_head(*_TRANSFORM, *CLASSIFIER)
_MASK = _TABLE.with_head(
    *_TRANSFORM,
    MappingRow("output.bias", "decoder.bias"),
    copies=(("decoder.weight", "model.embeddings.tok_embeddings.weight"),),
)
_TABLES: dict[Head, MappingTable] = {
    "none": _TABLE,
    "mask": _MASK,
    "classify": _CLASSIFY,
    "answer": _CLASSIFY,
    "tag": _CLASSIFY,
}

# -- config -----------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {"gelu": "geglu_exact", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu"}
_KEYS = [
    ConfigKey("width", "hidden_size", 768),
    ConfigKey("heads", "num_attention_heads", 12),
    ConfigKey("layers", "num_hidden_layers", 22),
    ConfigKey("feedforward", "intermediate_size", 1152),
    ConfigKey("dropout", "mlp_dropout", 0.0),
    ConfigKey("norm_eps", "norm_eps", 1e-5),
    ConfigKey("activation", "hidden_activation", "gelu", _ACTIVATIONS),
    ConfigKey("max_len", "max_position_embeddings", 8192),
    ConfigKey("vocab", "vocab_size", 50368),
]
_POOLING = {"cls": "first", "mean": "mean"}
# Keys and values of the rotary base in layers with full and with local attention.
_ROPE_DEFAULTS = (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))


def _read_modernbert(settings: ForeignConfig, head: Head) -> BertConfig:
    fields = read_fields(_KEYS, settings)
    # The head has the activation of the gates.
    hidden = settings.get_choice("hidden_activation", ACTIVATIONS, "gelu")
    if head != "none" and settings.get_choice("classifier_activation", ACTIVATIONS, "gelu") != hidden:
        raise settings.unsupported("classifier_activation", "it must be the same as hidden_activation")
    if head == "mask":
        settings.require("tie_word_embeddings", True)
        settings.require("decoder_bias", True)
    biases = settings.get_bool("attention_bias", False), settings.get_bool("mlp_bias", False)
    bias = {(True, True): "all", (True, False): "attention", (False, True): "feedforward", (False, False): "none"}
    period = settings.get_count("global_attn_every_n_layers", 3)
    windows = read_layer_types(
        settings,
        fields["layers"],
        settings.get_natural("sliding_window", settings.get_count("local_attention", 128) // 2),
        [bool(i % period) for i in range(fields["layers"])],
    )
    settings.require("rope_scaling", None)
    rope = read_rope_by_layer_type(settings, *_ROPE_DEFAULTS)
    if len(rope) > 2:
        raise settings.unsupported("rope_parameters", "expected rope_type default")
    labels = read_labels(settings) if head in ("classify", "tag") else ()
    return BertConfig(
        **fields,
        **rope,
        norm="pre",
        norm_kind="layer" if settings.get_bool("norm_bias", False) else "layer_without_bias",
        first_norm=False,
        bias=bias[biases],  # type: ignore[arg-type]
        positions="rotary",
        sliding_windows=windows,
        segments=0,
        head=head,
        pooling=settings.get_choice("classifier_pooling", _POOLING, "cls")  # type: ignore[arg-type]
        if head == "classify"
        else "first",
        head_transform=head not in ("none", "mask"),
        head_bias=settings.get_bool("classifier_bias", False),
        labels=labels,
        problem_type=read_problem_type(settings, labels) if head == "classify" else "single_label",
    )


def _write_modernbert(config: BertConfig, head: Head) -> dict[str, Any]:
    windows = layer_windows(config) or (0,) * config.layers
    table = {
        "model_type": "modernbert",
        **write_fields(_KEYS, config),
        **write_rope_by_layer_type(config, *_ROPE_DEFAULTS),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "local_attention": 2 * max(windows) or 128,
        "attention_bias": config.bias in ("all", "attention"),
        "mlp_bias": config.bias in ("all", "feedforward"),
        "norm_bias": config.norm_kind == "layer",
        "classifier_bias": config.head_bias,
        "classifier_activation": foreign_value(_ACTIVATIONS, config.activation),
        "classifier_pooling": foreign_value(_POOLING, config.pooling),
        **write_label_keys(config, head),
    }
    # Versions before 5 know a period only.
    period = next((n for n in range(1, config.layers + 1) if _is_period(n, windows)), None)
    return table | ({} if period is None else {"global_attn_every_n_layers": period})


def _is_period(n: int, windows: tuple[int, ...]) -> bool:
    """Whether every n-th layer from the first one, and no other, has full attention."""
    return all((window == 0) == (i % n == 0) for i, window in enumerate(windows))


MODERNBERT_CLASSES = encoder_classes("ModernBert", _read_modernbert, _write_modernbert, _TABLES)
