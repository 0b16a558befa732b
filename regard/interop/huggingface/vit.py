"""ViT and DeiT of transformers: mapping tables for old and new tensor names, configs in both directions.

DINOv2, CLIP and SigLIP are in `vision_towers`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, replace_defaults, write_fields
from regard.interop.huggingface.single_stack import (
    ENCODER_KEYS,
    ForeignClass,
    Weights,
    read_exclusive_labels,
    read_single_stack,
    write_labels,
    write_single_stack,
)
from regard.interop.huggingface.vision_towers import DINOV2_MASK_TOKEN, TOWER_CLASSES
from regard.interop.weight_mapping import MappingRow, MappingTable, block_rows, token_sequence, weight_and_bias
from regard.models.vit import IMAGE_HEADS, VisionHead, ViTConfig

logger = logging.getLogger("regard")

PATCH_WEIGHT = "embedding.patches.project.weight"
DEFAULT_PIXEL_STATISTICS = (0.5,)
"""default mean and standard deviation of pixels, as in transformers"""

# -- mapping tables ---------------------------------------------------------------------------------------------------

# Tensors of other classes of the family, which files often keep.
_UNUSED = (
    *("*pooler.*", "classifier.*", "cls_classifier.*", "distillation_classifier.*"),
    *("*embeddings.mask_token", "decoder.*"),
)
_ROWS = [
    *weight_and_bias("embedding.patches.project", "embeddings.patch_embeddings.projection"),
    MappingRow("embedding.learned.weight", "embeddings.position_embeddings", token_sequence(1)),
    *weight_and_bias("norm", "layernorm"),
    *weight_and_bias("pooled_map", "pooler.dense"),
]
_ONE_TOKEN = MappingRow("embedding.prefix", "embeddings.cls_token", token_sequence(1))
_TWO_TOKENS = MappingRow(
    "embedding.prefix", ("embeddings.cls_token", "embeddings.distillation_token"), token_sequence(2)
)
# Names in files, including those that the newest transformers writes by default.
_LAYER = block_rows(
    "encoder.layer.{i}",
    attention=(
        *("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        "attention.output.dense",
    ),
    feedforward=("intermediate.dense", "output.dense"),
    norms=("layernorm_before", "layernorm_after"),
)
# Names in memory since transformers 5, and in files saved with save_original_format=False.
_NEWER_LAYER = block_rows(
    "layers.{i}",
    attention=("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
    feedforward=("mlp.fc1", "mlp.fc2"),
    norms=("layernorm_before", "layernorm_after"),
)
_CLASSIFIER = weight_and_bias("output", "classifier")
_TWO_CLASSIFIERS = [
    *weight_and_bias("output", "cls_classifier"),
    *weight_and_bias("distilled", "distillation_classifier"),
]

# -- configs ----------------------------------------------------------------------------------------------------------


_KEYS = [
    *replace_defaults(ENCODER_KEYS, dropout=0.0),
    ConfigKey("qkv_bias", "qkv_bias", True),
    ConfigKey("channels", "num_channels", 3),
]


def _read(settings: ForeignConfig, head: VisionHead, registers: int = 0, distilled: bool = False) -> ViTConfig:
    fields = read_fields(_KEYS, settings)
    settings.require("head_dim", fields["width"] // fields["heads"])
    has_pooler = head == "none" and settings.get_bool("add_pooling_layer", True)
    if has_pooler:
        settings.require("pooler_act", "tanh")
        settings.require("pooler_output_size", fields["width"])
    image_height, image_width = settings.get_size("image_size", 224)
    patch, patch_width = settings.get_size("patch_size", 16)
    if patch != patch_width:
        raise settings.unsupported("patch_size", "patches must be squares")
    return ViTConfig(
        **fields,
        image_height=image_height,
        image_width=image_width,
        patch=patch,
        patches="convolution",
        registers=registers,
        pooled_map=has_pooler,
        distilled=distilled,
        head=head,
        labels=read_exclusive_labels(settings) if IMAGE_HEADS[head].has_labels else (),
    )


def _write(config: ViTConfig, head: VisionHead, family: str) -> dict[str, Any]:
    sides = [config.image_height, config.image_width]
    return {
        "model_type": family,
        **write_fields(_KEYS, config),
        "attention_probs_dropout_prob": 0.0,
        "image_size": sides[0] if sides[0] == sides[1] else sides,
        "patch_size": config.patch,
        **({"add_pooling_layer": config.pooled_map} if head == "none" else {}),
        **(write_labels(config.labels) if IMAGE_HEADS[head].has_labels else {}),
    }


# -- classes ----------------------------------------------------------------------------------------------------------


def _classes(layer: Sequence[MappingRow]) -> dict[str, ForeignClass]:
    """The classes, for one of the two ways to name layers.

    DeiT has a second token before the patches. If no head reads it, it is a register in Regard.
    """
    vit = MappingTable([*_ROWS, _ONE_TOKEN], {"blocks": layer}, unused=_UNUSED, prefix="vit.")
    deit = MappingTable([*_ROWS, _TWO_TOKENS], {"blocks": layer}, unused=_UNUSED, prefix="deit.")

    def make_class(table: MappingTable, head: VisionHead, **tokens: Any) -> ForeignClass:
        family = table.prefix.rstrip(".")
        return ForeignClass(table, partial(_read, head=head, **tokens), partial(_write, head=head, family=family))

    return {
        "ViTModel": make_class(vit, "none"),
        "ViTForImageClassification": make_class(vit.with_head(*_CLASSIFIER), "classify"),
        "DeiTModel": make_class(deit, "none", registers=1),
        "DeiTForImageClassification": make_class(deit.with_head(*_CLASSIFIER), "classify", registers=1),
        "DeiTForImageClassificationWithTeacher": make_class(
            deit.with_head(*_TWO_CLASSIFIERS), "classify", distilled=True
        ),
    }


VIT_CLASSES = {**_classes(_LAYER), **TOWER_CLASSES}
_NEWER_VIT_CLASSES = {**_classes(_NEWER_LAYER), **TOWER_CLASSES}


def read_vit_model(
    name: str, table: Mapping[str, Any], preprocessor: ForeignConfig, tensors: Mapping[str, Tensor], origin: str
) -> tuple[ViTConfig, Weights]:
    """Read a model of the class `name`: config and weights.

    `table` is config.json, `preprocessor` is preprocessor_config.json.
    """
    has_newer_names = any(".attention.q_proj." in key for key in tensors)
    foreign_class = (_NEWER_VIT_CLASSES if has_newer_names else VIT_CLASSES)[name]
    config, weights = read_single_stack(foreign_class, ForeignConfig(table, origin), tensors)
    mean, std = _read_normalization(preprocessor)
    return to_linear_patches(replace(config, mean=mean, std=std), weights)


def exported_config(config: ViTConfig) -> ViTConfig:
    """The config without fields that do not affect the computation or are in another file, and with convolutions
    instead of equal linear layers for the patches.
    """
    default = ViTConfig()
    ignored: dict[str, Any] = dict(drop_path=0.0, mean=default.mean, std=default.std)
    if config.patches == "linear":
        ignored |= dict(patches="convolution")
    ignored |= {name: getattr(default, name) for name in config.unused_head_fields}
    if config.head == "none":
        ignored |= dict(labels=())
    return replace(config, **ignored)


def write_vit_model(
    config: ViTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """config.json, preprocessor_config.json and the tensors of the matching class; an error if no class matches."""
    if config.patches == "linear":
        kernel = (config.channels, config.patch, config.patch)
        weights = {**weights, PATCH_WEIGHT: weights[PATCH_WEIGHT].unflatten(1, kernel)}
    name, table, tensors = write_single_stack(VIT_CLASSES, exported_config(config), weights)
    if name.startswith("Dinov2WithRegisters"):  # always present, used in pre-training only
        prefix = "" if config.head == "none" else "dinov2_with_registers."
        tensors[prefix + DINOV2_MASK_TOKEN] = torch.zeros(1, config.width)
    if table.pop("add_pooling_layer", None) is False:  # an argument of the class, which must not be in its config
        logger.warning(
            "The exported model has no pooler: load it with %s.from_pretrained(…, add_pooling_layer=False)", name
        )
    return {"architectures": [name]} | table, _preprocessor_config(config), tensors


def to_linear_patches(config: ViTConfig, weights: Mapping[str, Tensor]) -> tuple[ViTConfig, Weights]:
    """The same model with the patches projected by a linear layer instead of an equal convolution."""
    return replace(config, patches="linear"), {**weights, PATCH_WEIGHT: weights[PATCH_WEIGHT].flatten(1)}


def _read_normalization(preprocessor: ForeignConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by which pixels between 0 and 1 are normalized."""
    if not preprocessor.table:
        logger.warning(
            "%s: the file is missing; assuming pixels of mean %s and standard deviation %s.",
            preprocessor.origin,
            *(DEFAULT_PIXEL_STATISTICS * 2),
        )
    preprocessor.require("do_rescale", True)
    preprocessor.require("rescale_factor", 1 / 255)
    if not preprocessor.get_bool("do_normalize", True):
        return (0.0,), (1.0,)
    return preprocessor.get_floats("image_mean", DEFAULT_PIXEL_STATISTICS), preprocessor.get_floats(
        "image_std", DEFAULT_PIXEL_STATISTICS
    )


def _preprocessor_config(config: ViTConfig) -> dict[str, Any]:
    """The content of preprocessor_config.json, without the resizing."""
    mean, std = (list(values) * (config.channels if len(values) == 1 else 1) for values in (config.mean, config.std))
    return {
        "image_processor_type": "ViTImageProcessor",
        **({"do_convert_rgb": True} if config.channels == 3 else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
