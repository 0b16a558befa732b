"""Pictures of labels: masks, masks over their picture, what was taken for what."""

import io
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from regard.data.images.image_decoding import mask_of
from regard.errors import RegardError
from regard.viewer.plots.confusion_matrix import draw_confusion
from regard.viewer.plots.mask_overlays import label_colours, mask_overlay, mask_png

MASK = np.array([[0, 1, 1], [2, 2, 2]])


def words(svg: bytes) -> str:
    return " ".join("\n".join(xml.fromstring(svg.decode()).itertext()).split())


@pytest.mark.parametrize("count", [1, 7, 8, 256])
def test_no_two_labels_have_one_colour(count):
    colours = label_colours(count)
    assert (colours.shape, colours.dtype) == ((count, 3), np.uint8)
    assert len(np.unique(colours, axis=0)) == count
    np.testing.assert_array_equal(label_colours(300)[:count], colours)  # a label keeps its colour


def test_a_mask_is_read_back_as_it_was_learned_from():
    image = Image.open(io.BytesIO(mask_png(MASK, values=(0, 7, 254))))
    assert (image.format, image.mode, image.size) == ("PNG", "P", (3, 2))
    np.testing.assert_array_equal(mask_of(image, (2, 3)), [[0, 7, 7], [254, 254, 254]])
    np.testing.assert_array_equal(np.asarray(image.convert("RGB")), label_colours(3)[MASK])


def test_more_labels_than_a_mask_has_numbers():
    with pytest.raises(RegardError, match="A mask has room for 256 labels, not for 300"):
        mask_png(MASK, values=range(300))


def test_labels_over_their_picture_have_their_names_and_shares():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)
    said = words(mask_overlay(pixels, MASK, ["$x$", "<b>", "owl", "never seen"], "a photo", "svg"))
    for one in ("a photo", "$x$, 16.7 %", "<b>, 33.3 %", "owl, 50.0 %"):
        assert one in said
    assert "never seen" not in said
    for grey in (pixels, pixels[..., :1]):
        seen = imread(io.BytesIO(mask_overlay(grey, MASK, ["a", "b", "c"], "", "png")), format="png")
        middle = seen[seen.shape[0] // 2, :, :3]
        assert len(np.unique(middle.round(2), axis=0)) > 3


def test_a_large_picture_is_drawn_smaller():
    mask = np.zeros((4000, 100), int)
    seen = imread(io.BytesIO(mask_overlay(np.zeros((4000, 100, 3), np.uint8), mask, ["a"], "", "png")), format="png")
    assert max(seen.shape) < 1500


def test_shares_of_each_row_are_written_and_drawn():
    counts = np.array([[9, 3, 0], [0, 50, 50], [0, 0, 0]])
    said = words(draw_confusion(counts, ["cat", "$dog$", "<owl>"], "accuracy 52.68 %", "pictures", "svg"))
    for one in ("accuracy 52.68 %", "what its pictures were taken for", "$dog$", "<owl>", "75", "25", "50"):
        assert one in said
    assert "33" not in said  # shares are of rows, not of columns
    seen = imread(io.BytesIO(draw_confusion(counts, ["a", "b", "c"], "", "pixels", "png")), format="png")
    assert seen[..., :3].min() < 0.2  # the darkest is a large share


@pytest.mark.parametrize("count", [2, 37, 120])
def test_as_many_labels_as_there_are(count):
    names = [f"a rather long name of the label number {i}" for i in range(count)]
    file = draw_confusion(np.eye(count, dtype=int), names, "x" * 200, "pictures", "png")
    height, width = imread(io.BytesIO(file), format="png").shape[:2]
    assert 500 < width < 2600
    assert 300 < height < 2600
