"""Which pixel has which label: masks as files that any program reads, and over their picture for people."""

import colorsys
import io
import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from regard.errors import RegardError

# Colours that colour-blind people tell apart (Okabe and Ito 2008), the lightest last.
FIRST = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
# How much of what is seen over a picture is colour, and the longest side that is drawn, in pixels.
OPAQUE, LONGEST = 0.55, 1200
# So many labels are named beside a picture: those that have most pixels.
MOST_NAMED = 20

Mask = Int[np.ndarray, "H W"]


def label_colours(count: int) -> UInt8[np.ndarray, "count 3"]:
    """A colour for each label, no two alike: seven that everybody can tell apart, then ever other hues and shades.

    >>> label_colours(1).tolist(), len(np.unique(label_colours(256), axis=0))
    ([[0, 114, 178]], 256)
    """
    fixed = [tuple(bytes.fromhex(one[1:])) for one in FIRST[:count]]
    more = (
        # The golden section never comes back to a hue; lightness alternates, so that neighbours differ in two ways.
        colorsys.hls_to_rgb(0.618034 * i % 1, (0.35, 0.5, 0.65, 0.8)[i % 4], 0.65)
        for i in range(count - len(fixed))
    )
    return np.array([*fixed, *(tuple(round(255 * x) for x in one) for one in more)], np.uint8).reshape(count, 3)


def mask_png(mask: Mask, values: Sequence[int]) -> bytes:
    """A PNG of the mask's size with a palette: a pixel of label i holds the number `values[i]` and has its colour.

    >>> file = mask_png(np.array([[0, 1]]), values=(1, 2))
    >>> np.asarray(Image.open(io.BytesIO(file))).tolist()
    [[1, 2]]
    """
    if not all(0 <= value < 256 for value in values):
        raise RegardError(f"A mask has room for 256 labels, not for {len(values)}.", "Segment in Python: model.segment")
    palette = np.zeros((256, 3), np.uint8)
    palette[list(values)] = label_colours(len(values))
    image = Image.fromarray(np.array(values, np.uint8)[mask])
    image.putpalette(palette.tobytes())
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def mask_overlay(pixels: UInt8[np.ndarray, "H W C"], mask: Mask, labels: Sequence[str], title: str, form: str) -> bytes:
    """The picture in grey under the colours of its pixels' labels, with the labels' names and shares beside it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from regard.viewer.plots.heatmaps import FAINT, INK, STYLE, render

    step = max(1, -(-max(mask.shape) // LONGEST))
    shares = np.bincount(mask.flatten(), minlength=len(labels)) / mask.size
    pixels, mask = pixels[::step, ::step], mask[::step, ::step]
    colours = label_colours(len(labels))
    grey = np.asarray(Image.fromarray(pixels.squeeze()).convert("L"))[..., None]
    seen = OPAQUE * colours[mask] + (1 - OPAQUE) * grey
    height, width = (5.0 * side / max(mask.shape) for side in mask.shape)
    named = [i for i in np.argsort(-shares, kind="stable")[:MOST_NAMED] if shares[i] > 0]
    wide, high = width + 2.6, max(height, 0.22 * len(named)) + 0.75
    with rc_context(STYLE):
        figure = Figure(figsize=(wide, high), facecolor="white")
        axes = figure.add_axes((0.2 / wide, 1 - (0.55 + height) / high, width / wide, height / high))
        axes.imshow(seen.astype(np.uint8), interpolation="nearest")
        axes.set_axis_off()
        figure.text(
            0.2 / wide, 1 - 0.15 / high, textwrap.shorten(title, int(8.5 * wide), placeholder=" …"), fontsize=13
        ).set(color=INK, va="top", parse_math=False)
        legend = axes.legend(
            [Patch(color=(OPAQUE * colours[i] + (1 - OPAQUE) * 128) / 255) for i in named],
            [f"{textwrap.shorten(labels[i], 22, placeholder=' …')}, {100 * shares[i]:.1f} %" for i in named],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            fontsize=9,
            labelcolor=FAINT,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        return render(figure, form)
