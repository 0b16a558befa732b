"""T5 and mT5 of transformers: mapping tables and configs in both directions."""

from collections.abc import Sequence
from typing import Any

from regard.interop.foreign_config import (
    ConfigKey,
    ForeignConfig,
    foreign_value,
    read_fields,
    replace_defaults,
    write_fields,
)
from regard.interop.huggingface.single_stack import ACTIVATIONS, GATED_ACTIVATIONS, Weights
from regard.interop.huggingface.tied_embeddings import OUTPUT, drop_copy, require_output
from regard.interop.weight_mapping import MappingRow, MappingTable, block_rows
from regard.models.transformer import TransformerConfig

T5 = "T5ForConditionalGeneration"
# Computes what T5 1.1 does; its config has other defaults and does not scale the input of the output layer.
MT5 = "MT5ForConditionalGeneration"


def _t5_layers(is_gated: bool) -> dict[str, Sequence[MappingRow]]:
    def attention(layer: str) -> list[str]:
        return [f"{layer}.{name}" for name in "qkvo"]

    def feedforward(layer: str) -> tuple[str | tuple[str, str], str]:
        inner = (f"{layer}.wi_1", f"{layer}.wi_0") if is_gated else f"{layer}.wi"
        return inner, f"{layer}.wo"

    return {
        "encoder": block_rows(
            "encoder.block.{i}.layer",
            attention=attention("0.SelfAttention"),
            feedforward=feedforward("1.DenseReluDense"),
            norms=("0.layer_norm", "1.layer_norm"),
            block="encoder.{i}",
        ),
        "decoder": block_rows(
            "decoder.block.{i}.layer",
            attention=attention("0.SelfAttention"),
            cross=attention("1.EncDecAttention"),
            feedforward=feedforward("2.DenseReluDense"),
            norms=("0.layer_norm", "1.layer_norm", "2.layer_norm"),
            block="decoder.{i}",
        ),
    }


_T5_ROWS = [
    MappingRow("source_embedding.tokens.weight", "shared.weight"),
    # The first block of each stack holds the position bias that all its blocks use.
    MappingRow("encoder_bias.table.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    MappingRow("decoder_bias.table.weight", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    MappingRow("encoder_norm.weight", "encoder.final_layer_norm.weight"),
    MappingRow("decoder_norm.weight", "decoder.final_layer_norm.weight"),
    MappingRow("output.weight", OUTPUT),
]
# Early files have a position bias for the cross-attention, which transformers does not use.
_T5_IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_T5_COPIES = (("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight"))
T5_PLAIN = MappingTable(_T5_ROWS, _t5_layers(is_gated=False), _T5_IGNORED, copies=_T5_COPIES)
T5_GATED = T5_PLAIN._replace(layers=_t5_layers(is_gated=True))
_T5_KEYS = [
    ConfigKey("width", "d_model", 512),
    ConfigKey("heads", "num_heads", 8),
    ConfigKey("head_width", "d_kv", 64),
    ConfigKey("feedforward", "d_ff", 2048),
    ConfigKey("encoder_layers", "num_layers", 6),
    ConfigKey("dropout", "dropout_rate", 0.1),
    ConfigKey("norm_eps", "layer_norm_epsilon", 1e-6),
    ConfigKey("relative_buckets", "relative_attention_num_buckets", 32),
    ConfigKey("relative_distance", "relative_attention_max_distance", 128),
    ConfigKey("max_len", "n_positions", 512),
    ConfigKey("source_vocab", "vocab_size", 32128),
]
_MT5_KEYS = replace_defaults(_T5_KEYS, source_vocab=250112, heads=6, feedforward=1024, encoder_layers=8)


def read_t5_config(name: str, settings: ForeignConfig, tensors: Weights) -> TransformerConfig:
    require_output(settings, tensors)
    is_gated, function = _t5_activation(settings, "gated-gelu" if name == MT5 else "relu")
    fields = read_fields(_MT5_KEYS if name == MT5 else _T5_KEYS, settings)
    # T5 is tied and scales the input of its output layer, T5 1.1 does neither: older configs have one key for both.
    is_scaled = settings.get_bool("scale_decoder_outputs", settings.get_bool("tie_word_embeddings", True))
    return TransformerConfig(
        **fields,
        decoder_layers=settings.get_count("num_decoder_layers", fields["encoder_layers"]),
        norm="pre",
        norm_kind="rms",
        activation=(GATED_ACTIVATIONS if is_gated else ACTIVATIONS)[function],  # type: ignore[arg-type]
        positions="relative",
        encoder_score="dot",
        decoder_score="dot",
        cross_score="dot",
        bias=False,
        embedding_scale=False,
        output_scale=name == T5 and is_scaled,
        tied=drop_copy(tensors, OUTPUT, "shared.weight"),
        target_vocab=fields["source_vocab"],
        shared_vocab=True,
    )


def _t5_activation(settings: ForeignConfig, default: str) -> tuple[bool, str]:
    """Whether the feed-forward layer is gated, and its activation: from "gated-gelu", or from newer separate keys."""
    key, value = "feed_forward_proj", settings.table.get("feed_forward_proj") or default
    gate, _, function = str(value).rpartition("-")
    if value == "gated-gelu":
        function = "gelu_new"
    if settings.table.get("dense_act_fn") is not None:
        key, function = "dense_act_fn", settings.table["dense_act_fn"]
    supported = GATED_ACTIVATIONS if gate == "gated" else ACTIVATIONS
    if gate not in ("", "gated") or function not in supported:
        description = "gated activation" if gate == "gated" else "activation"
        raise settings.unsupported(key, f"expected the {description} to be one of {', '.join(supported)}")
    return gate == "gated", function


def write_t5_config(name: str, config: TransformerConfig) -> dict[str, Any]:
    gated_names = {"geglu": "gated-gelu", "swiglu": "gated-silu"}
    ties = {"scale_decoder_outputs": config.output_scale, "tie_word_embeddings": config.output_scale}
    return {
        "model_type": "mt5" if name == MT5 else "t5",
        **write_fields(_T5_KEYS, config),
        "d_kv": config.head_width or config.width // config.heads,
        "num_decoder_layers": config.decoder_layers,
        "feed_forward_proj": gated_names.get(config.activation) or foreign_value(ACTIVATIONS, config.activation),
        **({"tie_word_embeddings": config.tied} if name == MT5 else ties),
    }
