"""Resizing of images as an imported checkpoint defines it."""

from dataclasses import dataclass
from typing import Literal

from PIL import Image

from regard.ranges import ImageSide, check_ranges

Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""filters of Pillow, in the order of its constants"""


@dataclass(frozen=True)
class Resizing:
    """Resizing of an image, then center crop: the evaluation transform of a checkpoint.

    >>> Resizing(size=(8,), crop=(6, 6)).apply(Image.new("RGB", (20, 10))).size
    (6, 6)
    """

    size: tuple[ImageSide, ...] = ()
    """height and width to resize to, whatever the aspect ratio; a single value: of the shortest side; empty: none"""
    cover: bool = False
    """whether the aspect ratio is kept, and the image covers `size`"""
    resample: Resample = "bicubic"
    crop: tuple[ImageSide, ...] = ()
    """height and width of the center crop; empty: none"""
    rounding: Literal["down", "even"] = "down"
    """rounding of half pixels at the crop's left and top: down (transformers) or to even numbers (timm)"""

    def __post_init__(self) -> None:
        check_ranges(self, "resizing.")

    def apply(self, image: Image.Image) -> Image.Image:
        """The resized and cropped image; a crop beyond its borders is black."""
        size = self._resized_size(image.height, image.width)
        if size != (image.height, image.width):
            image = image.resize(size[::-1], Image.Resampling[self.resample.upper()])
        if not self.crop:
            return image
        top, left = (self._offset(side - crop) for side, crop in zip((image.height, image.width), self.crop))
        return image.crop((left, top, left + self.crop[1], top + self.crop[0]))

    def _resized_size(self, height: int, width: int) -> tuple[int, int]:
        if not self.size:
            return height, width
        if len(self.size) == 1:
            shortest, longest = min(height, width), max(height, width)
            other = int(self.size[0] * longest / shortest)
            return (self.size[0], other) if height <= width else (other, self.size[0])
        if not self.cover:
            return self.size[0], self.size[1]
        ratio = min(height / self.size[0], width / self.size[1])
        return round(height / ratio), round(width / ratio)

    def _offset(self, excess: int) -> int:
        if self.rounding == "down":
            return excess // 2
        return round(excess / 2) if excess >= 0 else -(-excess // 2)
