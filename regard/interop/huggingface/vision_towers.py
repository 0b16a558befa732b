"""DINOv2, and the image encoders of CLIP and SigLIP, of transformers: mapping tables, configs in both directions."""

from dataclasses import replace
from functools import partial
from typing import Any

from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, replace_defaults, write_fields
from regard.interop.huggingface.single_stack import (
    ACTIVATIONS,
    ENCODER_KEYS,
    ForeignClass,
    read_exclusive_labels,
    write_labels,
)
from regard.interop.weight_mapping import (
    FUSED_QKV,
    SWAPPED_HALVES,
    Conversion,
    MappingRow,
    MappingTable,
    block_rows,
    token_sequence,
    weight_and_bias,
)
from regard.models.vit import IMAGE_HEADS, VisionHead, ViTConfig

# -- DINOv2 -----------------------------------------------------------------------------------------------------------

DINOV2_MASK_TOKEN = "embeddings.mask_token"
_UNUSED = ("classifier.*", f"*{DINOV2_MASK_TOKEN}")


def _dinov2_table(config: ViTConfig, family: str) -> MappingTable:
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
        layer += weight_and_bias("blocks.{i}.feedforward.fc1", "encoder.layer.{i}.mlp.weights_in", SWAPPED_HALVES)
        layer += weight_and_bias("blocks.{i}.feedforward.fc2", "encoder.layer.{i}.mlp.weights_out")
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
    return table.with_head(*weight_and_bias("output", "classifier")) if IMAGE_HEADS[config.head].has_labels else table


_DINOV2_KEYS = [
    *(key for key in replace_defaults(ENCODER_KEYS, dropout=0.0, norm_eps=1e-6) if key.field != "feedforward"),
    ConfigKey("qkv_bias", "qkv_bias", True),
    ConfigKey("channels", "num_channels", 3),
    ConfigKey("layer_scale", "layerscale_value", 1.0),
]


def _gated_width(width: int) -> int:
    """Two thirds of the width of a feed-forward layer without gate, rounded up to a multiple of 8."""
    return (int(width * 2 / 3) + 7) // 8 * 8


def _read_dinov2(settings: ForeignConfig, head: VisionHead, family: str) -> ViTConfig:
    fields = read_fields(_DINOV2_KEYS, settings)
    settings.require("head_dim", fields["width"] // fields["heads"])
    if fields["layer_scale"] <= 0:
        raise settings.unsupported("layerscale_value", "expected a number above 0")
    is_gated = settings.get_bool("use_swiglu_ffn", False)
    inner = fields["width"] * settings.get_count("mlp_ratio", 4)
    if is_gated:
        fields["activation"] = "swiglu"
    has_registers = family == "dinov2_with_registers"
    return ViTConfig(
        **fields,
        feedforward=_gated_width(inner) if is_gated else inner,
        **_read_sizes(settings, 16),
        registers=settings.get_count("num_register_tokens", 4) if has_registers else 0,
        register_positions=not has_registers,
        pooling="class_mean" if IMAGE_HEADS[head].has_labels else "class",
        head=head,
        labels=read_exclusive_labels(settings) if IMAGE_HEADS[head].has_labels else (),
    )


def _write_dinov2(config: ViTConfig, head: VisionHead, family: str) -> dict[str, Any]:
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
        **write_fields(_DINOV2_KEYS, written),
        "attention_probs_dropout_prob": 0.0,
        "mlp_ratio": ratio,
        "use_swiglu_ffn": is_gated,
        "image_size": config.image_height,
        "patch_size": config.patch,
        **({"num_register_tokens": max(1, config.registers)} if has_registers else {"use_mask_token": False}),
        **(write_labels(config.labels) if IMAGE_HEADS[head].has_labels else {}),
    }


def _dinov2_class(head: VisionHead, family: str) -> ForeignClass:
    return ForeignClass(
        partial(_dinov2_table, family=family),
        partial(_read_dinov2, head=head, family=family),
        partial(_write_dinov2, head=head, family=family),
    )


# -- CLIP and SigLIP --------------------------------------------------------------------------------------------------

_CLIP_ROWS = [
    *weight_and_bias("embedding.patches.project", "embeddings.patch_embedding"),
    MappingRow("embedding.learned.weight", "embeddings.position_embedding.weight"),
    MappingRow(
        "embedding.prefix",
        "embeddings.class_embedding",
        Conversion(lambda foreign: [foreign[0][None]], lambda native: [native[0][0]]),
    ),
    *weight_and_bias("embedding.norm", "pre_layrnorm"),
    *weight_and_bias("norm", "post_layernorm"),
    # The pooling of SigLIP.
    MappingRow("pooler.question", "head.probe", token_sequence(1)),
    *(
        MappingRow(
            (f"pooler.attention.query.{part}", f"pooler.attention.key_value.{part}"),
            f"head.attention.in_proj_{part}",
            FUSED_QKV,
        )
        for part in ("weight", "bias")
    ),
    *weight_and_bias("pooler.attention.out", "head.attention.out_proj"),
    *weight_and_bias("pooler.norm", "head.layernorm"),
    *weight_and_bias("pooler.feedforward.fc1", "head.mlp.fc1"),
    *weight_and_bias("pooler.feedforward.fc2", "head.mlp.fc2"),
]
_CLIP_LAYER = block_rows(
    "encoder.layers.{i}",
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    feedforward=("mlp.fc1", "mlp.fc2"),
    norms=("layer_norm1", "layer_norm2"),
)
_CLIP_TABLE = MappingTable(
    _CLIP_ROWS, {"blocks": _CLIP_LAYER}, ignored=("*embeddings.position_ids",), prefix="vision_model."
)
_CLIP_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
_CLIP_KEYS = [
    *(
        key._replace(values=_CLIP_ACTIVATIONS) if key.field == "activation" else key
        for key in replace_defaults(ENCODER_KEYS, norm_eps=1e-5, activation="quick_gelu")
        if key.field != "dropout"
    ),
    ConfigKey("channels", "num_channels", 3),
]
_SIGLIP_KEYS = replace_defaults(_CLIP_KEYS, norm_eps=1e-6, activation="gelu_pytorch_tanh")


def _read_clip(settings: ForeignConfig) -> ViTConfig:
    """The class token is normalized after the last block; the other tokens are not."""
    fields = read_fields(_CLIP_KEYS, settings) | _read_sizes(settings, 32)
    return ViTConfig(**fields, patch_bias=False, embedding_norm=True, pooled_norm=True, head="none")


def _write_clip(config: ViTConfig) -> dict[str, Any]:
    sizes = {"image_size": config.image_height, "patch_size": config.patch, "attention_dropout": 0.0}
    return {"model_type": "clip_vision_model", **write_fields(_CLIP_KEYS, config), **sizes}


def _read_siglip(settings: ForeignConfig) -> ViTConfig:
    """Without its pooling (vision_use_head: false), the features of an image are the mean of its patches."""
    fields = read_fields(_SIGLIP_KEYS, settings) | _read_sizes(settings, 16)
    has_head = settings.get_bool("vision_use_head", True)
    return ViTConfig(**fields, pooling="query" if has_head else "mean", pooling_feedforward=has_head, head="none")


def _write_siglip(config: ViTConfig) -> dict[str, Any]:
    sizes = {"image_size": config.image_height, "patch_size": config.patch, "attention_dropout": 0.0}
    head = {} if config.pooling == "query" else {"vision_use_head": False}
    return {"model_type": "siglip_vision_model", **write_fields(_SIGLIP_KEYS, config), **sizes, **head}


def _read_sizes(settings: ForeignConfig, default_patch: int) -> dict[str, Any]:
    """Fields of the sizes of images and patches; both must be squares."""
    height, width = settings.get_size("image_size", 224)
    patch, patch_width = settings.get_size("patch_size", default_patch)
    if height != width or height % patch:
        raise settings.unsupported(
            "image_size", f"expected a square whose side is a multiple of the patch size, {patch}"
        )
    if patch != patch_width:
        raise settings.unsupported("patch_size", "patches must be squares")
    return dict(image_height=height, image_width=width, patch=patch, patches="convolution")


TOWER_CLASSES = {
    "Dinov2Model": _dinov2_class("none", "dinov2"),
    "Dinov2ForImageClassification": _dinov2_class("classify", "dinov2"),
    "Dinov2WithRegistersModel": _dinov2_class("none", "dinov2_with_registers"),
    "Dinov2WithRegistersForImageClassification": _dinov2_class("classify", "dinov2_with_registers"),
    "CLIPVisionModel": ForeignClass(_CLIP_TABLE, _read_clip, _write_clip),
    "SiglipVisionModel": ForeignClass(_CLIP_TABLE, _read_siglip, _write_siglip),
}
