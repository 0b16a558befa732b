"""Segmentation masks: as PNG files with a palette, and as overlays on the image."""

import colorsys
import io
import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from regard.errors import RegardError

# Colors that color-blind people can distinguish (Okabe and Ito 2008), the lightest last.
FIRST_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
# Opacity of the colors over an image, and the longest side of the plotted image in pixels.
OPACITY, MAX_SIDE = 0.55, 1200
# Labels in the legend: those with the most pixels.
MAX_LEGEND = 20

LabelMask = Int[np.ndarray, "H W"]


def label_colors(count: int) -> UInt8[np.ndarray, "count 3"]:
    """Distinct RGB colors of labels: seven safe for color-blind people, then varying hues and shades.

    >>> label_colors(1).tolist(), len(np.unique(label_colors(256), axis=0))
    ([[0, 114, 178]], 256)
    """
    fixed = [tuple(bytes.fromhex(one[1:])) for one in FIRST_COLORS[:count]]
    more = (
        # Steps of the golden ratio never repeat a hue; lightness alternates, so that neighbors differ in both.
        colorsys.hls_to_rgb(0.618034 * i % 1, (0.35, 0.5, 0.65, 0.8)[i % 4], 0.65)
        for i in range(count - len(fixed))
    )
    return np.array([*fixed, *(tuple(round(255 * x) for x in one) for one in more)], np.uint8).reshape(count, 3)


def mask_png(mask: LabelMask, values: Sequence[int]) -> bytes:
    """A palette PNG of the mask: a pixel of label i has the value `values[i]` and the color of the label.

    >>> file = mask_png(np.array([[0, 1]]), values=(1, 2))
    >>> np.asarray(Image.open(io.BytesIO(file))).tolist()
    [[1, 2]]
    """
    if not all(0 <= value < 256 for value in values):
        raise RegardError(
            f"A PNG mask supports 256 labels; the model has {len(values)}.", "Use model.segment in Python."
        )
    palette = np.zeros((256, 3), np.uint8)
    palette[list(values)] = label_colors(len(values))
    image = Image.fromarray(np.array(values, np.uint8)[mask])
    image.putpalette(palette.tobytes())
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def mask_overlay(
    pixels: UInt8[np.ndarray, "H W C"], mask: LabelMask, labels: Sequence[str], title: str, file_format: str
) -> bytes:
    """Plot the image in gray under the colors of the labels, with a legend of labels and their fractions of pixels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from regard.viewer.plots import FAINT, INK, STYLE, render

    step = max(1, -(-max(mask.shape) // MAX_SIDE))
    shares = np.bincount(mask.flatten(), minlength=len(labels)) / mask.size
    pixels, mask = pixels[::step, ::step], mask[::step, ::step]
    colors = label_colors(len(labels))
    gray = np.asarray(Image.fromarray(pixels.squeeze()).convert("L"))[..., None]
    blended = OPACITY * colors[mask] + (1 - OPACITY) * gray
    height, width = (5.0 * side / max(mask.shape) for side in mask.shape)
    listed = [i for i in np.argsort(-shares, kind="stable")[:MAX_LEGEND] if shares[i] > 0]
    figure_width, figure_height = width + 2.6, max(height, 0.22 * len(listed)) + 0.75
    with rc_context(STYLE):
        figure = Figure(figsize=(figure_width, figure_height), facecolor="white")
        axes = figure.add_axes(
            (0.2 / figure_width, 1 - (0.55 + height) / figure_height, width / figure_width, height / figure_height)
        )
        axes.imshow(blended.astype(np.uint8), interpolation="nearest")
        axes.set_axis_off()
        figure.text(
            0.2 / figure_width,
            1 - 0.15 / figure_height,
            textwrap.shorten(title, int(8.5 * figure_width), placeholder=" …"),
            fontsize=13,
        ).set(color=INK, va="top", parse_math=False)
        legend = axes.legend(
            [Patch(color=(OPACITY * colors[i] + (1 - OPACITY) * 128) / 255) for i in listed],
            [f"{textwrap.shorten(labels[i], 22, placeholder=' …')}, {100 * shares[i]:.1f} %" for i in listed],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            fontsize=9,
            labelcolor=FAINT,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        return render(figure, file_format)
