"""Resizing and cropping of images: preprocessor_config.json of transformers, pretrained_cfg of timm."""

import logging
import math
from collections.abc import Mapping
from typing import Any, get_args

from regard.data.images.decoding import Resample, Resizing
from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig
from regard.models import ViTConfig

logger = logging.getLogger("regard")

_FILTERS: tuple[Resample, ...] = get_args(Resample)
# Defaults of the image processors: whether they crop, filter of the resizing, side before the crop.
_DEFAULTS: dict[str, tuple[bool, Resample, int]] = {
    "vit": (False, "bilinear", 224),
    "deit": (True, "bicubic", 256),
    "bit": (True, "bicubic", 224),
    "clip": (True, "bicubic", 224),
    "siglip": (False, "bicubic", 224),
    "dinov2": (True, "bicubic", 224),  # a folder without a processor class
}


def read_resizing(preprocessor: ForeignConfig, config: ViTConfig, class_name: str) -> Resizing | None:
    """The resizing of a preprocessor_config.json; None, with a warning, if Regard's own replaces it.

    >>> table = {"size": {"shortest_edge": 9}, "crop_size": 8, "do_center_crop": True, "resample": 3}
    >>> read_resizing(ForeignConfig(table, "x"), ViTConfig(image_height=8, image_width=8), "ViTModel").size
    (9,)
    """
    table = preprocessor.table
    if not table:
        return None
    kind = str(table.get("image_processor_type") or table.get("feature_extractor_type") or class_name)
    crops, resample, side = next(
        (values for name, values in _DEFAULTS.items() if kind.lower().startswith(name)), _DEFAULTS["vit"]
    )
    if preprocessor.get_bool("do_center_crop", crops):
        crop = _sides(preprocessor.get("crop_size", 224), allow_shortest=False)
    else:
        crop = ()
    size = _sides(preprocessor.get("size", side)) if preprocessor.get_bool("do_resize", True) else ()
    index = preprocessor.get("resample", _FILTERS.index(resample))
    expected = (config.image_height, config.image_width)
    is_valid = type(index) is int and 0 <= index < len(_FILTERS) and size is not None and crop is not None
    if not is_valid or (crop or size) not in (expected, ()):
        if "size" in table or "crop_size" in table:
            logger.warning(
                "%s: size = %r, crop_size = %r, resample = %r do not give images of %d×%d pixels; using a center crop.",
                *(preprocessor.origin, table.get("size"), table.get("crop_size"), table.get("resample"), *expected),
            )
        return None
    assert size is not None
    assert crop is not None
    return Resizing(size=size, resample=_FILTERS[index], crop=crop) if size or crop else None


def _sides(value: Any, allow_shortest: bool = True) -> tuple[int, ...] | None:
    """Height and width; for a shortest edge, that alone; None for anything else."""
    sides = [value, value] if type(value) is int else None
    if isinstance(value, Mapping):
        if value.keys() == {"height", "width"}:
            sides = [value["height"], value["width"]]
        elif value.keys() == {"shortest_edge"} and allow_shortest:
            sides = [value["shortest_edge"]]
    elif isinstance(value, list) and len(value) == 2:
        sides = value
    return tuple(sides) if sides and all(type(side) is int and side > 0 for side in sides) else None


def read_timm_resizing(table: Mapping[str, Any], config: ViTConfig, origin: str) -> Resizing | None:
    """The resizing of timm's evaluation transform, from config.json; crop_mode "border" is reported and replaced.

    >>> table = {"pretrained_cfg": {"crop_pct": 0.9, "interpolation": "bicubic"}}
    >>> read_timm_resizing(table, ViTConfig(image_height=9, image_width=9), "x")
    Resizing(size=(10,), cover=False, resample='bicubic', crop=(9, 9), rounding='even')
    """
    settings = ForeignConfig({**(table.get("pretrained_cfg") or {}), **table}, origin)
    share, mode = settings.get_float("crop_pct", 0.875), settings.get("crop_mode", "center")
    resample = settings.get("interpolation", "bicubic")
    if mode not in ("center", "squash") or resample not in _FILTERS or not 0 < share <= 10:
        logger.warning(
            "%s: crop_mode = %r, interpolation = %r and crop_pct = %r are not supported together; using a center crop.",
            *(origin, mode, resample, share),
        )
        return None
    crop = (config.image_height, config.image_width)
    size: tuple[int, ...] = tuple(math.floor(side / share) for side in crop)
    covers = mode == "center" and size[0] != size[1]
    if mode == "center" and not covers:
        size = size[:1]
    try:
        return Resizing(size=size, cover=covers, resample=resample, crop=crop, rounding="even")
    except RegardError as error:
        raise RegardError(f"{origin}: crop_pct = {share}: {error.message}", "Fix the file.") from None


def write_resizing(resizing: Resizing | None, config: ViTConfig) -> dict[str, Any]:
    """The keys of preprocessor_config.json for a resizing; None is that of Regard, which covers the input and crops it.

    The crop of transformers starts at a whole pixel of the resized image, so its pixels differ by half a pixel at most.
    A resizing that covers a size of unequal sides is not available there: the aspect ratio changes, with a warning.
    """
    if resizing is None:
        side = config.image_height, config.image_width
        resizing = Resizing(size=side, cover=True, crop=side)
    size = resizing.size
    table: dict[str, Any] = {"do_resize": bool(size), "resample": _FILTERS.index(resizing.resample)}
    if resizing.cover and len(set(size)) == 1:
        size = size[:1]
    elif resizing.cover:
        logger.warning("transformers changes the aspect ratio of images to resize them to %s.", size)
    if size:
        table["size"] = dict(zip(("height", "width") if len(size) == 2 else ("shortest_edge",), size))
    if resizing.crop:
        table |= {"image_processor_type": "DeiTImageProcessor", "do_center_crop": True}
        table["crop_size"] = dict(zip(("height", "width"), resizing.crop))
    return table
