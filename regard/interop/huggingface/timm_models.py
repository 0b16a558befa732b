"""Vision Transformers of timm: the table of their names, and what their configs and tensors say in our words."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import Settings
from regard.interop.huggingface.single_stack import Weights, read_labels
from regard.interop.huggingface.vit_models import ORDINARY, linear
from regard.interop.weight_mapping import Row, Table, block_rows, both, read_model, sequence
from regard.models.vit import ViTConfig

logger = logging.getLogger("regard")

# -- the table -------------------------------------------------------------------------------------------------------

TOKENS = ("cls_token", "dist_token", "reg_token")
"""what stands before the patches, in this order, as far as a model has it"""
_ROWS = [
    *both("embedding.patches.project", "patch_embed.proj"),
    Row("embedding.learned.weight", "pos_embed", sequence(1)),
    *both("output", "head"),
    *both("distilled", "head_dist"),
]
_LAYER = [
    *block_rows(
        "blocks.{i}",
        attention=("attn.qkv", "attn.proj"),
        feedforward=("mlp.fc1", "mlp.fc2"),
        norms=("norm1", "norm2"),
    ),
    *both("blocks.{i}.attention.query_norm", "blocks.{i}.attn.q_norm"),
    *both("blocks.{i}.attention.key_norm", "blocks.{i}.attn.k_norm"),
    Row("blocks.{i}.attention_residual.layer_scale", "blocks.{i}.ls1.gamma"),
    Row("blocks.{i}.feedforward_residual.layer_scale", "blocks.{i}.ls2.gamma"),
]


def table_of(tokens: Sequence[str], norm: str) -> Table:
    """The table of a model that has these of TOKENS, and whose last norm has this name.

    >>> table_of(["cls_token"], "norm").rows[-1].theirs
    ('cls_token',)
    """
    rows = [*_ROWS, *both("norm", norm)]
    if tokens:
        rows.append(Row("embedding.prefix", tuple(tokens), sequence(len(tokens))))
    return Table(rows, {"blocks": _LAYER})


# -- the configs -----------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    width: int
    layers: int
    heads: int


# What the names of architectures say. The number of heads is nothing that tensors could tell.
SIZES = {
    "tiny": Size(192, 12, 3),
    "wee": Size(256, 14, 4),
    "little": Size(320, 14, 5),
    "small": Size(384, 12, 6),
    "medium": Size(512, 12, 8),
    "mediumd": Size(512, 20, 8),
    "betwixt": Size(640, 12, 10),
    "base": Size(768, 12, 12),
    "so150m2": Size(832, 21, 13),
    "so150m": Size(896, 18, 14),
    "large": Size(1024, 24, 16),
    "huge": Size(1280, 32, 16),
    "giant": Size(1408, 40, 16),
    "gigantic": Size(1664, 48, 16),
}
_HEADS = {size.width: size.heads for size in SIZES.values()}
# Others, of which some have tensors of the same names, compute something else with them: the giant of DINOv2 has gates.
_ARCHITECTURE = re.compile(
    rf"(?!vit_giant_.*dinov2)(vit|deit|deit3)_(?P<size>{'|'.join(SIZES)})(_distilled)?_patch(?P<patch>\d+)"
    r"(_reg\d+)?(?P<gap>_gap)?(_\d+)?(_in21k|_miil|_dino|_dinov2)?(\..*)?"
)
# Arguments that matter, beside those that tensors tell.
_ARGUMENTS = ("num_heads", "mlp_ratio", "img_size", "global_pool", "init_values", "no_embed_class", "act_layer")
# Arguments that do not change what a trained model computes.
_OF_TRAINING = re.compile(r"(pos_|patch_|proj_|attn_)?drop_rate|drop_path_rate|weight_init|fix_init|dynamic_img_size")
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


class Seen(NamedTuple):
    """What tensors say of the model that they are of, by the names of timm's arguments where there are any."""

    embed_dim: int
    depth: int
    hidden: int
    places: int
    in_chans: int
    patch_size: int
    num_classes: int
    class_token: bool
    reg_tokens: int
    qkv_bias: bool
    qk_norm: bool
    fc_norm: bool


def read_timm(table: Mapping[str, Any], theirs: Mapping[str, Tensor], origin: str) -> tuple[ViTConfig, Weights]:
    """Our config, and the weights under our names; `table` is config.json, or empty."""
    if not table and "patch_embed.proj.weight" not in theirs:
        raise RegardError(
            f"{origin}: tensors without a config.json are known of timm's Vision Transformers, and these are of none.",
            "Name a folder that holds config.json.",
        )
    seen = _seen(theirs, origin)
    settings = _settings(table, origin)
    _compare(settings, seen)
    tokens = [name for name in TOKENS if name in theirs]
    config = _config(settings, seen, theirs)
    names = table_of(tokens, "fc_norm" if seen.fc_norm else "norm")
    return linear(config, read_model(config, names, {"blocks": config.layers}, theirs, origin))


def _seen(theirs: Mapping[str, Tensor], origin: str) -> Seen:
    def shape(name: str, axes: int) -> Sequence[int]:
        if name not in theirs or theirs[name].dim() != axes or not theirs[name].numel():
            said = f"of another shape: {name} {tuple(theirs[name].shape)}" if name in theirs else f"missing: {name}"
            raise RegardError(f"{origin}: the tensors are not those of such a model ({said}).", "Is it complete?")
        return theirs[name].shape

    width, channels, patch, _ = shape("patch_embed.proj.weight", 4)
    numbers = [int(found[1]) for name in theirs if (found := re.match(r"blocks\.(\d+)\.", name))]
    first = "blocks.0."
    return Seen(
        embed_dim=width,
        depth=len(set(numbers)),
        hidden=shape(f"{first}mlp.fc1.weight", 2)[0],
        places=shape("pos_embed", 3)[1],
        in_chans=channels,
        patch_size=patch,
        num_classes=shape("head.weight", 2)[0] if "head.weight" in theirs else 0,
        class_token="cls_token" in theirs,
        reg_tokens=shape("reg_token", 3)[1] if "reg_token" in theirs else 0,
        qkv_bias=f"{first}attn.qkv.bias" in theirs,
        qk_norm=f"{first}attn.q_norm.weight" in theirs,
        fc_norm="fc_norm.weight" in theirs,
    )


def _settings(table: Mapping[str, Any], origin: str) -> Settings:
    """All that a config says, in one: by the name of the architecture, about the weights, about the model."""
    about, arguments = (table.get(key) or {} for key in ("pretrained_cfg", "model_args"))
    for key, value in (("pretrained_cfg", about), ("model_args", arguments)):
        if not isinstance(value, dict):
            raise RegardError(f"{origin}: {key} = {value!r} should be a table.", "Fix the file.")
    named: dict[str, Any] = {}
    if table:
        name = table["architecture"]
        found = _ARCHITECTURE.fullmatch(name) if isinstance(name, str) else None
        if not found:
            raise RegardError(
                f"{origin}: the architecture {name!r} is not known.",
                f"Known: vit_SIZE_patchN and deit_SIZE_patchN, SIZE being one of {', '.join(SIZES)}.",
            )
        width, layers, heads = SIZES[found["size"]]
        if name.startswith("vit_base_patch16_gap_"):
            heads = 16  # alone among those of its size
        named = dict(embed_dim=width, depth=layers, num_heads=heads, patch_size=int(found["patch"]))
        if found["gap"]:
            named["global_pool"] = "avg"
    settings = Settings({**about, **named, **table, **arguments}, origin)
    for key, value in arguments.items():
        if value and key not in (*Seen._fields, *_ARGUMENTS) and not _OF_TRAINING.fullmatch(key):
            raise settings.refusal(key, "it has no such argument")
    return settings


def _compare(settings: Settings, seen: Seen) -> None:
    """Refuses a config that states something else than what the tensors say."""
    for key, value in {**seen._asdict(), "num_features": seen.embed_dim}.items():
        stated = settings.table.get(key)
        if stated is not None and stated not in (value, [value, value]):  # a patch may have two sides
            raise _lie(settings, key, value)
    ratio = settings.table.get("mlp_ratio")
    if ratio is not None and not 0 <= seen.embed_dim * settings.fraction("mlp_ratio", 0.0) - seen.hidden < 1:
        raise _lie(settings, "mlp_ratio", seen.hidden / seen.embed_dim)


def _lie(settings: Settings, key: str, value: Any) -> RegardError:
    return RegardError(
        f"{settings.origin}: {key} = {settings.table.get(key)!r}, but the tensors say {value!r}.",
        "Was the folder mixed with another model's?",
    )


def _config(settings: Settings, seen: Seen, theirs: Mapping[str, Tensor]) -> ViTConfig:
    distilled = "dist_token" in theirs
    pooling = _pooling(settings, seen)
    before = seen.class_token + distilled + seen.reg_tokens
    height, width = _sides(settings, seen, before)
    return ViTConfig(
        width=seen.embed_dim,
        heads=_heads(settings, seen, theirs),
        layers=seen.depth,
        feedforward=seen.hidden,
        # What it was before training is not known where nothing states it, and of no consequence.
        layer_scale=settings.fraction("init_values", 1e-5 if "blocks.0.ls1.gamma" in theirs else 0.0),
        norm_eps=1e-6,
        activation=settings.choice("act_layer", _ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        qk_norm=seen.qk_norm,
        qkv_bias=seen.qkv_bias,
        channels=seen.in_chans,
        image_height=height,
        image_width=width,
        patch=seen.patch_size,
        patches="convolution",
        prefix_positions=_among(settings, seen, height, width, before),
        # A class token that nothing is read off is what we call a register.
        registers=seen.reg_tokens + (pooling == "mean" and seen.class_token),
        pooling=pooling,
        pooled_norm=seen.fc_norm,
        distilled=distilled,
        head="classify" if seen.num_classes else "none",
        labels=_labels(settings, seen.num_classes),
        mean=_normal(settings, "mean"),
        std=_normal(settings, "std"),
    )


def _pooling(settings: Settings, seen: Seen) -> Literal["class", "mean"]:
    kinds: dict[str, Literal["class", "mean"]] = {"token": "class", "avg": "mean"}
    usual = "token" if seen.class_token and not seen.fc_norm else "avg"
    pooling = settings.choice("global_pool", kinds, usual)
    if pooling == "class" and not seen.class_token:
        raise settings.refusal("global_pool", "there is no cls_token")
    return pooling


def _heads(settings: Settings, seen: Seen, theirs: Mapping[str, Tensor]) -> int:
    if "num_heads" in settings.table:
        return settings.size("num_heads")
    if seen.qk_norm:
        return max(1, seen.embed_dim // max(1, theirs["blocks.0.attn.q_norm.weight"].numel()))
    if seen.embed_dim not in _HEADS:
        raise RegardError(
            f"{settings.origin}: nothing says how many heads there are in a width of {seen.embed_dim}.",
            "State architecture, and num_heads in model_args, in config.json.",
        )
    heads = _HEADS[seen.embed_dim]
    logger.warning("%s: taken to have %d heads, as timm's models of this width have.", settings.origin, heads)
    return heads


def _sides(settings: Settings, seen: Seen, before: int) -> tuple[int, int]:
    """Height and width of images. Where nothing states them, they are squares."""
    size = settings.table.get("input_size")
    if settings.table.get("img_size") is not None:
        return settings.sides("img_size", 0)
    if isinstance(size, list) and len(size) == 3:
        return settings.over({"input_size": size[1:]}).sides("input_size", 0)
    roots = {math.isqrt(count) for count in (seen.places, seen.places - before) if _square(count)}
    if len(roots) != 1:
        raise RegardError(
            f"{settings.origin}: nothing says how large images are, and {seen.places} positions do not tell.",
            "State architecture, and img_size in model_args, in config.json.",
        )
    return (roots.pop() * seen.patch_size,) * 2


def _square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _among(settings: Settings, seen: Seen, height: int, width: int, before: int) -> bool:
    """Whether the tokens before the patches have positions too."""
    patches = (height // seen.patch_size) * (width // seen.patch_size)
    if seen.places not in (patches, patches + before):
        raise RegardError(
            f"{settings.origin}: images of {height}×{width} pixels have {patches} patches, with the tokens before them"
            f" {patches + before}, but pos_embed has {seen.places} rows.",
            "Was the folder mixed with another model's?",
        )
    among = seen.places == patches + before
    if before and settings.flag("no_embed_class", not among) == among:
        raise _lie(settings, "no_embed_class", not among)
    return among


def _labels(settings: Settings, count: int) -> tuple[str, ...]:
    names = settings.table.get("label_names")
    if isinstance(names, list):
        names = {str(i): name for i, name in enumerate(names)}
    return read_labels(settings.over({"id2label": names, "num_labels": count})) if count else ()


def _normal(settings: Settings, key: str) -> tuple[float, ...]:
    if settings.table.get(key) is None:
        logger.warning("%s: nothing says what %s pixels have; taken to be %s.", settings.origin, key, *ORDINARY)
    return settings.fractions(key, ORDINARY)
