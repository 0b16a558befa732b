"""ViT and DeiT: the tables of their names, of both generations, and their configs in our words and back."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from regard.interop.foreign_config import Key, Settings, read_keys, with_defaults, write_keys
from regard.interop.huggingface.single_stack import (
    ENCODER_KEYS,
    Kind,
    Weights,
    read_labels,
    read_one_stack,
    write_labels,
    write_one_stack,
)
from regard.interop.weight_mapping import Row, Table, block_rows, both, sequence
from regard.models.vit import VisionHead, ViTConfig

logger = logging.getLogger("regard")

PATCHES = "embedding.patches.project.weight"
ORDINARY = (0.5,)
"""mean and deviation of pixels where nothing states any, as the classes have it"""

# -- the tables ------------------------------------------------------------------------------------------------------

# What other classes of the same family have and files often keep.
_UNUSED = (
    *("*pooler.*", "classifier.*", "cls_classifier.*", "distillation_classifier.*"),
    *("*embeddings.mask_token", "decoder.*"),
)
_ROWS = [
    *both("embedding.patches.project", "embeddings.patch_embeddings.projection"),
    Row("embedding.learned.weight", "embeddings.position_embeddings", sequence(1)),
    *both("norm", "layernorm"),
    *both("pooled_map", "pooler.dense"),
]
_ONE_TOKEN = Row("embedding.prefix", "embeddings.cls_token", sequence(1))
_TWO_TOKENS = Row("embedding.prefix", ("embeddings.cls_token", "embeddings.distillation_token"), sequence(2))
# What files have, even those that the newest transformers writes.
_LAYER = block_rows(
    "encoder.layer.{i}",
    attention=(
        *("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        "attention.output.dense",
    ),
    feedforward=("intermediate.dense", "output.dense"),
    norms=("layernorm_before", "layernorm_after"),
)
# What transformers from version 5 on calls them in memory, and in files where it is asked to.
_NEWER_LAYER = block_rows(
    "layers.{i}",
    attention=("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
    feedforward=("mlp.fc1", "mlp.fc2"),
    norms=("layernorm_before", "layernorm_after"),
)
_CLASSIFIER = both("output", "classifier")
_TWO_CLASSIFIERS = [*both("output", "cls_classifier"), *both("distilled", "distillation_classifier")]

# -- the configs -----------------------------------------------------------------------------------------------------


_KEYS = [
    *with_defaults(ENCODER_KEYS, dropout=0.0),
    Key("qkv_bias", "qkv_bias", True),
    Key("channels", "num_channels", 3),
]


def _read(settings: Settings, head: VisionHead, registers: int = 0, distilled: bool = False) -> ViTConfig:
    known = read_keys(_KEYS, settings)
    settings.must_be("head_dim", known["width"] // known["heads"])
    pooled = head == "none" and settings.flag("add_pooling_layer", True)
    if pooled:
        settings.must_be("pooler_act", "tanh")
        settings.must_be("pooler_output_size", known["width"])
    image_height, image_width = settings.sides("image_size", 224)
    patch, other = settings.sides("patch_size", 16)
    if patch != other:
        raise settings.refusal("patch_size", "its patches are squares")
    return ViTConfig(
        **known,
        image_height=image_height,
        image_width=image_width,
        patch=patch,
        patches="convolution",
        registers=registers,
        pooled_map=pooled,
        distilled=distilled,
        head=head,
        labels=read_labels(settings) if head == "classify" else (),
    )


def _write(config: ViTConfig, head: VisionHead, family: str) -> dict[str, Any]:
    sides = [config.image_height, config.image_width]
    return {
        "model_type": family,
        **write_keys(_KEYS, config),
        "attention_probs_dropout_prob": 0.0,
        "image_size": sides[0] if sides[0] == sides[1] else sides,
        "patch_size": config.patch,
        **({"add_pooling_layer": config.pooled_map} if head == "none" else {}),
        **(write_labels(config.labels) if head == "classify" else {}),
    }


# -- the classes -----------------------------------------------------------------------------------------------------


def _classes(layer: Sequence[Row]) -> dict[str, Kind]:
    """The classes, their layers being named in one way or the other.

    DeiT has a second token before the patches. Where nothing is read off it, it is what we call a register.
    """
    vit = Table([*_ROWS, _ONE_TOKEN], {"blocks": layer}, unused=_UNUSED, prefix="vit.")
    deit = Table([*_ROWS, _TWO_TOKENS], {"blocks": layer}, unused=_UNUSED, prefix="deit.")

    def kind(table: Table, head: VisionHead, **tokens: Any) -> Kind:
        family = table.prefix.rstrip(".")
        return Kind(table, partial(_read, head=head, **tokens), partial(_write, head=head, family=family))

    return {
        "ViTModel": kind(vit, "none"),
        "ViTForImageClassification": kind(vit.with_head(*_CLASSIFIER), "classify"),
        "DeiTModel": kind(deit, "none", registers=1),
        "DeiTForImageClassification": kind(deit.with_head(*_CLASSIFIER), "classify", registers=1),
        "DeiTForImageClassificationWithTeacher": kind(deit.with_head(*_TWO_CLASSIFIERS), "classify", distilled=True),
    }


CLASSES = _classes(_LAYER)
NEWER_CLASSES = _classes(_NEWER_LAYER)


def read_vit_like(
    name: str, table: Mapping[str, Any], pictures: Settings, theirs: Mapping[str, Tensor], origin: str
) -> tuple[ViTConfig, Weights]:
    """A model of the class `name`: our config, and its weights under our names.

    `table` is config.json, `pictures` what preprocessor_config.json says.
    """
    newer = any(".attention.q_proj." in key for key in theirs)
    kind = (NEWER_CLASSES if newer else CLASSES)[name]
    config, weights = read_one_stack(kind, Settings(table, origin), theirs)
    mean, std = _normalisation(pictures)
    return linear(replace(config, mean=mean, std=std), weights)


def write_vit_like(
    config: ViTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """config.json, preprocessor_config.json and the tensors of the class that fits; else an error."""
    plain = ViTConfig()
    # What is of no consequence there, or stands in another file.
    silent: dict[str, Any] = dict(drop_path=0.0, mean=plain.mean, std=plain.std)
    if config.head != "segment":
        silent |= dict(segmenter=plain.segmenter, segmenter_layers=plain.segmenter_layers)
    if config.head != "pixels":
        silent |= dict(decoder_width=plain.decoder_width, decoder_layers=plain.decoder_layers)
    if config.head == "none":
        silent |= dict(labels=())
    given, weights = _convolution(replace(config, **silent), weights)
    name, table, tensors = write_one_stack(CLASSES, given, weights)
    if table.pop("add_pooling_layer", None) is False:  # theirs is an argument, and not one if the config has it too
        logger.warning("there is no pooler in it: open it with %s.from_pretrained(…, add_pooling_layer=False)", name)
    return {"architectures": [name]} | table, _pictures(config), tensors


def linear(config: ViTConfig, weights: Mapping[str, Tensor]) -> tuple[ViTConfig, Weights]:
    """The same model, its patches projected by a linear map and not by a convolution of the same numbers."""
    return replace(config, patches="linear"), {**weights, PATCHES: weights[PATCHES].flatten(1)}


def _convolution(config: ViTConfig, weights: Mapping[str, Tensor]) -> tuple[ViTConfig, Weights]:
    """The reverse; what has a stem keeps it."""
    if config.patches != "linear":
        return config, dict(weights)
    square = (config.channels, config.patch, config.patch)
    return replace(config, patches="convolution"), {**weights, PATCHES: weights[PATCHES].unflatten(1, square)}


def _normalisation(pictures: Settings) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What is subtracted from pixels that lie between 0 and 1, and what they are divided by then."""
    if not pictures.table:
        logger.warning(
            "%s: there is no such file; pixels are taken to have mean %s and deviation %s.",
            pictures.origin,
            *(ORDINARY * 2),
        )
    pictures.must_be("do_rescale", True)
    pictures.must_be("rescale_factor", 1 / 255)
    if not pictures.flag("do_normalize", True):
        return (0.0,), (1.0,)
    return pictures.fractions("image_mean", ORDINARY), pictures.fractions("image_std", ORDINARY)


def _pictures(config: ViTConfig) -> dict[str, Any]:
    """What makes pixels of a picture, in their words."""
    mean, std = (list(one) * (config.channels if len(one) == 1 else 1) for one in (config.mean, config.std))
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_height, "width": config.image_width},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
