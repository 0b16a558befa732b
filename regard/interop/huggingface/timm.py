"""Vision Transformers of timm: mapping table and configs, import only."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig
from regard.interop.huggingface.single_stack import Weights, read_exclusive_labels
from regard.interop.huggingface.vit import DEFAULT_PIXEL_STATISTICS, to_linear_patches
from regard.interop.weight_mapping import (
    MappingRow,
    MappingTable,
    block_rows,
    read_model_weights,
    token_sequence,
    weight_and_bias,
)
from regard.models.vit import ViTConfig

logger = logging.getLogger("regard")

# -- mapping table ----------------------------------------------------------------------------------------------------

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")
"""tokens before the patches, in this order; a model may have any of them"""
_ROWS = [
    *weight_and_bias("embedding.patches.project", "patch_embed.proj"),
    MappingRow("embedding.learned.weight", "pos_embed", token_sequence(1)),
    *weight_and_bias("output", "head"),
    *weight_and_bias("distilled", "head_dist"),
]
_LAYER = [
    *block_rows(
        "blocks.{i}",
        attention=("attn.qkv", "attn.proj"),
        feedforward=("mlp.fc1", "mlp.fc2"),
        norms=("norm1", "norm2"),
    ),
    *weight_and_bias("blocks.{i}.attention.query_norm", "blocks.{i}.attn.q_norm"),
    *weight_and_bias("blocks.{i}.attention.key_norm", "blocks.{i}.attn.k_norm"),
    MappingRow("blocks.{i}.attention_residual.layer_scale", "blocks.{i}.ls1.gamma"),
    MappingRow("blocks.{i}.feedforward_residual.layer_scale", "blocks.{i}.ls2.gamma"),
]


def timm_table(tokens: Sequence[str], norm: str) -> MappingTable:
    """The mapping table of a model with these of PREFIX_TOKENS and this name of its last norm.

    >>> timm_table(["cls_token"], "norm").rows[-1].foreign_names
    ('cls_token',)
    """
    rows = [*_ROWS, *weight_and_bias("norm", norm)]
    if tokens:
        rows.append(MappingRow("embedding.prefix", tuple(tokens), token_sequence(len(tokens))))
    return MappingTable(rows, {"blocks": _LAYER})


# -- configs ----------------------------------------------------------------------------------------------------------


class TimmSize(NamedTuple):
    """A named size of timm's Vision Transformers."""

    width: int
    layers: int
    heads: int


# Sizes by the name of the architecture. The tensors do not determine the number of heads.
SIZES = {
    "tiny": TimmSize(192, 12, 3),
    "wee": TimmSize(256, 14, 4),
    "little": TimmSize(320, 14, 5),
    "small": TimmSize(384, 12, 6),
    "medium": TimmSize(512, 12, 8),
    "mediumd": TimmSize(512, 20, 8),
    "betwixt": TimmSize(640, 12, 10),
    "base": TimmSize(768, 12, 12),
    "so150m2": TimmSize(832, 21, 13),
    "so150m": TimmSize(896, 18, 14),
    "large": TimmSize(1024, 24, 16),
    "huge": TimmSize(1280, 32, 16),
    "giant": TimmSize(1408, 40, 16),
    "gigantic": TimmSize(1664, 48, 16),
}
_HEADS = {size.width: size.heads for size in SIZES.values()}
# Others compute something else, some with tensors of the same names: DINOv2's giant model is gated.
_ARCHITECTURE = re.compile(
    rf"(?!vit_giant_.*dinov2)(vit|deit|deit3)_(?P<size>{'|'.join(SIZES)})(_distilled)?_patch(?P<patch>\d{{1,9}})"
    r"(_reg\d+)?(?P<gap>_gap)?(_\d+)?(_in21k|_miil|_dino|_dinov2)?(\..*)?"
)
# Supported arguments that cannot be inferred from the tensors.
_ARGUMENTS = ("num_heads", "mlp_ratio", "img_size", "global_pool", "init_values", "no_embed_class", "act_layer")
# Arguments that affect training only.
_TRAINING_ARGUMENTS = re.compile(
    r"(pos_|patch_|proj_|attn_)?drop_rate|drop_path_rate|weight_init|fix_init|dynamic_img_size"
)
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


class InferredArguments(NamedTuple):
    """Arguments of timm's VisionTransformer that the tensors determine, and the sizes `hidden` and `pos_embed_rows`."""

    embed_dim: int
    depth: int
    hidden: int
    pos_embed_rows: int
    in_chans: int
    patch_size: int
    num_classes: int
    class_token: bool
    reg_tokens: int
    qkv_bias: bool
    qk_norm: bool
    fc_norm: bool


def read_timm_model(table: Mapping[str, Any], tensors: Mapping[str, Tensor], origin: str) -> tuple[ViTConfig, Weights]:
    """Read config and weights; `table` is config.json, or empty."""
    if not table and "patch_embed.proj.weight" not in tensors:
        raise RegardError(
            f"{origin}: only Vision Transformers of timm can be imported without config.json.",
            "Pass a folder with config.json.",
        )
    inferred = _infer_arguments(tensors, origin)
    settings = _merge_settings(table, origin)
    _check_config(settings, inferred)
    tokens = [name for name in PREFIX_TOKENS if name in tensors]
    config = _make_config(settings, inferred, tensors)
    if not table:  # tensors of models that differ in these are alike
        logger.warning(
            "%s: there is no config.json; assuming the defaults of timm: pooling %r, activation gelu, %d heads, norms "
            "with an epsilon of 1e-6, images scaled and center-cropped to %d×%d pixels.",
            *(origin, config.pooling, config.heads, config.image_height, config.image_width),
        )
    mapping_table = timm_table(tokens, "fc_norm" if inferred.fc_norm else "norm")
    return to_linear_patches(
        config, read_model_weights(config, mapping_table, {"blocks": config.layers}, tensors, origin)
    )


def _infer_arguments(tensors: Mapping[str, Tensor], origin: str) -> InferredArguments:
    def shape(name: str, axes: int) -> Sequence[int]:
        if name not in tensors or tensors[name].dim() != axes or not tensors[name].numel():
            problem = f"wrong shape: {name} {tuple(tensors[name].shape)}" if name in tensors else f"missing: {name}"
            raise RegardError(
                f"{origin}: the tensors are not those of a Vision Transformer ({problem}).",
                "Check that the file is complete.",
            )
        return tensors[name].shape

    width, channels, patch, _ = shape("patch_embed.proj.weight", 4)
    layers = {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d{1,9})\.", name))}
    first = "blocks.0."
    return InferredArguments(
        embed_dim=width,
        depth=len(layers),
        hidden=shape(f"{first}mlp.fc1.weight", 2)[0],
        pos_embed_rows=shape("pos_embed", 3)[1],
        in_chans=channels,
        patch_size=patch,
        num_classes=shape("head.weight", 2)[0] if "head.weight" in tensors else 0,
        class_token="cls_token" in tensors,
        reg_tokens=shape("reg_token", 3)[1] if "reg_token" in tensors else 0,
        qkv_bias=f"{first}attn.qkv.bias" in tensors,
        qk_norm=f"{first}attn.q_norm.weight" in tensors,
        fc_norm="fc_norm.weight" in tensors,
    )


def _merge_settings(table: Mapping[str, Any], origin: str) -> ForeignConfig:
    """Merge all settings of a config.json: of the architecture by its name, of the weights, and of the model."""
    weights_config, arguments = (table.get(key) or {} for key in ("pretrained_cfg", "model_args"))
    for key, value in (("pretrained_cfg", weights_config), ("model_args", arguments)):
        if not isinstance(value, dict):
            raise RegardError(f"{origin}: {key} = {value!r}; expected a table.", "Fix the file.")
    named: dict[str, Any] = {}
    if table:
        name = table["architecture"]
        match = _ARCHITECTURE.fullmatch(name) if isinstance(name, str) else None
        if not match:
            raise RegardError(
                f"{origin}: unsupported architecture {name!r}.",
                f"Supported: vit_SIZE_patchN and deit_SIZE_patchN, where SIZE is one of {', '.join(SIZES)}.",
            )
        width, layers, heads = SIZES[match["size"]]
        if name.startswith("vit_base_patch16_gap_"):
            heads = 16  # unlike all others of its size
        named = dict(embed_dim=width, depth=layers, num_heads=heads, patch_size=int(match["patch"]))
        if match["gap"]:
            named["global_pool"] = "avg"
    settings = ForeignConfig({**weights_config, **named, **table, **arguments}, origin)
    for key, value in arguments.items():
        if value and key not in (*InferredArguments._fields, *_ARGUMENTS) and not _TRAINING_ARGUMENTS.fullmatch(key):
            raise settings.unsupported(key, "the argument is not implemented")
    return settings


def _check_config(settings: ForeignConfig, inferred: InferredArguments) -> None:
    """Raise an error if the config contradicts the tensors."""
    for key, value in {**inferred._asdict(), "num_features": inferred.embed_dim}.items():
        configured = settings.table.get(key)
        if configured is not None and configured not in (value, [value, value]):  # patch_size may be a pair
            raise _contradiction(settings, key, value)
    ratio = settings.table.get("mlp_ratio")
    if ratio is not None and not 0 <= inferred.embed_dim * settings.get_float("mlp_ratio", 0.0) - inferred.hidden < 1:
        raise _contradiction(settings, "mlp_ratio", inferred.hidden / inferred.embed_dim)


def _contradiction(settings: ForeignConfig, key: str, value: Any) -> RegardError:
    return RegardError(
        f"{settings.origin}: {key} = {settings.table.get(key)!r}, but the tensors imply {value!r}.",
        "Check that config and weights belong to the same model.",
    )


def _make_config(settings: ForeignConfig, inferred: InferredArguments, tensors: Mapping[str, Tensor]) -> ViTConfig:
    distilled = "dist_token" in tensors
    pooling = _pooling(settings, inferred)
    prefix_length = inferred.class_token + distilled + inferred.reg_tokens
    height, width = _image_size(settings, inferred, prefix_length)
    return ViTConfig(
        width=inferred.embed_dim,
        heads=_heads(settings, inferred, tensors),
        layers=inferred.depth,
        feedforward=inferred.hidden,
        # The initial value, if missing, is unknown and does not affect a trained model.
        layer_scale=settings.get_float("init_values", 1e-5 if "blocks.0.ls1.gamma" in tensors else 0.0),
        norm_eps=1e-6,
        activation=settings.get_choice("act_layer", _ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        qk_norm=inferred.qk_norm,
        qkv_bias=inferred.qkv_bias,
        channels=inferred.in_chans,
        image_height=height,
        image_width=width,
        patch=inferred.patch_size,
        patches="convolution",
        prefix_positions=_has_prefix_positions(settings, inferred, height, width, prefix_length),
        # A class token that is not pooled is a register in Regard.
        registers=inferred.reg_tokens + (pooling == "mean" and inferred.class_token),
        pooling=pooling,
        pooled_norm=inferred.fc_norm,
        distilled=distilled,
        head="classify" if inferred.num_classes else "none",
        labels=_labels(settings, inferred.num_classes),
        mean=_pixel_statistics(settings, "mean"),
        std=_pixel_statistics(settings, "std"),
    )


def _pooling(settings: ForeignConfig, inferred: InferredArguments) -> Literal["class", "mean"]:
    names: dict[str, Literal["class", "mean"]] = {"token": "class", "avg": "mean"}
    default = "token" if inferred.class_token and not inferred.fc_norm else "avg"
    pooling = settings.get_choice("global_pool", names, default)
    if pooling == "class" and not inferred.class_token:
        raise settings.unsupported("global_pool", "the model has no cls_token")
    return pooling


def _heads(settings: ForeignConfig, inferred: InferredArguments, tensors: Mapping[str, Tensor]) -> int:
    if "num_heads" in settings.table:
        return settings.get_count("num_heads")
    if inferred.qk_norm:
        return max(1, inferred.embed_dim // max(1, tensors["blocks.0.attn.q_norm.weight"].numel()))
    if inferred.embed_dim not in _HEADS:
        raise RegardError(
            f"{settings.origin}: the number of heads is unknown for width {inferred.embed_dim}.",
            "Set architecture, and num_heads in model_args, in config.json.",
        )
    heads = _HEADS[inferred.embed_dim]
    logger.warning("%s: assuming %d heads, as in timm's models of this width.", settings.origin, heads)
    return heads


def _image_size(settings: ForeignConfig, inferred: InferredArguments, prefix_length: int) -> tuple[int, int]:
    """Height and width of images; square if the config has neither."""
    input_size = settings.table.get("input_size")
    if settings.table.get("img_size") is not None:
        return settings.get_size("img_size", 0)
    if isinstance(input_size, list) and len(input_size) == 3:
        return settings.replace({"input_size": input_size[1:]}).get_size("input_size", 0)
    sides = {
        math.isqrt(count)
        for count in (inferred.pos_embed_rows, inferred.pos_embed_rows - prefix_length)
        if _is_square(count)
    }
    if len(sides) != 1:
        raise RegardError(
            f"{settings.origin}: the image size is unknown; {inferred.pos_embed_rows} positions do not determine it.",
            "Set architecture, and img_size in model_args, in config.json.",
        )
    return (sides.pop() * inferred.patch_size,) * 2


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _has_prefix_positions(
    settings: ForeignConfig, inferred: InferredArguments, height: int, width: int, prefix_length: int
) -> bool:
    """Whether the tokens before the patches have positions too."""
    patches = (height // inferred.patch_size) * (width // inferred.patch_size)
    if inferred.pos_embed_rows not in (patches, patches + prefix_length):
        raise RegardError(
            f"{settings.origin}: images of {height}×{width} pixels have {patches} patches"
            f" ({patches + prefix_length} with the prefix tokens), but pos_embed has {inferred.pos_embed_rows} rows.",
            "Check that config and weights belong to the same model.",
        )
    has_positions = inferred.pos_embed_rows == patches + prefix_length
    if prefix_length and settings.get_bool("no_embed_class", not has_positions) == has_positions:
        raise _contradiction(settings, "no_embed_class", not has_positions)
    return has_positions


def _labels(settings: ForeignConfig, count: int) -> tuple[str, ...]:
    names = settings.table.get("label_names")
    if isinstance(names, list):
        names = {str(i): name for i, name in enumerate(names)}
    return read_exclusive_labels(settings.replace({"id2label": names, "num_labels": count})) if count else ()


def _pixel_statistics(settings: ForeignConfig, key: str) -> tuple[float, ...]:
    if settings.table.get(key) is None:
        logger.warning("%s: the %s of pixels is missing; assuming %s.", settings.origin, key, *DEFAULT_PIXEL_STATISTICS)
    return settings.get_floats(key, DEFAULT_PIXEL_STATISTICS)
