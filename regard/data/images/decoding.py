"""Decoding of single images with Pillow: safe opening, EXIF orientation, conversion to the target channels and size."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from regard.errors import RegardError
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


# File suffixes of images, and the Pillow decoders that are allowed; other decoders start external programs.
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Pillow modes of gray images, of any bit depth, with or without alpha.
_GRAY_MODES = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"))
# Transposition that makes an image of the given EXIF orientation upright.
_EXIF_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageHeader(NamedTuple):
    """Size and channels of an image, read without decoding it."""

    height: int
    width: int
    channels: int


class DecodedImage(NamedTuple):
    """A decoded image with its label and mask, if any."""

    pixels: UInt8[np.ndarray, "H W C"]
    label: str | None
    mask: UInt8[np.ndarray, "H W"] | None


class ResizeRule(NamedTuple):
    """Target size of images: a fixed size, or the image's own size rounded to multiples of a patch.

    >>> for fit in (ResizeRule((32, 32)), ResizeRule(patch=16), ResizeRule(patch=16, longest=64)):
    ...     print(fit.target_size(480, 650))
    (32, 32)
    (480, 656)
    (48, 64)
    """

    size: tuple[int, int] | None = None
    """height and width; None: the size of the image"""
    patch: int = 1
    """without a size: sides are multiples of this"""
    longest: int = 0
    """without a size: maximum side (at least one patch); 0: no limit"""

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        scale = min(1.0, self.longest / max(height, width)) if self.longest else 1.0
        max_patches = self.longest // self.patch if self.longest else max(height, width)

        def count_patches(side: int) -> int:
            return max(1, min(max_patches, round(side * scale / self.patch)))

        return count_patches(height) * self.patch, count_patches(width) * self.patch


@contextmanager
def image_errors(file: str | Path) -> Iterator[None]:
    """Convert all errors inside into RegardErrors that name the file."""
    try:
        yield
    except RegardError as error:
        raise RegardError(f"{file}: {error.message}", error.hint) from None
    except FileNotFoundError:
        raise RegardError(f"{file}: there is no such file.", "Fix the path or the link, or remove it.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large_error(file) from None
    except UnidentifiedImageError:  # its message only has the memory address of the stream
        hint = f"Replace or remove it. Supported formats: {', '.join(_FORMATS)}."
        raise RegardError(f"{file}: not a readable image.", hint) from None
    except Exception as error:  # decoders of corrupt data raise almost anything
        message = f"{file}: not a readable image ({str(error) or type(error).__name__})."
        raise RegardError(message, 'Replace or remove the file, or skip such files (on_bad = "skip").') from None


def _too_large_error(file: str | Path) -> RegardError:
    limit = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
    return RegardError(
        f"{file}: the image has more than {limit:.0f} million pixels and is not decoded.",
        "Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust the file.",
    )


@contextmanager
def open_header(stream: BinaryIO) -> Iterator[Image.Image]:
    """Open an image, reading only its header. Images too large to be decoded safely are refused.

    It is an open file, not a name: files that Pillow maps by name come out wrong if they have to be transposed.
    """
    with Image.open(stream, formats=_FORMATS) as image:
        # Pillow itself only warns up to twice this number.
        if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise Image.DecompressionBombError
        yield image


def _orientation(image: Image.Image) -> int:
    """EXIF orientation from the header. EXIF data after the pixels of a PNG is ignored: Pillow would decode all of it.

    Pillow transposes TIFF files itself.
    """
    if image.format == "TIFF" or {"exif", "xmp", "Raw profile type exif"}.isdisjoint(image.info):
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # invalid EXIF data does not make the image invalid
        return 1


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of the upright image."""
    return image.size if _orientation(image) in range(5, 9) else image.size[::-1]


def read_header(file: Path) -> ImageHeader:
    """Height, width and channels (1 or 3) of the upright image, without decoding it."""
    with open(file, "rb") as stream, open_header(stream) as image:
        return ImageHeader(*_upright_size(image), count_channels(image))


def count_channels(image: Image.Image) -> int:
    """1 for gray images, 3 for others; alpha does not count."""
    return 1 if image.mode in _GRAY_MODES else 3


def load_image(file: Path, fit: ResizeRule | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """Decode an image and make it upright, in its own mode; also returns its height and width.

    With `fit`, the image may be decoded at a reduced size if that is faster, but not below twice the target size.
    """
    with open(file, "rb") as stream, open_header(stream) as image:
        orientation, size = _orientation(image), _upright_size(image)
        if fit is not None:
            # JPEG can be decoded at a half, a quarter or an eighth of its size.
            min_side = 2 * max(fit.target_size(*size))
            image.draft(None, (min_side, min_side))
        image.load()
        return image.transpose(_EXIF_TRANSPOSE[orientation]) if orientation in _EXIF_TRANSPOSE else image.copy(), size


def to_pixel_array(image: Image.Image, channels: int, target: tuple[int, int] | Resizing) -> UInt8[np.ndarray, "H W C"]:
    """Convert an image to gray or RGB of the target height and width, or resized. Transparent areas become white."""
    image = _to_eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB" if channels == 3 else "L")
    if isinstance(target, Resizing):
        pixels = np.asarray(target.apply(image))
    else:
        pixels = np.asarray(_resize_and_crop(image, target, Image.Resampling.BICUBIC))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit gray images to 8 bits; Pillow would clip them."""
    if image.mode == "F":
        raise RegardError("floating-point images are not supported.", "Store it with 8 or 16 bits.")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise RegardError("gray values with more than 16 bits are not supported.", "Store it with 8 or 16 bits.")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def to_mask_array(image: Image.Image, target: tuple[int, int]) -> UInt8[np.ndarray, "H W"]:
    """Convert a mask to an array of class values: the stored gray values or palette indices, resized by nearest."""
    values = np.asarray(image)
    if image.mode == "RGB" and (values == values[..., :1]).all():
        values = values[..., 0]  # gray, stored as RGB
    elif image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        raise RegardError(
            f"a mask needs one class value per pixel, got colors ({image.mode}).",
            "Store class values as gray values or palette indices.",
        )
    if values.min() < 0 or values.max() > 255:
        raise RegardError("the mask has values above 255.", "Number the classes from 0 to 255.")
    gray = Image.fromarray(np.ascontiguousarray(values, np.uint8))
    return np.asarray(_resize_and_crop(gray, target, Image.Resampling.NEAREST))


def _resize_and_crop(image: Image.Image, target: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """Scale an image until it covers the target size, and crop the center."""
    height, width = target
    if (width, height) == image.size:
        return image
    scale = max(height / image.height, width / image.width)
    left, top = max(0.0, image.width - width / scale) / 2, max(0.0, image.height - height / scale) / 2
    return image.resize((width, height), resample, box=(left, top, image.width - left, image.height - top))


def decode_file(
    file: Path, mask: Path | None, channels: int, fit: ResizeRule
) -> tuple[UInt8[np.ndarray, "H W C"], UInt8[np.ndarray, "H W"] | None]:
    """Decode an image and its mask, which must have the same size."""
    with image_errors(file):
        image, size = load_image(file, fit)
        target = fit.target_size(*size)
        pixels = to_pixel_array(image, channels, target)
    if mask is None:
        return pixels, None
    with image_errors(mask):
        image, mask_size = load_image(mask)
        check_mask_size(mask_size, size, file)
        return pixels, to_mask_array(image, target)


def check_mask_size(mask_size: tuple[int, int], image_size: tuple[int, int], file: str | Path) -> None:
    """Raise an error if the height and width of a mask differ from those of its image."""
    if mask_size != image_size:
        raise RegardError(
            f"the mask has {mask_size[1]} x {mask_size[0]} pixels, "
            f"but its image {file} has {image_size[1]} x {image_size[0]}.",
            "A mask must have the size of its image.",
        )


def read_image(file: str | Path, channels: int = 3, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "H W C"]:
    """Read an image file, upright, with 3 channels or 1, resized and cropped to (height, width) if `size` is given.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (40, 20), 7).save(f"{folder}/gray.png")
    ...     read_image(f"{folder}/gray.png", size=(8, 8)).shape
    (8, 8, 3)
    """
    return decode_file(Path(file), None, channels, ResizeRule(size))[0]
