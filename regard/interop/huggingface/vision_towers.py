"""DINOv2 of transformers, without and with registers: mapping tables, and configs in both directions."""

from dataclasses import replace
from functools import partial
from typing import Any

from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, replace_defaults, write_fields
from regard.interop.huggingface.single_stack import ENCODER_KEYS, ForeignClass, read_exclusive_labels, write_labels
from regard.interop.weight_mapping import (
    SWAPPED_HALVES,
    MappingRow,
    MappingTable,
    block_rows,
    token_sequence,
    weight_and_bias,
)
from regard.models.vit import VisionHead, ViTConfig

# -- mapping tables ---------------------------------------------------------------------------------------------------

DINOV2_MASK_TOKEN = "embeddings.mask_token"
_UNUSED = ("classifier.*", f"*{DINOV2_MASK_TOKEN}")


def _table(config: ViTConfig, family: str) -> MappingTable:
    is_gated = config.activation == "swiglu"
    layer = block_rows(
        "encoder.layer.{i}",
        attention=(
            *("attention.attention.query", "attention.attention.key", "attention.attention.value"),
            "attention.output.dense",
        ),
        feedforward=("mlp.fc1", "mlp.fc2"),
        norms=("norm1", "norm2"),
    )
    if is_gated:  # one tensor with the gate above the value
        layer = [row for row in layer if ".feedforward." not in row.names[0] and ".feedforward." not in row.names]
        layer += weight_and_bias("blocks.{i}.feedforward.inner", "encoder.layer.{i}.mlp.weights_in", SWAPPED_HALVES)
        layer += weight_and_bias("blocks.{i}.feedforward.outer", "encoder.layer.{i}.mlp.weights_out")
    layer += [
        MappingRow("blocks.{i}.attention_residual.layer_scale", "encoder.layer.{i}.layer_scale1.lambda1"),
        MappingRow("blocks.{i}.feedforward_residual.layer_scale", "encoder.layer.{i}.layer_scale2.lambda1"),
    ]
    tokens = ("embeddings.cls_token", "embeddings.register_tokens") if config.registers else "embeddings.cls_token"
    rows = [
        *weight_and_bias("embedding.patches.project", "embeddings.patch_embeddings.projection"),
        MappingRow("embedding.learned.weight", "embeddings.position_embeddings", token_sequence(1)),
        MappingRow("embedding.prefix", tokens, token_sequence(2 if config.registers else 1)),
        *weight_and_bias("norm", "layernorm"),
    ]
    table = MappingTable(rows, {"blocks": layer}, unused=_UNUSED, prefix=f"{family}.")
    return table.with_head(*weight_and_bias("output", "classifier")) if config.head == "classify" else table


# -- configs ----------------------------------------------------------------------------------------------------------

_KEYS = [
    *(key for key in replace_defaults(ENCODER_KEYS, dropout=0.0, norm_eps=1e-6) if key.field != "feedforward"),
    ConfigKey("qkv_bias", "qkv_bias", True),
    ConfigKey("channels", "num_channels", 3),
    ConfigKey("layer_scale", "layerscale_value", 1.0),
]


def _gated_width(width: int) -> int:
    """Two thirds of the width of a feed-forward layer without gate, rounded up to a multiple of 8."""
    return (int(width * 2 / 3) + 7) // 8 * 8


def _read(settings: ForeignConfig, head: VisionHead, family: str) -> ViTConfig:
    fields = read_fields(_KEYS, settings)
    settings.require("head_dim", fields["width"] // fields["heads"])
    if fields["layer_scale"] <= 0:
        raise settings.unsupported("layerscale_value", "expected a number above 0")
    is_gated = settings.get_bool("use_swiglu_ffn", False)
    inner = fields["width"] * settings.get_count("mlp_ratio", 4)
    height, width = settings.get_size("image_size", 224)
    patch, patch_width = settings.get_size("patch_size", 16)
    if height != width:
        raise settings.unsupported("image_size", "images must be squares")
    if patch != patch_width:
        raise settings.unsupported("patch_size", "patches must be squares")
    if is_gated:
        fields["activation"] = "swiglu"
    has_registers = family == "dinov2_with_registers"
    return ViTConfig(
        **fields,
        feedforward=_gated_width(inner) if is_gated else inner,
        image_height=height,
        image_width=width,
        patch=patch,
        patches="convolution",
        registers=settings.get_count("num_register_tokens", 4) if has_registers else 0,
        register_positions=not has_registers,
        pooling="class_mean" if head == "classify" else "class",
        head=head,
        labels=read_exclusive_labels(settings) if head == "classify" else (),
    )


def _write(config: ViTConfig, head: VisionHead, family: str) -> dict[str, Any]:
    is_gated = config.activation == "swiglu"
    ratio = max(1, config.feedforward // config.width)
    if is_gated:
        ratios = (n for n in range(1, 65) if _gated_width(n * config.width) == config.feedforward)
        ratio = next(ratios, ratio)
    written = replace(
        config, layer_scale=config.layer_scale or 1.0, activation="gelu" if is_gated else config.activation
    )
    has_registers = family == "dinov2_with_registers"
    return {
        "model_type": family,
        **write_fields(_KEYS, written),
        "attention_probs_dropout_prob": 0.0,
        "mlp_ratio": ratio,
        "use_swiglu_ffn": is_gated,
        "image_size": config.image_height,
        "patch_size": config.patch,
        **({"num_register_tokens": max(1, config.registers)} if has_registers else {"use_mask_token": False}),
        **(write_labels(config.labels) if head == "classify" else {}),
    }


def _foreign_class(head: VisionHead, family: str) -> ForeignClass:
    return ForeignClass(
        partial(_table, family=family),
        partial(_read, head=head, family=family),
        partial(_write, head=head, family=family),
    )


TOWER_CLASSES = {
    "Dinov2Model": _foreign_class("none", "dinov2"),
    "Dinov2ForImageClassification": _foreign_class("classify", "dinov2"),
    "Dinov2WithRegistersModel": _foreign_class("none", "dinov2_with_registers"),
    "Dinov2WithRegistersForImageClassification": _foreign_class("classify", "dinov2_with_registers"),
}
