"""Weights over the patches of a picture, drawn on it.

A patch has one weight and is drawn in one colour: a smooth map would show shapes that the model never saw. The picture
below is grey, so that every colour is a weight's. The colours are viridis: equal steps look equal, to colour-blind
people too, and where there are no colours brighter is more.
"""

import math
import textwrap
from collections.abc import Mapping

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard.viewer.plots.heatmaps import FAINT, INK, STYLE, render

COLOURS = matplotlib.colormaps["viridis"]
# How much of what is seen is colour; the rest is the picture, its black and white brought nearer to each other.
OPAQUE, DARKEST, LIGHTEST = 0.65, 0.1, 0.8
LUMA = (0.299, 0.587, 0.114)
SCALE = "Each panel goes from nothing to its own greatest weight."
# Inches: the longer side of a panel, where there are a few and where there are many.
LARGE, SMALL = 2.3, 1.15
MARGIN, GAP, TITLE, LINE, BAR = 0.2, 0.12, 0.2, 0.17, 0.7

Weights = Float[np.ndarray, "rows columns"]
Pixels = UInt8[np.ndarray, "H W C"]
Patch = tuple[int, int]


@rc_context(STYLE)
def overlays(
    title: str, says: str, pixels: Pixels, panels: Mapping[str, Weights], patch: Patch | None, form: str
) -> bytes:
    """The picture, and beside it a panel for each map over its patches. The patch that asks has a frame."""
    across = min(len(panels) + 1, 4 if len(panels) < 8 else 5)
    page = Page(pixels, LARGE, across, math.ceil((len(panels) + 1) / across), above=0.28, below=0.26)
    side = len(pixels) // len(next(iter(panels.values())))
    _name(page.panel(0, 0, pixels, patch, side), "the picture")
    for place, (name, weights) in enumerate(panels.items(), 1):
        axes = page.panel(*divmod(place, across), overlaid(pixels, weights), patch, side)
        _name(axes, name)
        note = f"most {100 * weights.max():.1f} %, all patches {100 * weights.sum():.0f} %"
        axes.annotate(note, (0, 0), (0, -4), "axes fraction", "offset points", va="top", fontsize=7.5, color=FAINT)
    return render(page.finished(title, says), form)


@rc_context(STYLE)
def overlay_table(
    title: str,
    says: str,
    pixels: Pixels,
    table: Mapping[str, Float[np.ndarray, "heads rows columns"]],
    patch: Patch | None,
    form: str,
) -> bytes:
    """A small panel for each head of each attention: a row an attention, a column a head."""
    names = [name.removesuffix(".attention") for name in table]
    heads = max(map(len, table.values()))
    page = Page(pixels, SMALL, heads, len(table), left=0.1 + 0.07 * max(map(len, names)), top=0.25)
    for row, (name, maps) in enumerate(zip(names, table.values())):
        for head, weights in enumerate(maps):
            axes = page.panel(row, head, overlaid(pixels, weights), patch, len(pixels) // len(weights))
            if row == 0:
                axes.set_title(f"head {head}", fontsize=8, color=INK, pad=4)
            if head == 0:
                axes.annotate(name, (0, 0.5), (-5, 0), "axes fraction", "offset points", ha="right", va="center").set(
                    fontsize=8, color=INK
                )
    return render(page.finished(title, says), form)


def overlaid(pixels: Pixels, weights: Weights) -> Float[np.ndarray, "H W 3"]:
    """The picture in grey with its patches in the colours of their weights, from nothing to the greatest.

    >>> found = overlaid(np.zeros((4, 4, 3), np.uint8), np.array([[0.0, 0.5], [0.25, 0.25]]))
    >>> np.allclose(found[0, 3], OPAQUE * np.array(COLOURS(1.0)[:3]) + (1 - OPAQUE) * DARKEST)
    True
    """
    grey = (pixels @ np.array(LUMA) if pixels.shape[2] == 3 else pixels[..., 0]) / 255
    share = weights / max(weights.max(), np.finfo(weights.dtype).tiny)
    patch = len(pixels) // len(weights)
    colours = COLOURS(share)[..., :3].repeat(patch, axis=0).repeat(patch, axis=1)
    return OPAQUE * colours + (1 - OPAQUE) * (DARKEST + (LIGHTEST - DARKEST) * grey[..., None])


class Page:
    """Panels of one size in rows and columns, laid out in inches; title above, explanation and colours beside."""

    def __init__(
        self,
        pixels: Pixels,
        longest: float,
        across: int,
        down: int,
        *,
        left: float = 0.0,
        top: float = 0.0,
        above: float = 0.0,
        below: float = 0.0,
    ) -> None:
        """`left` and `top` are left free once, `above` and `below` with each panel."""
        self.above, self.left, self.top = above, MARGIN + left, MARGIN + TITLE + top
        self.height, self.width = (side * longest / max(pixels.shape[:2]) for side in pixels.shape[:2])
        self.step_down, self.step_across = above + self.height + below + GAP, self.width + GAP
        self.wide = max(4.5, self.left + across * self.step_across + BAR)
        self.bottom = self.top + down * self.step_down
        self.figure = Figure(figsize=(self.wide, self.bottom), facecolor="white")
        self.panels: list[tuple[Axes, float, float]] = []

    def panel(self, row: int, column: int, pixels: np.ndarray, patch: Patch | None, side: int) -> Axes:
        """What is shown in a row and a column; the patch that asks, if one does, has a frame."""
        axes = self.figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        if patch is not None:
            corner = patch[1] * side - 0.5, patch[0] * side - 0.5
            for colour, width in (("black", 3.0), ("white", 1.2)):  # to be seen on any colour
                axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=width))
        self.panels.append((axes, self.left + column * self.step_across, self.top + row * self.step_down + self.above))
        return axes

    def finished(self, title: str, says: str) -> Figure:
        """The figure, as high as its texts need."""
        named, told = textwrap.wrap(title, int(8.5 * self.wide)), textwrap.wrap(f"{says} {SCALE}", int(14 * self.wide))
        more = (len(named) - 1) * 0.25
        high = more + self.bottom + len(told) * LINE + MARGIN
        self.figure.set_figheight(high)

        def put(axes: Axes, left: float, top: float, width: float, height: float) -> None:
            axes.set_position((left / self.wide, 1 - (top + height) / high, width / self.wide, height / high))

        for axes, left, top in self.panels:
            put(axes, left, top + more, self.width, self.height)
        for text, top, size, colour in ((named, MARGIN / 2, 13, INK), (told, more + self.bottom, 9, FAINT)):
            self.figure.text(
                MARGIN / self.wide, 1 - top / high, "\n".join(text), fontsize=size, color=colour, va="top"
            ).set_parse_math(False)
        bar = self.figure.add_axes((0, 0, 1, 1))
        length = min(LARGE, self.bottom - self.top - GAP, max(self.height, SMALL))
        put(bar, self.wide - BAR + GAP, more + self.top + self.above, 0.12, length)
        # As they look over middle grey.
        shades = OPAQUE * COLOURS(np.linspace(1, 0, 256))[:, None, :3] + (1 - OPAQUE) * (DARKEST + LIGHTEST) / 2
        bar.imshow(shades, aspect="auto", extent=(0, 1, 0, 1))
        bar.set(xticks=[], yticks=[0, 1])
        bar.set_yticklabels(["none", "most"], fontsize=8, color=FAINT)
        bar.yaxis.tick_right()
        bar.tick_params(length=0, pad=3)
        for spine in bar.spines.values():
            spine.set_visible(False)
        return self.figure


def _name(axes: Axes, name: str) -> None:
    axes.set_title(textwrap.shorten(name, 30, placeholder=" …"), fontsize=9, color=INK, loc="left", pad=4)
    axes.title.set_parse_math(False)
