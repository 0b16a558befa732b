"""Random augmentation of training images: entire batches at once, on their device.

Nothing is synchronized with the host, and all randomness comes from torch, so a replayed CUDA graph samples anew.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images import ops as ops
from regard.data.images.ops import Factor, Masks, Pixels
from regard.errors import RegardError
from regard.ranges import Fraction, Natural, Range, check_ranges

# RandAugment at full strength (Cubuk et al. 2020): maximum rotation in radians, shear, translation as a share of the
# side, change of brightness, contrast, saturation and sharpness as a factor, and number of bits that posterize removes.
_MAX_ANGLE, _MAX_SHEAR, _MAX_SHIFT, _MAX_FACTOR, _MAX_BITS = math.pi / 6, 0.3, 0.45, 0.9, 4.0
# Maximum aspect ratio of the rectangle that `zoom` cuts out.
_MAX_RATIO = 4 / 3


@dataclass(frozen=True)
class AugmentConfig:
    """Random augmentation of training images."""

    flip: Fraction = 0.0
    """probability of a horizontal flip"""
    crop: Natural = 0
    """maximum translation in pixels, vertically and horizontally"""
    padding: Literal["reflect", "zero"] = "reflect"
    """pixels that a translation brings in: the mirrored image, or black ("zero")"""
    zoom: Annotated[float, Range(above=0, high=1)] = 1.0
    """minimum share of the area that is cut out and resized to the full image; 1: no zoom"""
    color: Fraction = 0.0
    """maximum relative change of brightness, contrast and saturation"""
    random_ops: Annotated[int, Range(low=0, high=100)] = 0
    """number of random operations per image (RandAugment: rotation, shear, translation and nine color operations)"""
    strength: Fraction = 0.5
    """maximum strength of the random operations, from 0 to 1"""
    cutout: Natural = 0
    """side of a square that is filled with gray, in pixels"""
    mixup: Annotated[float, Range(low=0, high=100)] = 0.0
    """mixup: parameter of the beta distribution of the mixing weight; two images and their labels are blended"""
    cutmix: Annotated[float, Range(low=0, high=100)] = 0.0
    """CutMix: the same for a rectangle of another image; if both are set, each image gets one of the two"""

    def __post_init__(self) -> None:
        check_ranges(self, "augment.")


class AugmentedBatch(NamedTuple):
    """A batch after augmentation."""

    pixels: Pixels
    targets: Float[Tensor, "B V"] | None
    masks: Masks | None


def one_hot_targets(labels: Int[Tensor, "B"], count: int, smoothing: float = 0.0) -> Float[Tensor, "B V"]:
    """One-hot targets with optional label smoothing; all zeros where the label is IGNORE_INDEX.

    >>> one_hot_targets(torch.tensor([1, IGNORE_INDEX]), 3)
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    one_hot = (labels[:, None] == torch.arange(count, device=labels.device)).float()
    return (one_hot * (1 - smoothing) + smoothing / count) * (labels != IGNORE_INDEX)[:, None]


@torch.no_grad()
def augment(
    pixels: Pixels, targets: Float[Tensor, "B V"] | None, config: AugmentConfig, masks: Masks | None = None
) -> AugmentedBatch:
    """Augment images with values from 0 to 1. Masks get the same geometric operations, targets are mixed like the
    images.

    Random numbers come from the default generator of the images' device. Mask pixels from outside of the image are
    IGNORE_INDEX, except with reflection. Mixup and CutMix mix each image with the previous one of the batch.

    >>> _ = torch.manual_seed(0)
    >>> image = torch.arange(4.0).view(1, 1, 1, 4) / 4
    >>> augment(image, None, AugmentConfig(flip=1.0)).pixels
    tensor([[[[0.7500, 0.5000, 0.2500, 0.0000]]]])
    """
    if config.mixup and (targets is None or masks is not None):
        raise RegardError("augment.mixup needs labels; masks cannot be blended.", "Set mixup to 0, or use cutmix.")
    if config.cutmix and targets is None and masks is None:
        raise RegardError("augment.cutmix needs labels or masks.", "Set cutmix to 0.")
    if config.crop >= min(pixels.shape[-2:]):
        height, width = pixels.shape[-2:]
        raise RegardError(
            f"augment.crop is {config.crop}; it must be smaller than the image ({width} x {height} pixels).",
            "Lower augment.crop.",
        )
    masks = None if masks is None else masks.long()
    if config.zoom < 1:
        pixels, masks = _random_zoom(pixels, masks, config.zoom)
    if config.flip or config.crop:
        pixels, masks = _random_flip_and_shift(pixels, masks, config)
    if config.color:
        for op in (ops.adjust_brightness, ops.adjust_contrast, ops.adjust_saturation):
            pixels = op(pixels, 1 + config.color * _uniform_signed(pixels, len(pixels)))
    for _ in range(config.random_ops):
        pixels, masks = _apply_random_op(pixels, masks, config.strength)
    if config.cutout:
        side = torch.full_like(pixels[:, 0, 0, 0], config.cutout)
        pixels = torch.where(_random_boxes(pixels, side, side), ops.FILL, pixels)
    if config.mixup or config.cutmix:
        pixels, targets, masks = _mix(pixels, targets, masks, config)
    return AugmentedBatch(pixels, targets, masks)


def _uniform(like: Tensor, count: int) -> Factor:
    return torch.rand(count, device=like.device)


def _uniform_signed(like: Tensor, count: int) -> Factor:
    return 2 * _uniform(like, count) - 1


def _random_zoom(pixels: Pixels, masks: Masks | None, min_area: float) -> tuple[Pixels, Masks | None]:
    """Random rectangle with at least this share of the area, resized to the full image (random resized crop)."""
    count = len(pixels)
    area = min_area + (1 - min_area) * _uniform(pixels, count)
    ratio = torch.exp(math.log(_MAX_RATIO) / 2 * _uniform_signed(pixels, count))
    height, width = (area.sqrt() * ratio).clamp(max=1), (area.sqrt() / ratio).clamp(max=1)
    y, x = (1 - height) * _uniform_signed(pixels, count), (1 - width) * _uniform_signed(pixels, count)
    zero = torch.zeros_like(x)
    return ops.warp(pixels, masks, _stack_matrix(width, zero, x, zero, height, y), fill_outside=False)


def _stack_matrix(*entries: Factor) -> Float[Tensor, "B 2 3"]:
    return torch.stack(entries, dim=-1).view(-1, 2, 3)


def _random_flip_and_shift(pixels: Pixels, masks: Masks | None, config: AugmentConfig) -> tuple[Pixels, Masks | None]:
    shape = (len(pixels),)
    down = torch.randint(-config.crop, config.crop + 1, shape, device=pixels.device)
    right = torch.randint(-config.crop, config.crop + 1, shape, device=pixels.device)
    flip = _uniform(pixels, len(pixels)) < config.flip
    return ops.flip_and_translate(pixels, masks, down, right, flip, config.padding)


# RandAugment. The affine operations come first and are computed by a single warp.
_AFFINE_OP_COUNT = 5


def _random_affine(pixels: Pixels, masks: Masks | None, strength: float) -> tuple[Pixels, Masks | None]:
    """Rotate, shear in x or y, translate in x or y: each applied to a fifth of the images, in this order."""
    share = len(pixels) // _AFFINE_OP_COUNT
    amount = strength * _uniform_signed(pixels, len(pixels))
    op_index = torch.arange(_AFFINE_OP_COUNT, device=pixels.device).repeat_interleave(share)
    angle, shear_x, shear_y, x, y = (amount * (op_index == i) for i in range(_AFFINE_OP_COUNT))
    angle = _MAX_ANGLE * angle
    cos, sin = angle.cos(), angle.sin()
    entries = (cos, _MAX_SHEAR * shear_x - sin, 2 * _MAX_SHIFT * x, sin + _MAX_SHEAR * shear_y, cos, 2 * _MAX_SHIFT * y)
    return ops.warp(pixels, masks, _stack_matrix(*entries), fill_outside=True)


def _random_factor(pixels: Pixels, strength: float) -> Factor:
    return 1 + _MAX_FACTOR * strength * _uniform_signed(pixels, len(pixels))


_COLOR_OPS = (
    lambda pixels, strength: pixels,
    lambda pixels, strength: ops.autocontrast(pixels),
    lambda pixels, strength: ops.equalize(pixels),
    lambda pixels, strength: ops.solarize(pixels, 256 / 255 * (1 - strength * _uniform(pixels, len(pixels)))),
    lambda pixels, strength: ops.posterize(pixels, (8 - _MAX_BITS * strength * _uniform(pixels, len(pixels))).round()),
    lambda pixels, strength: ops.adjust_brightness(pixels, _random_factor(pixels, strength)),
    lambda pixels, strength: ops.adjust_contrast(pixels, _random_factor(pixels, strength)),
    lambda pixels, strength: ops.adjust_saturation(pixels, _random_factor(pixels, strength)),
    lambda pixels, strength: ops.adjust_sharpness(pixels, _random_factor(pixels, strength)),
)


def _apply_random_op(pixels: Pixels, masks: Masks | None, strength: float) -> tuple[Pixels, Masks | None]:
    """Apply one random operation to each image.

    Every operation has the same number of slots, and the images are assigned to slots at random. So each operation is
    computed only for its own images, and their number is known in advance.
    """
    share = -(-len(pixels) // (_AFFINE_OP_COUNT + len(_COLOR_OPS)))
    slots = share * (_AFFINE_OP_COUNT + len(_COLOR_OPS))
    assigned = _uniform(pixels, slots).argsort()[: len(pixels)]
    pixels = pixels.new_zeros(slots, *pixels.shape[1:]).index_copy(0, assigned, pixels)
    if masks is not None:
        masks = masks.new_zeros(slots, *masks.shape[1:]).index_copy(0, assigned, masks)
    affine_slots = _AFFINE_OP_COUNT * share
    affine_masks = None if masks is None else masks[:affine_slots]
    warped, warped_masks = _random_affine(pixels[:affine_slots], affine_masks, strength)
    recolored = [op(part, strength) for op, part in zip(_COLOR_OPS, pixels[affine_slots:].split(share))]
    pixels = torch.cat([warped, *recolored])[assigned]
    if masks is not None and warped_masks is not None:
        masks = torch.cat([warped_masks, masks[affine_slots:]])[assigned]
    return pixels, masks


# Mixup and CutMix


def _random_boxes(pixels: Pixels, height: Factor, width: Factor) -> Tensor:
    """Rectangles with uniformly distributed centers."""
    y, x = _uniform(pixels, len(pixels)), _uniform(pixels, len(pixels))
    return ops.make_boxes((pixels.shape[2], pixels.shape[3]), y, x, height, width)


def _mix(
    pixels: Pixels, targets: Float[Tensor, "B V"] | None, masks: Masks | None, config: AugmentConfig
) -> AugmentedBatch:
    """Mix each image with the previous one. The weight of a target is the mean weight of its pixels."""
    count = len(pixels)
    cutmix_probability = 0.5 if config.mixup and config.cutmix else float(config.cutmix > 0)
    is_cutmix = _uniform(pixels, count) < cutmix_probability
    alpha = torch.where(is_cutmix, config.cutmix or 1.0, config.mixup or 1.0)
    weight = torch.distributions.Beta(alpha, alpha, validate_args=False).sample()
    side = (1 - weight).sqrt()
    box = _random_boxes(pixels, side * pixels.shape[2], side * pixels.shape[3])
    pixel_weight = torch.where(is_cutmix[:, None, None, None], 1 - box.float(), weight[:, None, None, None])
    pixels = pixel_weight * pixels + (1 - pixel_weight) * pixels.roll(1, 0)
    if targets is not None:
        target_weight = pixel_weight.expand(-1, 1, *pixels.shape[2:]).mean((1, 2, 3))[:, None]
        targets = target_weight * targets + (1 - target_weight) * targets.roll(1, 0)
    if masks is not None:
        masks = torch.where(box[:, 0], masks.roll(1, 0), masks)
    return AugmentedBatch(pixels, targets, masks)
