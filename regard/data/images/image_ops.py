"""What can be done to pictures: to a whole batch at once, to each picture by a number of its own.

Pictures are (B, C, H, W) from 0 to 1, on any device; masks (B, H, W) are whole numbers. In the tests each of these has
its plain twin, which takes one picture at a time.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.data.batching.pair_batches import IGNORED

# What is seen where nothing is: the middle between black and white.
FILL = 0.5

Pixels = Float[Tensor, "B C H W"]
Masks = Int[Tensor, "B H W"]
Factor = Float[Tensor, "B"]


def _each(numbers: Float[Tensor, "B"]) -> Float[Tensor, "B 1 1 1"]:
    return numbers[:, None, None, None]


# Where pixels are


def moved(
    pixels: Pixels,
    masks: Masks | None,
    down: Int[Tensor, "B"],
    right: Int[Tensor, "B"],
    mirrored: Bool[Tensor, "B"],
    padding: Literal["reflect", "zero"],
) -> tuple[Pixels, Masks | None]:
    """Mirrored from left to right or not, then moved by whole pixels, fewer than the sides have."""
    count, channels, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device) - down[:, None]
    columns = torch.arange(width, device=pixels.device) - right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    rows, columns = _reflected(rows, height), _reflected(columns, width)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    batch = torch.arange(count, device=pixels.device)[:, None, None]
    rows, columns = rows[:, :, None], columns[:, None, :]
    channel = torch.arange(channels, device=pixels.device)[:, None, None]
    pixels = pixels[batch[:, None], channel, rows[:, None], columns[:, None]]
    masks = None if masks is None else masks[batch, rows, columns]
    if padding == "zero":
        pixels = pixels * inside[:, None]
        masks = None if masks is None else torch.where(inside, masks, IGNORED)
    return pixels, masks


def _reflected(places: Int[Tensor, "B n"], size: int) -> Int[Tensor, "B n"]:
    """Places outside of 0 … size - 1 as their images in a mirror at the first or the last."""
    last = size - 1
    return (last - (last - places.abs()).abs()).clamp(0, last)


def warped(
    pixels: Pixels, masks: Masks | None, matrix: Float[Tensor, "B 2 3"], outside: bool
) -> tuple[Pixels, Masks | None]:
    """Each pixel from where the matrix leads it: pixels bilinearly, masks from the nearest.

    The matrix takes (x, y, 1), counted in half heights and widths from the middle, and its 2 x 2 part is of pixels: a
    rotation stays one when the picture is not square. What lies outside is FILL, and IGNORED in masks; without
    `outside`, it is what lies nearest to it.
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
    around = "zeros" if outside else "border"
    found = F.grid_sample(pixels - FILL, grid, "bilinear", around, align_corners=False) + FILL
    if masks is None:
        return found, None
    moved_masks = F.grid_sample((masks - IGNORED)[:, None].float(), grid, "nearest", around, align_corners=False)
    return found, moved_masks[:, 0].to(masks.dtype) + IGNORED


def boxes(
    shape: tuple[int, int], y: Float[Tensor, "B"], x: Float[Tensor, "B"], height: Factor, width: Factor
) -> Bool[Tensor, "B 1 H W"]:
    """Rectangles around (y, x), from 0 to 1 of the picture; sides in pixels; what is outside is cut off."""
    rows, columns = (torch.arange(side, device=y.device) + 0.5 for side in shape)
    tall = (rows - (y * shape[0])[:, None]).abs() < (height / 2)[:, None]
    wide = (columns - (x * shape[1])[:, None]).abs() < (width / 2)[:, None]
    return (tall[:, :, None] & wide[:, None, :])[:, None]


# What colours they have


def blended(pixels: Pixels, base: Float[Tensor, "B c h w"], factor: Factor) -> Pixels:
    """From the base (factor 0) through the picture itself (1) and beyond."""
    return (base + _each(factor) * (pixels - base)).clamp(0, 1)


def grey(pixels: Pixels) -> Float[Tensor, "B 1 H W"]:
    """How light pixels are to the eye."""
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    return 0.299 * pixels[:, 0:1] + 0.587 * pixels[:, 1:2] + 0.114 * pixels[:, 2:3]


def brightness(pixels: Pixels, factor: Factor) -> Pixels:
    return blended(pixels, torch.zeros_like(pixels[:, :1, :1, :1]), factor)


def contrast(pixels: Pixels, factor: Factor) -> Pixels:
    return blended(pixels, grey(pixels).mean((2, 3), keepdim=True), factor)


def saturation(pixels: Pixels, factor: Factor) -> Pixels:
    return blended(pixels, grey(pixels), factor)


def sharpness(pixels: Pixels, factor: Factor) -> Pixels:
    """Blurred or sharpened: the base weighs each pixel 5, and each of its eight neighbours 1."""
    nine = 9 * F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), "replicate"), 3, stride=1)
    return blended(pixels, (nine + 4 * pixels) / 13, factor)


def posterize(pixels: Pixels, bits: Float[Tensor, "B"]) -> Pixels:
    """Only the highest bits of each number are kept."""
    step = _each(torch.exp2(8 - bits))
    return _bytes(pixels).div(step, rounding_mode="floor") * step / 255


def solarize(pixels: Pixels, threshold: Float[Tensor, "B"]) -> Pixels:
    """What is as light as the threshold, or lighter, is inverted."""
    return torch.where(pixels < _each(threshold), pixels, 1 - pixels)


def autocontrast(pixels: Pixels) -> Pixels:
    """Each channel stretched until it reaches from 0 to 1."""
    least, most = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return torch.where(most > least, (pixels - least) / (most - least).clamp(min=1e-6), pixels)


def equalize(pixels: Pixels) -> Pixels:
    """Each channel's 256 values spread so that all of them are about as frequent."""
    values = _bytes(pixels).flatten(2).contiguous()
    every = torch.arange(256.0, device=pixels.device).expand(*values.shape[:2], 256).contiguous()
    # Sorted, so that the lesser ones can be counted without a histogram, whose sums a GPU makes in any order.
    less = torch.searchsorted(values.sort(dim=-1).values, every)
    most = (values == values.amax(-1, keepdim=True)).sum(-1, keepdim=True)
    step = (values.shape[-1] - most) // 255
    table = ((step // 2 + less) // step.clamp(min=1)).clamp(max=255)
    spread = torch.where(step > 0, table.gather(-1, values.long()).to(pixels.dtype), values)
    return (spread / 255).view(pixels.shape)


def _bytes(pixels: Pixels) -> Pixels:
    """The whole number from 0 to 255 that each pixel would be stored as."""
    return (pixels * 255).round()
