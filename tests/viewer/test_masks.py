"""Plots of labels: segmentation masks, mask overlays, confusion matrices."""

import io
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from regard.data.images.decoding import to_mask_array
from regard.errors import RegardError
from regard.viewer.masks import label_colors, mask_overlay, mask_png
from regard.viewer.plots import draw_confusion

MASK = np.array([[0, 1, 1], [2, 2, 2]])


def svg_text(svg: bytes) -> str:
    return " ".join("\n".join(xml.fromstring(svg.decode()).itertext()).split())


@pytest.mark.parametrize("count", [1, 7, 8, 256])
def test_labels_have_different_colors(count):
    colors = label_colors(count)
    assert (colors.shape, colors.dtype) == ((count, 3), np.uint8)
    assert len(np.unique(colors, axis=0)) == count
    np.testing.assert_array_equal(label_colors(300)[:count], colors)  # a label keeps its color


def test_written_mask_is_read_back():
    image = Image.open(io.BytesIO(mask_png(MASK, values=(0, 7, 254))))
    assert (image.format, image.mode, image.size) == ("PNG", "P", (3, 2))
    np.testing.assert_array_equal(to_mask_array(image, (2, 3)), [[0, 7, 7], [254, 254, 254]])
    np.testing.assert_array_equal(np.asarray(image.convert("RGB")), label_colors(3)[MASK])


def test_more_than_256_labels_are_an_error():
    with pytest.raises(RegardError, match="A PNG mask supports 256 labels; the model has 300"):
        mask_png(MASK, values=range(300))


def test_overlay_has_names_and_shares_of_labels():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)
    text = svg_text(mask_overlay(pixels, MASK, ["$x$", "<b>", "owl", "never seen"], "a photo", "svg"))
    for label in ("a photo", "$x$, 16.7 %", "<b>, 33.3 %", "owl, 50.0 %"):
        assert label in text
    assert "never seen" not in text
    for image in (pixels, pixels[..., :1]):
        plot = imread(io.BytesIO(mask_overlay(image, MASK, ["a", "b", "c"], "", "png")), format="png")
        middle = plot[plot.shape[0] // 2, :, :3]
        assert len(np.unique(middle.round(2), axis=0)) > 3


def test_large_images_are_downscaled():
    mask = np.zeros((4000, 100), int)
    plot = imread(io.BytesIO(mask_overlay(np.zeros((4000, 100, 3), np.uint8), mask, ["a"], "", "png")), format="png")
    assert max(plot.shape) < 1500


def test_confusion_matrix_has_shares_per_row():
    counts = np.array([[9, 3, 0], [0, 50, 50], [0, 0, 0]])
    text = svg_text(draw_confusion(counts, ["cat", "$dog$", "<owl>"], "accuracy 52.68 %", "pictures", "svg"))
    for label in ("accuracy 52.68 %", "predicted labels of its pictures", "$dog$", "<owl>", "75", "25", "50"):
        assert label in text
    assert "33" not in text  # shares are per row, not per column
    plot = imread(io.BytesIO(draw_confusion(counts, ["a", "b", "c"], "", "pixels", "png")), format="png")
    assert plot[..., :3].min() < 0.2  # large shares are dark


@pytest.mark.parametrize("count", [2, 37, 120])
def test_confusion_matrix_fits_any_number_of_labels(count):
    names = [f"a rather long name of the label number {i}" for i in range(count)]
    file = draw_confusion(np.eye(count, dtype=int), names, "x" * 200, "pictures", "png")
    height, width = imread(io.BytesIO(file), format="png").shape[:2]
    assert 500 < width < 2600
    assert 300 < height < 2600
