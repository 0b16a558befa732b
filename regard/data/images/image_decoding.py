"""Single pictures through Pillow: opened with care, turned upright, brought to the wanted channels and size."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from regard.errors import RegardError

# What is taken for a picture in a folder, and the decoders that may look at one: others of Pillow's start programs.
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Modes of Pillow in which a picture is grey, however many bits and with alpha or not.
_GREY = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"))
# What has to be done to a picture whose EXIF orientation is this.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Header(NamedTuple):
    """What a file says of its picture before it is decoded."""

    height: int
    width: int
    channels: int


class Decoded(NamedTuple):
    """One picture, as it will be learned from."""

    pixels: UInt8[np.ndarray, "H W C"]
    label: str | None
    mask: UInt8[np.ndarray, "H W"] | None


class Fit(NamedTuple):
    """The size that a picture is brought to: a given one, or one of whole patches near its own.

    >>> Fit((32, 32)).target(480, 640), Fit(patch=16).target(100, 75), Fit(patch=16, longest=64).target(480, 640)
    ((32, 32), (96, 80), (48, 64))
    """

    size: tuple[int, int] | None = None
    """height and width; None: as the file has them"""
    patch: int = 1
    """without a size: sides are multiples of this"""
    longest: int = 0
    """without a size: no side is longer than this, or than one patch; 0: no limit"""

    def target(self, height: int, width: int) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        scale = min(1.0, self.longest / max(height, width)) if self.longest else 1.0
        most = self.longest // self.patch if self.longest else max(height, width)

        def patches(side: int) -> int:
            return max(1, min(most, round(side * scale / self.patch)))

        return patches(height) * self.patch, patches(width) * self.patch


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Whatever goes wrong inside is an error that names the file."""
    try:
        yield
    except RegardError as error:
        raise RegardError(f"{file}: {error.message}", error.hint) from None
    except FileNotFoundError:
        raise RegardError(f"{file}: there is no such file.", "Mend the path or the link, or leave it out.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(file) from None
    except UnidentifiedImageError:  # which tells only where in memory the file is
        hint = f"Replace or remove it; {', '.join(_FORMATS)} are read."
        raise RegardError(f"{file}: not a picture that can be read.", hint) from None
    except Exception as error:  # decoders of broken data raise nearly everything
        message = f"{file}: not a picture that can be read ({str(error) or type(error).__name__})."
        raise RegardError(message, "Replace or remove the file, or have such files skipped.") from None


def _too_large(file: str | Path) -> RegardError:
    most = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
    return RegardError(
        f"{file}: the picture has more than {most:.0f} million pixels, and is not decoded.",
        "Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it.",
    )


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """A picture of which only the header is read. One that is too large to be decoded safely is refused."""
    # An open file, not its name: files that Pillow maps by their name come out wrong where they have to be turned.
    with open(file, "rb") as stream, Image.open(stream, formats=_FORMATS) as image:
        # Pillow itself only warns until twice this number.
        if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise Image.DecompressionBombError
        yield image


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, as far as the header tells it: Pillow would decode a whole PNG to look behind its pixels.

    TIFF files are turned by Pillow.
    """
    if image.format == "TIFF" or {"exif", "xmp", "Raw profile type exif"}.isdisjoint(image.info):
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF does not make a broken picture
        return 1


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width once the picture is turned."""
    return image.size if _orientation(image) in range(5, 9) else image.size[::-1]


def header(file: Path) -> Header:
    """Height, width and channels (1 or 3) of a file's picture, upright; nothing is decoded."""
    with _opened(file) as image:
        return Header(*_upright_size(image), channels_of(image))


def channels_of(image: Image.Image) -> int:
    """1 for grey pictures, 3 for others; alpha is not counted."""
    return 1 if image.mode in _GREY else 3


def load(file: Path, fit: Fit | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """The picture of a file, decoded and upright, in whatever mode it has; and its height and width.

    With `fit` it may come smaller than it is, where that is quicker, but not below twice of what is wanted.
    """
    with _opened(file) as image:
        orientation, size = _orientation(image), _upright_size(image)
        if fit is not None:
            # JPEG can be decoded at a half, a quarter or an eighth of its size.
            most = 2 * max(fit.target(*size))
            image.draft(None, (most, most))
        image.load()
        return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image.copy(), size


def pixels_of(image: Image.Image, channels: int, target: tuple[int, int]) -> UInt8[np.ndarray, "H W C"]:
    """A picture as numbers: grey or RGB, of the height and width that are wanted. What is transparent shows white."""
    image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB" if channels == 3 else "L")
    found = np.asarray(_fitted(image, target, Image.Resampling.BICUBIC))
    return found if found.ndim == 3 else found[..., None]


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which Pillow would clip instead of scale, as grey of 8."""
    if image.mode == "F":
        raise RegardError("its values are fractions.", "Store it with 8 or 16 bits.")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise RegardError("its grey values have more than 16 bits.", "Store it with 8 or 16 bits.")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def mask_of(image: Image.Image, target: tuple[int, int]) -> UInt8[np.ndarray, "H W"]:
    """A mask as numbers, one class a pixel: grey values or palette numbers as they are stored, nearest when resized."""
    values = np.asarray(image)
    if image.mode == "RGB" and (values == values[..., :1]).all():
        values = values[..., 0]  # grey after all
    elif image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        raise RegardError(
            f"a mask holds one number a pixel, and this one colours ({image.mode}).",
            "Store the number of each pixel's class, as grey or with a palette.",
        )
    if values.min() < 0 or values.max() > 255:
        raise RegardError("the mask has numbers above 255.", "Number the classes from 0 to 255.")
    grey = Image.fromarray(np.ascontiguousarray(values, np.uint8))
    return np.asarray(_fitted(grey, target, Image.Resampling.NEAREST))


def _fitted(image: Image.Image, target: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """The picture scaled until it covers the target, and the middle of it cut out."""
    height, width = target
    if (width, height) == image.size:
        return image
    scale = max(height / image.height, width / image.width)
    left, top = max(0.0, image.width - width / scale) / 2, max(0.0, image.height - height / scale) / 2
    return image.resize((width, height), resample, box=(left, top, image.width - left, image.height - top))


def decode(
    file: Path, mask: Path | None, channels: int, fit: Fit
) -> tuple[UInt8[np.ndarray, "H W C"], UInt8[np.ndarray, "H W"] | None]:
    """The pixels of a file's picture, and those of its mask, which must have as many."""
    with naming(file):
        image, size = load(file, fit)
        target = fit.target(*size)
        pixels = pixels_of(image, channels, target)
    if mask is None:
        return pixels, None
    with naming(mask):
        image, own = load(mask)
        same_size(own, size, file)
        return pixels, mask_of(image, target)


def same_size(mask: tuple[int, int], picture: tuple[int, int], file: str | Path) -> None:
    """Refuses a mask whose height and width are not the picture's."""
    if mask != picture:
        raise RegardError(
            f"the mask has {mask[1]} x {mask[0]} pixels, but its picture {file} has {picture[1]} x {picture[0]}.",
            "Each pixel of the picture needs its own in the mask.",
        )


def read_image(file: str | Path, channels: int = 3, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "H W C"]:
    """The picture of one file, upright, with 3 channels or 1, scaled and cut to (height, width) where that is given.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (40, 20), 7).save(f"{folder}/grey.png")
    ...     read_image(f"{folder}/grey.png", size=(8, 8)).shape
    (8, 8, 3)
    """
    return decode(Path(file), None, channels, Fit(size))[0]
