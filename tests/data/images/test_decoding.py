import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from regard.data import read_image, read_images, read_ragged_images
from regard.data.images.decoding import ResizeRule, decode_file, read_header
from regard.errors import RegardError
from tests.data.helpers import write


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, bits, color, rows):
    """A PNG file of kinds that Pillow does not write."""
    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg(width=40, height=30):
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(noise).save(stream, "JPEG")
    return stream.getvalue()


def palette(transparent=False):
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    if transparent:
        image.info["transparency"] = 1
    return image


WHITE, ORANGE = (255, 255, 255), (200, 100, 50)
SIXTEEN = Image.fromarray(np.full((3, 4), 100 * 257 + 100, np.uint16))


@pytest.mark.parametrize(
    ("image", "suffix", "expected"),
    [
        (Image.new("RGB", (4, 3), ORANGE), "png", ORANGE),
        (Image.new("L", (4, 3), 100), "png", (100,) * 3),
        (Image.new("1", (4, 3), 1), "png", WHITE),
        (Image.new("LA", (4, 3), (100, 0)), "png", WHITE),
        (Image.new("RGBA", (4, 3), (0, 0, 0, 51)), "png", (204,) * 3),
        (Image.new("RGBA", (4, 3), (0, 0, 0, 51)), "webp", (204,) * 3),
        (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), "tif", (255, 0, 0)),
        (palette(), "png", ORANGE),
        (palette(transparent=True), "png", WHITE),
        (SIXTEEN, "png", (100,) * 3),
        (SIXTEEN, "tif", (100,) * 3),
        (Image.new("RGB", (4, 3), (200, 100, 51)), "jpg", None),
        (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), "jpg", None),
        (Image.new("RGB", (4, 3), ORANGE), "bmp", ORANGE),
        (Image.new("RGB", (4, 3), ORANGE), "ppm", ORANGE),
        (Image.new("L", (4, 3), 100), "gif", (100,) * 3),
    ],
)
def test_every_mode_is_converted_to_color_and_gray(folder, image, suffix, expected):
    image.save(f"a.{suffix}", **({"lossless": True, "exact": True} if suffix == "webp" else {}))
    color, gray = read_image(f"a.{suffix}"), read_image(f"a.{suffix}", channels=1)
    assert (color.dtype, color.shape, gray.shape) == (np.uint8, (3, 4, 3), (3, 4, 1))
    # JPEG is lossy.
    reference = image.convert("RGB").getpixel((0, 0)) if expected is None else expected
    assert abs(color.astype(int) - reference).max() <= (0 if expected else 4)
    light = Image.new("RGB", (1, 1), tuple(color[0, 0].tolist())).convert("L").getpixel((0, 0))
    assert abs(gray.astype(int) - light).max() <= 1


@pytest.mark.parametrize(
    ("bits", "color", "expected"), [(16, 2, (1, 2, 255)), (16, 0, (1, 1, 1)), (4, 0, (17, 17, 17))]
)
def test_bit_depths_that_pillow_does_not_write(folder, bits, color, expected):
    rows = {2: struct.pack(">3H", 257, 2 * 257, 65535), 0: struct.pack(">H", 257) if bits == 16 else b"\x10"}[color]
    write("a.png", png(1, 1, bits, color, b"\0" + rows))
    assert tuple(read_image("a.png")[0, 0]) == expected


# Transformation of the stored pixels that makes an image of the given EXIF orientation upright.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: np.rot90,
}


@pytest.mark.parametrize("suffix", ["png", "webp", "tif", "jpg"])
def test_images_are_made_upright(folder, suffix):
    blocks = np.array([[0, 80, 160], [240, 40, 120]], np.uint8).repeat(8, 0).repeat(8, 1)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"lossless": True} if suffix == "webp" else {}
        Image.fromarray(blocks).save("a." + suffix, exif=exif, **options)
        expected = UPRIGHT[orientation](blocks)
        pixels = read_image("a." + suffix, channels=1)[..., 0]
        assert pixels.shape == ((16, 24) if orientation < 5 else (24, 16)) == read_header(folder / ("a." + suffix))[:2]
        assert abs(pixels.astype(int) - expected).max() <= (2 if suffix == "jpg" else 0)
        images = read_images(["a." + suffix], channels=1)  # the size in the header is that of the pixels
        assert (images.pixels[0, ..., 0] == pixels).all()


def test_image_with_invalid_exif_is_read(folder):
    Image.new("L", (4, 3), 9).save("a.png", exif=b"Exif\0\0nonsense")
    assert (read_image("a.png", channels=1) == 9).all()


BAD = [
    ("a.jpg", jpeg()[:-200], "not a readable image"),
    ("a.jpg", jpeg()[:10], "not a readable image"),
    ("a.png", b"some text", "not a readable image"),
    ("a.png", b"", "not a readable image"),
    ("a.png", png(4, 4, 8, 2, b"\0" * 7), "not a readable image"),
    ("a.png", png(200_000, 100_000, 8, 2, b"\0"), "more than 89 million pixels and is not decoded"),
    ("a.png", png(10_000, 9_000, 8, 2, b"\0"), "more than 89 million pixels and is not decoded"),
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_errors_name_the_bad_file(folder, name, content, message):
    write(name, content)
    with pytest.raises(RegardError, match=rf"^{name}: .*{message}.*\. \w+"):
        read_image(name)
    with pytest.raises(RegardError, match=rf"^{name}: .*{message}"):
        read_images([name])
    Image.new("RGB", (4, 4)).save("b.png")
    with pytest.raises(RegardError, match=rf"^{name}: .*{message}"):
        read_images(["b.png", name], size=8, channels=3)


def test_no_external_program_is_started(folder):
    """Pillow would run Ghostscript on this file."""
    write("a.png", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    assert Image.open("a.png").format == "EPS"
    with pytest.raises(UnidentifiedImageError):
        read_header(folder / "a.png")


def test_error_names_the_missing_file(folder):
    with pytest.raises(RegardError, match=r"^no\.png: there is no such file\. Fix"):
        read_image("no.png")


def test_floats_and_too_many_bits_are_refused(folder):
    Image.fromarray(np.full((2, 2), 0.5, np.float32)).save("a.tif")
    with pytest.raises(RegardError, match=r"^a\.tif: floating-point images are not supported\."):
        read_image("a.tif")
    Image.fromarray(np.full((2, 2), 70_000, np.int32)).save("b.tif")
    with pytest.raises(RegardError, match=r"^b\.tif: gray values with more than 16 bits are not supported\."):
        read_image("b.tif")


@pytest.mark.parametrize(
    ("fit", "size", "expected"),
    [
        (ResizeRule(), (7, 9), (7, 9)),
        (ResizeRule((8, 12)), (100, 50), (8, 12)),
        (ResizeRule(patch=8), (20, 21), (16, 24)),
        (ResizeRule(patch=8), (3, 21), (8, 24)),
        (ResizeRule(patch=8, longest=32), (100, 50), (32, 16)),
        (ResizeRule(patch=8, longest=31), (100, 100), (24, 24)),
        (ResizeRule(patch=8, longest=32), (21, 30), (24, 32)),
        (ResizeRule(patch=8, longest=32), (1, 1000), (8, 32)),
    ],
)
def test_target_sizes(fit, size, expected):
    assert fit.target_size(*size) == expected


def test_center_crop_keeps_the_aspect_ratio(folder):
    stripes = np.repeat(np.array([0, 100, 100, 255], np.uint8), 40)[None].repeat(80, 0)
    Image.fromarray(stripes).save("wide.png")
    Image.fromarray(stripes.T.copy()).save("tall.png")
    for name in ("wide.png", "tall.png"):
        assert abs(read_image(name, 1, (20, 20))[2:-2, 2:-2].astype(int) - 100).max() <= 1
    assert read_image("wide.png", 1, (20, 40))[:, [0, -1]].tolist() == [[[0], [255]]] * 20  # nothing is cropped
    # One pixel is cropped on both sides.
    assert read_image("wide.png", 1, (80, 158))[0, :, 0].tolist() == stripes[0, 1:-1].tolist()


def test_large_jpeg_decoded_at_reduced_size_is_nearly_equal(folder):
    y, x = np.mgrid[0:600, 0:800]
    Image.fromarray(np.stack([x // 4, y // 4, (x + y) // 8], -1).astype(np.uint8)).save("a.jpg", quality=95)
    small = read_image("a.jpg", size=(30, 40)).astype(int)
    full = np.asarray(Image.open("a.jpg").resize((40, 30), Image.Resampling.BICUBIC)).astype(int)
    assert abs(small - full).max() <= 3
    # The target size follows from the full image, not from the reduced one that was decoded.
    Image.new("L", (800, 600), 2).save("mask.png")
    pixels, mask = decode_file(folder / "a.jpg", folder / "mask.png", 3, ResizeRule(patch=7, longest=50))
    assert pixels.shape == (35, 49, 3)
    assert mask.shape == (35, 49)


def with_mask(mask, shape=(4, 3), **options):
    Image.new("RGB", shape).save("a.png")
    mask.save("mask.png")
    write("index.csv", "path,mask\na.png,mask.png\n")
    return read_images(["index.csv"], **options).masks[0]


def test_masks_keep_the_stored_values(folder):
    numbers = np.array([[1, 2, 3, 3], [0, 1, 2, 255], [7, 7, 7, 7]], np.uint8)
    gray = Image.fromarray(numbers)
    paletted = Image.fromarray(numbers).convert("P")
    paletted.putdata(numbers.reshape(-1).tolist())
    paletted.putpalette([5, 9, 200] * 256)
    for mask in (gray, paletted, gray.convert("RGB"), Image.fromarray(numbers.astype(np.uint16))):
        assert with_mask(mask).tolist() == numbers.tolist()
    assert with_mask(Image.fromarray(numbers == 7)).tolist() == (numbers == 7).astype(int).tolist()


def test_resized_masks_have_no_new_values(folder):
    numbers = np.array([[1, 9], [200, 40]], np.uint8).repeat(8, 0).repeat(8, 1)
    assert with_mask(Image.fromarray(numbers), (16, 16), size=4).tolist() == numbers[::4, ::4].tolist()
    ragged = read_ragged_images(["index.csv"], patch=5)
    assert ragged.sizes.tolist() == [[15, 15]]
    assert set(ragged.mask(0).reshape(-1).tolist()) == {1, 9, 200, 40} == set(ragged.mask_values)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (4, 4)), r"mask\.png: the mask has 4 x 4 pixels, but its image a\.png has 4 x 3\. A mask must"),
        (
            Image.new("RGB", (4, 3), (1, 2, 3)),
            r"mask\.png: a mask needs one class value per pixel, got colors \(RGB",
        ),
        (Image.new("RGBA", (4, 3)), r"mask\.png: a mask needs one class value per pixel, got colors \(RGBA"),
        (Image.fromarray(np.full((3, 4), 300, np.uint16)), r"mask\.png: the mask has values above 255\. Number"),
    ],
)
def test_errors_name_the_bad_mask(folder, mask, message):
    with pytest.raises(RegardError, match=message):
        with_mask(mask)
