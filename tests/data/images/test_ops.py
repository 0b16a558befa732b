"""Compares each operation on a batch with a plain one on single images: that of Pillow, or loops."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images import augmentation as ops

SHAPE = (31, 26)


def batch(count=4, channels=3, shape=SHAPE, seed=0):
    """Images of different brightness, with values of whole bytes."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, (count, channels, *shape))
    low, high = np.sort(generator.integers(0, 256, (2, count, channels, 1, 1)), 0)
    return torch.from_numpy((low + noise * (high - low) // 255).astype(np.float32) / 255)


def to_pillow(pixels):
    array = (pixels * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[-1] == 3 else array[..., 0])


def from_pillow(image):
    array = np.asarray(image)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1).transpose(2, 0, 1).astype(np.float32) / 255)


def inner(pixels):
    return pixels[..., 1:-1, 1:-1]


FACTORS = (0.1, 0.7, 1.0, 1.9)
REFERENCES = {
    "brightness": (
        ops.adjust_brightness,
        lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
        FACTORS,
    ),
    "contrast": (ops.adjust_contrast, lambda image, factor: ImageEnhance.Contrast(image).enhance(factor), FACTORS),
    "saturation": (ops.adjust_saturation, lambda image, factor: ImageEnhance.Color(image).enhance(factor), FACTORS),
    "sharpness": (ops.adjust_sharpness, lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor), FACTORS),
    "posterize": (ops.posterize, lambda image, bits: ImageOps.posterize(image, int(bits)), (8.0, 6.0, 4.0, 1.0)),
    "solarize": (ops.solarize, lambda image, at: ImageOps.solarize(image, round(at * 255)), (1.004, 0.8, 0.4, 0.0)),
    "autocontrast": (
        lambda pixels, _: ops.autocontrast(pixels),
        lambda image, _: ImageOps.autocontrast(image),
        [0.0] * 4,
    ),
    "equalize": (lambda pixels, _: ops.equalize(pixels), lambda image, _: ImageOps.equalize(image), [0.0] * 4),
}


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", REFERENCES)
def test_color_operations(name, channels):
    op, reference, parameters = REFERENCES[name]
    pixels = batch(channels=channels)
    output = op(pixels, torch.tensor(parameters))
    assert output.shape == pixels.shape
    # Pillow rounds intermediate results: the mean gray of the image, the gray of each pixel, the result.
    tolerance = {"brightness": 1.01, "autocontrast": 1.01, "posterize": 0.01, "solarize": 0.01, "equalize": 0.01}.get(
        name, 1.6
    )
    for result, image, parameter in zip(output, pixels, parameters):
        expected = from_pillow(reference(to_pillow(image), parameter))
        part = inner if name == "sharpness" else torch.clone  # Pillow does not blur the border
        assert (part(result) - part(expected)).abs().max() * 255 <= tolerance
    assert torch.allclose(output, pixels, atol=0.02) == (name == "saturation" and channels == 1)


def test_sharpness_at_the_border():
    pixels = batch(count=1, channels=1, shape=(2, 3))
    padded = np.pad(pixels[0, 0].numpy(), 1, mode="edge")
    expected = [
        [(padded[y : y + 3, x : x + 3].sum() + 4 * padded[y + 1, x + 1]) / 13 for x in range(3)] for y in range(2)
    ]
    assert torch.allclose(ops.adjust_sharpness(pixels, torch.zeros(1))[0, 0], torch.tensor(expected))


def test_images_of_one_color_do_not_change():
    pixels = torch.full((2, 3, 5, 4), 0.6)
    for op in (ops.autocontrast, ops.equalize):
        assert torch.allclose(op(pixels), pixels)


@pytest.mark.parametrize("padding", ["reflect", "zero"])
def test_flip_and_translate(padding):
    pixels = batch(count=6, channels=2)
    masks = torch.randint(0, 9, (6, *SHAPE), generator=torch.Generator().manual_seed(0))
    down, right = torch.tensor([0, 5, -30, 3, -4, 30]), torch.tensor([0, -7, 2, 25, -25, 0])
    flip = torch.tensor([False, True, False, True, True, False])
    output, output_masks = ops.flip_and_translate(pixels, masks, down, right, flip, padding)
    assert (output.shape, output_masks.shape) == (pixels.shape, masks.shape)
    for i in range(6):
        for array, result, outside in (
            (pixels[i], output[i], 0.0),
            (masks[i][None], output_masks[i][None], IGNORE_INDEX),
        ):
            plain = array.numpy()[..., ::-1] if flip[i] else array.numpy()
            options = {"mode": "reflect"} if padding == "reflect" else {"constant_values": outside}
            wide = np.pad(plain, ((0, 0), (30, 30), (25, 25)), **options)
            top, left = 30 - int(down[i]), 25 - int(right[i])
            assert (result.numpy() == wide[:, top : top + SHAPE[0], left : left + SHAPE[1]]).all()
    pixels_only, no_masks = ops.flip_and_translate(pixels, None, down, right, flip, padding)
    assert torch.equal(pixels_only, output)
    assert no_masks is None


def plain_warp(image, mask, matrix, fill_outside):
    """Warp pixel by pixel, in pixel coordinates."""
    height, width = mask.shape
    pixels, numbers = np.zeros_like(image), np.zeros_like(mask)
    for row in range(height):
        for column in range(width):
            x, y = column + 0.5 - width / 2, row + 0.5 - height / 2
            from_x = matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2] * width / 2 + width / 2 - 0.5
            from_y = matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2] * height / 2 + height / 2 - 0.5

            def at(y, x):
                inside = 0 <= y < height and 0 <= x < width
                y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
                is_filled = fill_outside and not inside
                return (np.full(len(image), ops.FILL), IGNORE_INDEX) if is_filled else (image[:, y, x], mask[y, x])

            top, left = math.floor(from_y), math.floor(from_x)
            for y, share_y in ((top, 1 - from_y + top), (top + 1, from_y - top)):
                for x, share_x in ((left, 1 - from_x + left), (left + 1, from_x - left)):
                    pixels[:, row, column] += share_y * share_x * at(y, x)[0]
            numbers[row, column] = at(round(from_y), round(from_x))[1]
    return pixels, numbers


@pytest.mark.parametrize("fill_outside", [True, False])
def test_warp(fill_outside):
    cos, sin = math.cos(0.4), math.sin(0.4)
    matrices = torch.tensor(
        [
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
            [[cos, -sin, 0.0], [sin, cos, 0.0]],
            [[1.0, 0.3, 0.21], [-0.2, 1.0, -0.13]],
            [[0.5, 0.0, 0.4], [0.0, 0.7, -0.3]],
        ]
    )
    pixels = batch(shape=(9, 14))
    masks = torch.randint(0, 9, (4, 9, 14), generator=torch.Generator().manual_seed(0))
    output, output_masks = ops.warp(pixels, masks, matrices, fill_outside)
    assert torch.allclose(output[0], pixels[0], atol=1e-5)
    assert torch.equal(output_masks[0], masks[0])
    for i in range(4):
        expected, expected_mask = plain_warp(
            pixels[i].double().numpy(), masks[i].numpy(), matrices[i].double().numpy(), fill_outside
        )
        assert abs(output[i].numpy() - expected).max() < 1e-4
        # Of two equally near pixels either may be taken.
        assert (output_masks[i].numpy() != expected_mask).mean() < 0.02
    assert (output_masks[1] == IGNORE_INDEX).any() == fill_outside


def test_make_boxes():
    y, x = torch.tensor([0.5, 0.0, 0.99]), torch.tensor([0.5, 0.2, 1.0])
    height, width = torch.tensor([4.0, 6.0, 0.0]), torch.tensor([2.0, 5.0, 3.0])
    output = ops.make_boxes((10, 8), y, x, height, width)
    assert output.shape == (3, 1, 10, 8)
    for i in range(3):
        for row in range(10):
            for column in range(8):
                inside = abs(row + 0.5 - 10 * y[i]) < height[i] / 2 and abs(column + 0.5 - 8 * x[i]) < width[i] / 2
                assert output[i, 0, row, column] == inside
    assert output.sum((1, 2, 3)).tolist() == [8, 12, 0]
