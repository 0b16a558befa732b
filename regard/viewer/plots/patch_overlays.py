"""Overlays of patch weights on an image.

Each patch is drawn in one color: an interpolated map would show shapes that the model does not compute. The image is
gray, so that all colors come from weights. The colormap is viridis: perceptually uniform, readable for color-blind
people, and brighter is larger in black and white.
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
from regard.viewer.rollout import PatchCoordinates

COLORS = matplotlib.colormaps["viridis"]
# Opacity of the colors over the image, whose gray values are compressed to this range.
OPACITY, DARKEST, LIGHTEST = 0.65, 0.1, 0.8
LUMA = (0.299, 0.587, 0.114)
SCALE = "Each panel is scaled from 0 to its own maximum."
# Inches: the longer side of a panel in a plot with few and with many panels.
LARGE, SMALL = 2.3, 1.15
MARGIN, GAP, TITLE, LINE, BAR = 0.2, 0.12, 0.2, 0.17, 0.7

GridWeights = Float[np.ndarray, "rows columns"]
ImagePixels = UInt8[np.ndarray, "H W C"]


@rc_context(STYLE)
def plot_overlays(
    title: str,
    caption: str,
    pixels: ImagePixels,
    panels: Mapping[str, GridWeights],
    patch: PatchCoordinates | None,
    file_format: str,
) -> bytes:
    """Plot the image and a panel per map over its patches. The query patch is framed."""
    columns = min(len(panels) + 1, 4 if len(panels) < 8 else 5)
    grid = PanelGrid(pixels, LARGE, columns, math.ceil((len(panels) + 1) / columns), above=0.28, below=0.26)
    side = len(pixels) // len(next(iter(panels.values())))
    _set_title(grid.panel(0, 0, pixels, patch, side), "the image")
    for index, (name, weights) in enumerate(panels.items(), 1):
        axes = grid.panel(*divmod(index, columns), overlay(pixels, weights), patch, side)
        _set_title(axes, name)
        note = f"max. {100 * weights.max():.1f} %, sum {100 * weights.sum():.0f} %"
        axes.annotate(note, (0, 0), (0, -4), "axes fraction", "offset points", va="top", fontsize=7.5, color=FAINT)
    return render(grid.finish(title, caption), file_format)


@rc_context(STYLE)
def plot_overlay_table(
    title: str,
    caption: str,
    pixels: ImagePixels,
    table: Mapping[str, Float[np.ndarray, "heads rows columns"]],
    patch: PatchCoordinates | None,
    file_format: str,
) -> bytes:
    """Plot a small panel per head: one row per attention, one column per head."""
    names = [name.removesuffix(".attention") for name in table]
    heads = max(map(len, table.values()))
    grid = PanelGrid(pixels, SMALL, heads, len(table), left=0.1 + 0.07 * max(map(len, names)), top=0.25)
    for row, (name, maps) in enumerate(zip(names, table.values())):
        for head, weights in enumerate(maps):
            axes = grid.panel(row, head, overlay(pixels, weights), patch, len(pixels) // len(weights))
            if row == 0:
                axes.set_title(f"head {head}", fontsize=8, color=INK, pad=4)
            if head == 0:
                axes.annotate(name, (0, 0.5), (-5, 0), "axes fraction", "offset points", ha="right", va="center").set(
                    fontsize=8, color=INK
                )
    return render(grid.finish(title, caption), file_format)


def overlay(pixels: ImagePixels, weights: GridWeights) -> Float[np.ndarray, "H W 3"]:
    """The image in gray with the colors of the patch weights, from 0 to their maximum.

    >>> colored = overlay(np.zeros((4, 4, 3), np.uint8), np.array([[0.0, 0.5], [0.25, 0.25]]))
    >>> np.allclose(colored[0, 3], OPACITY * np.array(COLORS(1.0)[:3]) + (1 - OPACITY) * DARKEST)
    True
    """
    gray = (pixels @ np.array(LUMA) if pixels.shape[2] == 3 else pixels[..., 0]) / 255
    scaled = weights / max(weights.max(), np.finfo(weights.dtype).tiny)
    patch = len(pixels) // len(weights)
    colors = COLORS(scaled)[..., :3].repeat(patch, axis=0).repeat(patch, axis=1)
    return OPACITY * colors + (1 - OPACITY) * (DARKEST + (LIGHTEST - DARKEST) * gray[..., None])


class PanelGrid:
    """A figure with a grid of panels of equal size in inches, a title, a caption and a color bar."""

    def __init__(
        self,
        pixels: ImagePixels,
        panel_size: float,
        columns: int,
        rows: int,
        *,
        left: float = 0.0,
        top: float = 0.0,
        above: float = 0.0,
        below: float = 0.0,
    ) -> None:
        """`left` and `top` are margins of the grid, `above` and `below` of each panel."""
        self.above, self.left, self.top = above, MARGIN + left, MARGIN + TITLE + top
        self.height, self.width = (side * panel_size / max(pixels.shape[:2]) for side in pixels.shape[:2])
        self.row_step, self.column_step = above + self.height + below + GAP, self.width + GAP
        self.figure_width = max(4.5, self.left + columns * self.column_step + BAR)
        self.bottom = self.top + rows * self.row_step
        self.figure = Figure(figsize=(self.figure_width, self.bottom), facecolor="white")
        self.panels: list[tuple[Axes, float, float]] = []

    def panel(self, row: int, column: int, pixels: np.ndarray, patch: PatchCoordinates | None, side: int) -> Axes:
        """Add a panel; a query patch is framed."""
        axes = self.figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        if patch is not None:
            corner = patch[1] * side - 0.5, patch[0] * side - 0.5
            for color, width in (("black", 3.0), ("white", 1.2)):  # visible on any color
                axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=color, linewidth=width))
        self.panels.append((axes, self.left + column * self.column_step, self.top + row * self.row_step + self.above))
        return axes

    def finish(self, title: str, caption: str) -> Figure:
        """The figure with title, caption and color bar, and its final height."""
        title_lines = textwrap.wrap(title, int(8.5 * self.figure_width))
        caption_lines = textwrap.wrap(f"{caption} {SCALE}", int(14 * self.figure_width))
        extra = (len(title_lines) - 1) * 0.25
        figure_height = extra + self.bottom + len(caption_lines) * LINE + MARGIN
        self.figure.set_figheight(figure_height)

        def place(axes: Axes, left: float, top: float, width: float, height: float) -> None:
            bottom = 1 - (top + height) / figure_height
            axes.set_position((left / self.figure_width, bottom, width / self.figure_width, height / figure_height))

        for axes, left, top in self.panels:
            place(axes, left, top + extra, self.width, self.height)
        texts = ((title_lines, MARGIN / 2, 13, INK), (caption_lines, extra + self.bottom, 9, FAINT))
        for lines, top, size, color in texts:
            text = self.figure.text(MARGIN / self.figure_width, 1 - top / figure_height, "\n".join(lines), va="top")
            text.set(fontsize=size, color=color, parse_math=False)
        bar = self.figure.add_axes((0, 0, 1, 1))
        length = min(LARGE, self.bottom - self.top - GAP, max(self.height, SMALL))
        place(bar, self.figure_width - BAR + GAP, extra + self.top + self.above, 0.12, length)
        # The colors over a mean gray.
        shades = OPACITY * COLORS(np.linspace(1, 0, 256))[:, None, :3] + (1 - OPACITY) * (DARKEST + LIGHTEST) / 2
        bar.imshow(shades, aspect="auto", extent=(0, 1, 0, 1))
        bar.set(xticks=[], yticks=[0, 1])
        bar.set_yticklabels(["0", "max."], fontsize=8, color=FAINT)
        bar.yaxis.tick_right()
        bar.tick_params(length=0, pad=3)
        for spine in bar.spines.values():
            spine.set_visible(False)
        return self.figure


def _set_title(axes: Axes, name: str) -> None:
    axes.set_title(textwrap.shorten(name, 30, placeholder=" …"), fontsize=9, color=INK, loc="left", pad=4)
    axes.title.set_parse_math(False)
