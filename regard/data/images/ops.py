"""Image operations on batches, with one parameter per image.

Images are (B, C, H, W) floats from 0 to 1 on any device; masks are (B, H, W) integers. The tests compare each operation
with a plain implementation for single images.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.data.batching.batch import IGNORE_INDEX

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
