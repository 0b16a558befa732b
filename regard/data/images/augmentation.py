"""Random augmentation of training images: entire batches at once, on their device.

Images are (B, C, H, W) floats from 0 to 1, masks (B, H, W) integers; each operation has one parameter per image.
Nothing is synchronized with the host, and all randomness comes from torch, so a replayed CUDA graph samples anew.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.data.batching.batch import IGNORE_INDEX
from regard.errors import RegardError
from regard.ranges import Fraction, Natural, Range, check_ranges

# Value of pixels outside of the image: mid-gray.
FILL = 0.5

Pixels = Float[Tensor, "B C H W"]
Masks = Int[Tensor, "B H W"]
Factor = Float[Tensor, "B"]


def _per_image(values: Float[Tensor, "B"]) -> Float[Tensor, "B 1 1 1"]:
    return values[:, None, None, None]


# Geometric operations


def flip_and_translate(
    pixels: Pixels,
    masks: Masks | None,
    down: Int[Tensor, "B"],
    right: Int[Tensor, "B"],
    flip: Bool[Tensor, "B"],
    padding: Literal["reflect", "zero"],
) -> tuple[Pixels, Masks | None]:
    """Flip horizontally where `flip` is True, then translate by whole pixels, by less than the height and width."""
    count, channels, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device) - down[:, None]
    columns = torch.arange(width, device=pixels.device) - right[:, None]
    is_inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    rows, columns = _reflect(rows, height), _reflect(columns, width)
    columns = torch.where(flip[:, None], width - 1 - columns, columns)
    batch = torch.arange(count, device=pixels.device)[:, None, None]
    rows, columns = rows[:, :, None], columns[:, None, :]
    channel = torch.arange(channels, device=pixels.device)[:, None, None]
    pixels = pixels[batch[:, None], channel, rows[:, None], columns[:, None]]
    masks = None if masks is None else masks[batch, rows, columns]
    if padding == "zero":
        pixels = pixels * is_inside[:, None]
        masks = None if masks is None else torch.where(is_inside, masks, IGNORE_INDEX)
    return pixels, masks


def _reflect(indices: Int[Tensor, "B n"], size: int) -> Int[Tensor, "B n"]:
    """Reflect indices outside of 0 … size - 1 at the first or last index."""
    last = size - 1
    return (last - (last - indices.abs()).abs()).clamp(0, last)


def warp(
    pixels: Pixels, masks: Masks | None, matrix: Float[Tensor, "B 2 3"], fill_outside: bool
) -> tuple[Pixels, Masks | None]:
    """Affine warp: each output pixel is sampled at the position given by the matrix, bilinearly; masks by nearest.

    The matrix maps (x, y, 1), in units of half the width and height from the center. Its 2 x 2 part is in pixels, so
    that a rotation remains one if the image is not square. Positions outside of the image have the value FILL
    (IGNORE_INDEX in masks) or, without `fill_outside`, that of the nearest pixel.
    """
    height, width = pixels.shape[-2:]
    y = ((torch.arange(height, device=pixels.device) + 0.5) * 2 / height - 1)[:, None]
    x = (torch.arange(width, device=pixels.device) + 0.5) * 2 / width - 1
    m = matrix[:, :, :, None, None]
    grid = torch.stack(
        [
            m[:, 0, 0] * x + m[:, 0, 1] * (height / width) * y + m[:, 0, 2],
            m[:, 1, 0] * (width / height) * x + m[:, 1, 1] * y + m[:, 1, 2],
        ],
        dim=-1,
    )
    padding = "zeros" if fill_outside else "border"
    warped = F.grid_sample(pixels - FILL, grid, "bilinear", padding, align_corners=False) + FILL
    if masks is None:
        return warped, None
    warped_masks = F.grid_sample((masks - IGNORE_INDEX)[:, None].float(), grid, "nearest", padding, align_corners=False)
    return warped, warped_masks[:, 0].to(masks.dtype) + IGNORE_INDEX


def make_boxes(
    shape: tuple[int, int], y: Float[Tensor, "B"], x: Float[Tensor, "B"], height: Factor, width: Factor
) -> Bool[Tensor, "B 1 H W"]:
    """Rectangles as masks: centers (y, x) as fractions of the image, sides in pixels, clipped at the border."""
    rows, columns = (torch.arange(side, device=y.device) + 0.5 for side in shape)
    in_rows = (rows - (y * shape[0])[:, None]).abs() < (height / 2)[:, None]
    in_columns = (columns - (x * shape[1])[:, None]).abs() < (width / 2)[:, None]
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


# Color operations


def blend(pixels: Pixels, base: Float[Tensor, "B c h w"], factor: Factor) -> Pixels:
    """Interpolate from the base (factor 0) to the image (factor 1), or extrapolate beyond."""
    return (base + _per_image(factor) * (pixels - base)).clamp(0, 1)


def to_gray(pixels: Pixels) -> Float[Tensor, "B 1 H W"]:
    """Luma of RGB images (ITU-R BT.601); mean of the channels otherwise."""
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    return 0.299 * pixels[:, 0:1] + 0.587 * pixels[:, 1:2] + 0.114 * pixels[:, 2:3]


def adjust_brightness(pixels: Pixels, factor: Factor) -> Pixels:
    return blend(pixels, torch.zeros_like(pixels[:, :1, :1, :1]), factor)


def adjust_contrast(pixels: Pixels, factor: Factor) -> Pixels:
    return blend(pixels, to_gray(pixels).mean((2, 3), keepdim=True), factor)


def adjust_saturation(pixels: Pixels, factor: Factor) -> Pixels:
    return blend(pixels, to_gray(pixels), factor)


def adjust_sharpness(pixels: Pixels, factor: Factor) -> Pixels:
    """Blur or sharpen. The base weights each pixel 5 and each of its eight neighbors 1."""
    neighborhood = 9 * F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), "replicate"), 3, stride=1)
    return blend(pixels, (neighborhood + 4 * pixels) / 13, factor)


def posterize(pixels: Pixels, bits: Float[Tensor, "B"]) -> Pixels:
    """Keep only the highest bits of each value."""
    step = _per_image(torch.exp2(8 - bits))
    return _to_bytes(pixels).div(step, rounding_mode="floor") * step / 255


def solarize(pixels: Pixels, threshold: Float[Tensor, "B"]) -> Pixels:
    """Invert all values at or above the threshold."""
    return torch.where(pixels < _per_image(threshold), pixels, 1 - pixels)


def autocontrast(pixels: Pixels) -> Pixels:
    """Stretch each channel to the full range from 0 to 1."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return torch.where(high > low, (pixels - low) / (high - low).clamp(min=1e-6), pixels)


def equalize(pixels: Pixels) -> Pixels:
    """Equalize the histogram of each channel."""
    values = _to_bytes(pixels).flatten(2).contiguous()
    levels = torch.arange(256.0, device=pixels.device).expand(*values.shape[:2], 256).contiguous()
    # Sorting gives the cumulative counts deterministically; histograms on a GPU add in a nondeterministic order.
    below = torch.searchsorted(values.sort(dim=-1).values, levels)
    highest = (values == values.amax(-1, keepdim=True)).sum(-1, keepdim=True)
    step = (values.shape[-1] - highest) // 255
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    equalized = torch.where(step > 0, table.gather(-1, values.long()).to(pixels.dtype), values)
    return (equalized / 255).view(pixels.shape)


def _to_bytes(pixels: Pixels) -> Pixels:
    """Round to the integers from 0 to 255 as which pixels are stored."""
    return (pixels * 255).round()


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


def one_hot_targets(labels: Int[Tensor, "B"], count: int) -> Float[Tensor, "B V"]:
    """One-hot targets; all zeros where the label is IGNORE_INDEX.

    >>> one_hot_targets(torch.tensor([1, IGNORE_INDEX]), 3)
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    return (labels[:, None] == torch.arange(count, device=labels.device)).float()


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
        for op in (adjust_brightness, adjust_contrast, adjust_saturation):
            pixels = op(pixels, 1 + config.color * _uniform_signed(pixels, len(pixels)))
    for _ in range(config.random_ops):
        pixels, masks = _apply_random_op(pixels, masks, config.strength)
    if config.cutout:
        side = torch.full_like(pixels[:, 0, 0, 0], config.cutout)
        pixels = torch.where(_random_boxes(pixels, side, side), FILL, pixels)
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
    return warp(pixels, masks, _stack_matrix(width, zero, x, zero, height, y), fill_outside=False)


def _stack_matrix(*entries: Factor) -> Float[Tensor, "B 2 3"]:
    return torch.stack(entries, dim=-1).view(-1, 2, 3)


def _random_flip_and_shift(pixels: Pixels, masks: Masks | None, config: AugmentConfig) -> tuple[Pixels, Masks | None]:
    shape = (len(pixels),)
    down = torch.randint(-config.crop, config.crop + 1, shape, device=pixels.device)
    right = torch.randint(-config.crop, config.crop + 1, shape, device=pixels.device)
    flip = _uniform(pixels, len(pixels)) < config.flip
    return flip_and_translate(pixels, masks, down, right, flip, config.padding)


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
    return warp(pixels, masks, _stack_matrix(*entries), fill_outside=True)


def _random_factor(pixels: Pixels, strength: float) -> Factor:
    return 1 + _MAX_FACTOR * strength * _uniform_signed(pixels, len(pixels))


_COLOR_OPS = (
    lambda pixels, strength: pixels,
    lambda pixels, strength: autocontrast(pixels),
    lambda pixels, strength: equalize(pixels),
    lambda pixels, strength: solarize(pixels, 256 / 255 * (1 - strength * _uniform(pixels, len(pixels)))),
    lambda pixels, strength: posterize(pixels, (8 - _MAX_BITS * strength * _uniform(pixels, len(pixels))).round()),
    lambda pixels, strength: adjust_brightness(pixels, _random_factor(pixels, strength)),
    lambda pixels, strength: adjust_contrast(pixels, _random_factor(pixels, strength)),
    lambda pixels, strength: adjust_saturation(pixels, _random_factor(pixels, strength)),
    lambda pixels, strength: adjust_sharpness(pixels, _random_factor(pixels, strength)),
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
    return make_boxes((pixels.shape[2], pixels.shape[3]), y, x, height, width)


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
