"""Pictures changed at random while a model learns from them: whole batches at once, on the device where they are.

No number goes to Python and back, and all randomness is torch's own: a captured graph draws anew with each replay.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.batching.pair_batches import IGNORED
from regard.data.images import image_ops as ops
from regard.data.images.image_ops import Factor, Masks, Pixels
from regard.errors import RegardError
from regard.ranges import Natural, NonNegative, Range, Share, check_ranges

# What the strongest of the random operations do: turn by these radians, slant by this, move by this share of a side,
# change brightness, contrast, saturation and sharpness by this factor, take away so many bits (Cubuk et al. 2020).
_ANGLE, _SHEAR, _SHIFT, _FACTOR, _BITS = math.pi / 6, 0.3, 0.45, 0.9, 4.0
# Width to height, at most, of what `zoom` cuts out.
_RATIO = 4 / 3


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to each picture, at random, before a model learns from it."""

    flip: Share = 0.0
    """the probability that it is mirrored, left to right"""
    crop: Natural = 0
    """pixels by which it is moved at most, up or down and left or right"""
    padding: Literal["reflect", "zero"] = "reflect"
    """what comes in from outside when it is moved: the picture's own mirror image, or black"""
    zoom: Annotated[float, Range(above=0, high=1)] = 1.0
    """the smallest share of its area that is cut out and enlarged; 1: always all of it"""
    colour: Share = 0.0
    """the share by which brightness, contrast and saturation change at most"""
    random_ops: Annotated[int, Range(low=0, high=100)] = 0
    """how many operations are drawn for it (RandAugment: turning, slanting, moving, changing colours in nine ways)"""
    strength: Share = 0.5
    """how strong these are at most, from 0 to 1"""
    cutout: Natural = 0
    """the side of a square that is painted over, in pixels"""
    mixup: NonNegative = 0.0
    """two pictures are blended, and so are their labels; the parameter of the beta distribution of their shares"""
    cutmix: NonNegative = 0.0
    """a rectangle of one picture is put into another, likewise; with both, each picture has one or the other"""

    def __post_init__(self) -> None:
        check_ranges(self, "augment.")


class Augmented(NamedTuple):
    """A batch after augmentation."""

    pixels: Pixels
    targets: Float[Tensor, "B V"] | None
    masks: Masks | None


def soft_targets(labels: Int[Tensor, "B"], count: int, smoothing: float = 0.0) -> Float[Tensor, "B V"]:
    """The probability that each label should have: 1 for the right one, less and more with smoothing.

    Where a label is IGNORED, all are 0.

    >>> soft_targets(torch.tensor([1, IGNORED]), 3)
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    right = (labels[:, None] == torch.arange(count, device=labels.device)).float()
    return (right * (1 - smoothing) + smoothing / count) * (labels != IGNORED)[:, None]


@torch.no_grad()
def augment(
    pixels: Pixels, targets: Float[Tensor, "B V"] | None, config: AugmentConfig, masks: Masks | None = None
) -> Augmented:
    """Pictures from 0 to 1, changed at random; masks are moved with them; targets are mixed as the pictures are.

    Random numbers come from the default generator of the pictures' device. What comes in from outside is IGNORED in
    masks, but for a mirror image. Mixup and cutmix mix each picture with the one before it.

    >>> _ = torch.manual_seed(0)
    >>> picture = torch.arange(4.0).view(1, 1, 1, 4) / 4
    >>> augment(picture, None, AugmentConfig(flip=1.0)).pixels
    tensor([[[[0.7500, 0.5000, 0.2500, 0.0000]]]])
    """
    if config.mixup and (targets is None or masks is not None):
        raise RegardError("Mixup blends labels, and masks have none to blend.", "Set mixup to 0, or take cutmix.")
    if config.cutmix and targets is None and masks is None:
        raise RegardError("Cutmix mixes labels or masks, and there are none.", "Set cutmix to 0.")
    if config.crop >= min(pixels.shape[-2:]):
        raise RegardError(f"crop = {config.crop} moves whole pictures away.", "Take less than their height and width.")
    masks = None if masks is None else masks.long()
    if config.zoom < 1:
        pixels, masks = _zoomed(pixels, masks, config.zoom)
    if config.flip or config.crop:
        pixels, masks = _moved(pixels, masks, config)
    if config.colour:
        for op in (ops.brightness, ops.contrast, ops.saturation):
            pixels = op(pixels, 1 + config.colour * _signed(pixels, len(pixels)))
    for _ in range(config.random_ops):
        pixels, masks = _one_of_many(pixels, masks, config.strength)
    if config.cutout:
        side = torch.full_like(pixels[:, 0, 0, 0], config.cutout)
        pixels = torch.where(_anywhere(pixels, side, side), ops.FILL, pixels)
    if config.mixup or config.cutmix:
        pixels, targets, masks = _mixed(pixels, targets, masks, config)
    return Augmented(pixels, targets, masks)


def _uniform(like: Tensor, count: int) -> Factor:
    return torch.rand(count, device=like.device)


def _signed(like: Tensor, count: int) -> Factor:
    return 2 * _uniform(like, count) - 1


def _zoomed(pixels: Pixels, masks: Masks | None, least: float) -> tuple[Pixels, Masks | None]:
    """Any rectangle of the picture that has at least this share of its area, enlarged to fill it."""
    count = len(pixels)
    area = least + (1 - least) * _uniform(pixels, count)
    ratio = torch.exp(math.log(_RATIO) / 2 * _signed(pixels, count))
    height, width = (area.sqrt() * ratio).clamp(max=1), (area.sqrt() / ratio).clamp(max=1)
    y, x = (1 - height) * _signed(pixels, count), (1 - width) * _signed(pixels, count)
    zero = torch.zeros_like(x)
    return ops.warped(pixels, masks, _matrix(width, zero, x, zero, height, y), outside=False)


def _matrix(*entries: Factor) -> Float[Tensor, "B 2 3"]:
    return torch.stack(entries, dim=-1).view(-1, 2, 3)


def _moved(pixels: Pixels, masks: Masks | None, config: AugmentConfig) -> tuple[Pixels, Masks | None]:
    shape = (len(pixels),)
    down = torch.randint(-config.crop, config.crop + 1, shape, device=pixels.device)
    right = torch.randint(-config.crop, config.crop + 1, shape, device=pixels.device)
    mirrored = _uniform(pixels, len(pixels)) < config.flip
    return ops.moved(pixels, masks, down, right, mirrored, config.padding)


# The random operations of RandAugment. The five that move pixels come first, and are one.
_MOVING = 5


def _warped(pixels: Pixels, masks: Masks | None, strength: float) -> tuple[Pixels, Masks | None]:
    """Turned, slanted one way or the other, moved one way or the other: a fifth of the pictures each, in this order."""
    share = len(pixels) // _MOVING
    amount = strength * _signed(pixels, len(pixels))
    which = torch.arange(_MOVING, device=pixels.device).repeat_interleave(share)
    angle, slant_x, slant_y, x, y = (amount * (which == i) for i in range(_MOVING))
    angle = _ANGLE * angle
    cosine, sine = angle.cos(), angle.sin()
    rows = (cosine, _SHEAR * slant_x - sine, 2 * _SHIFT * x, sine + _SHEAR * slant_y, cosine, 2 * _SHIFT * y)
    return ops.warped(pixels, masks, _matrix(*rows), outside=True)


def _factor(pixels: Pixels, strength: float) -> Factor:
    return 1 + _FACTOR * strength * _signed(pixels, len(pixels))


_COLOURING = (
    lambda pixels, strength: pixels,
    lambda pixels, strength: ops.autocontrast(pixels),
    lambda pixels, strength: ops.equalize(pixels),
    lambda pixels, strength: ops.solarize(pixels, 256 / 255 * (1 - strength * _uniform(pixels, len(pixels)))),
    lambda pixels, strength: ops.posterize(pixels, (8 - _BITS * strength * _uniform(pixels, len(pixels))).round()),
    lambda pixels, strength: ops.brightness(pixels, _factor(pixels, strength)),
    lambda pixels, strength: ops.contrast(pixels, _factor(pixels, strength)),
    lambda pixels, strength: ops.saturation(pixels, _factor(pixels, strength)),
    lambda pixels, strength: ops.sharpness(pixels, _factor(pixels, strength)),
)


def _one_of_many(pixels: Pixels, masks: Masks | None, strength: float) -> tuple[Pixels, Masks | None]:
    """One of the operations for each picture.

    Every operation has the same number of places, and the pictures are dealt out to the places at random: so each
    operation works on its own few alone, and the number of these is known beforehand.
    """
    share = -(-len(pixels) // (_MOVING + len(_COLOURING)))
    places = share * (_MOVING + len(_COLOURING))
    dealt = _uniform(pixels, places).argsort()[: len(pixels)]
    pixels = pixels.new_zeros(places, *pixels.shape[1:]).index_copy(0, dealt, pixels)
    if masks is not None:
        masks = masks.new_zeros(places, *masks.shape[1:]).index_copy(0, dealt, masks)
    moving = _MOVING * share
    first, first_masks = _warped(pixels[:moving], None if masks is None else masks[:moving], strength)
    others = [op(part, strength) for op, part in zip(_COLOURING, pixels[moving:].split(share))]
    pixels = torch.cat([first, *others])[dealt]
    if masks is not None and first_masks is not None:
        masks = torch.cat([first_masks, masks[moving:]])[dealt]
    return pixels, masks


# Two pictures in one


def _anywhere(pixels: Pixels, height: Factor, width: Factor) -> Tensor:
    """Rectangles whose middles lie anywhere in the picture."""
    y, x = _uniform(pixels, len(pixels)), _uniform(pixels, len(pixels))
    return ops.boxes((pixels.shape[2], pixels.shape[3]), y, x, height, width)


def _mixed(
    pixels: Pixels, targets: Float[Tensor, "B V"] | None, masks: Masks | None, config: AugmentConfig
) -> Augmented:
    """Of each picture what its share says, of the one before it the rest; a target's share is that of its pixels."""
    count = len(pixels)
    choice = 0.5 if config.mixup and config.cutmix else float(config.cutmix > 0)
    cut = _uniform(pixels, count) < choice
    parameter = torch.where(cut, config.cutmix or 1.0, config.mixup or 1.0)
    share = torch.distributions.Beta(parameter, parameter, validate_args=False).sample()
    side = (1 - share).sqrt()
    box = _anywhere(pixels, side * pixels.shape[2], side * pixels.shape[3])
    own = torch.where(cut[:, None, None, None], 1 - box.float(), share[:, None, None, None])
    pixels = own * pixels + (1 - own) * pixels.roll(1, 0)
    if targets is not None:
        part = own.expand(-1, 1, *pixels.shape[2:]).mean((1, 2, 3))[:, None]
        targets = part * targets + (1 - part) * targets.roll(1, 0)
    if masks is not None:
        masks = torch.where(box[:, 0], masks.roll(1, 0), masks)
    return Augmented(pixels, targets, masks)
