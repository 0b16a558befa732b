"""Plots with matplotlib, without its global state: heat maps, overlays of patches, confusion matrices."""

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float, Int, UInt8
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from regard.viewer.rollout import PatchCoordinates

# White is 0. A single hue with decreasing lightness works for color-blind readers and in black and white.
COLORS = LinearSegmentedColormap.from_list("regard", ["#ffffff", "#c9e1f2", "#74b3d8", "#2676b8", "#0a2f66"])
INK, FAINT, LINE = "#1b1f24", "#6a737d", "#d0d7de"
# Each character is drawn in the first installed font that has it.
FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Arial Unicode MS")
STYLE: Any = {
    "font.family": [font for font in FONTS if font in font_manager.get_font_names()],
    "svg.fonttype": "none",  # keep text as text: searchable, and any script can be displayed
    "svg.hashsalt": "regard",
    "pdf.fonttype": 42,  # the font itself, so that text can be searched and edited
}
_UNDATED: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
# Cells up to which the numbers are written into them.
MAX_NUMBERED_CELLS = 400
# Tokens along an axis up to which each has a label and cells of its own, in a plot and in a small map.
MAX_LABELS, MAX_SMALL_LABELS = 400, 128
_UNIT = "\nIn percent: every row sums to 100."
CAPTIONS = {
    "self": "Self-attention: one row per token of the input." + _UNIT,
    "masked": "Masked self-attention: one row per token; no row attends to later tokens." + _UNIT,
    "cross": "Cross-attention: one row per predicted token, one column per source token." + _UNIT,
    "question": "Attention from the question to the context.\nIn percent of all tokens of the text.",
}


class HeadPanels(NamedTuple):
    """The weights of an attention per head, and the tokens along its axes."""

    name: str
    weights: Float[np.ndarray, "H T S"]
    rows: Sequence[str]
    columns: Sequence[str]


@rc_context(STYLE)
def plot_heat_map(
    weights: Float[np.ndarray, "T S"],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    kind: str,
    file_format: str,
    note: str = "",
) -> bytes:
    """Plot one map with tokens along both axes, and numbers in the cells of a small map; `note` ends the caption."""
    T, S = weights.shape
    cell = min(0.6, 20 / max(T, S))  # inches
    size = max(3.0, min(12.0, 20 * cell))  # points
    left, top = (0.3 + size / 100 * _max_length(labels) for labels in (rows, columns))
    figure = _figure(max(5.2, left + S * cell + 1.0), max(3.0, top + T * cell + 1.1))
    axes = figure.subplots()
    image = _draw(axes, weights)
    _label(axes, rows, columns, size)
    axes.set_xticks(np.arange(0.5, S - 1), minor=True)
    axes.set_yticks(np.arange(0.5, T - 1), minor=True)
    axes.grid(which="minor", color=LINE, linewidth=0.4)
    axes.tick_params(which="minor", length=0)
    axes.xaxis.tick_top()
    if _max_length(columns) > 2:
        for label in axes.get_xticklabels():
            label.set(rotation=45, ha="left", rotation_mode="anchor")
    if T * S <= MAX_NUMBERED_CELLS:
        _write_numbers(axes, weights, size=min(9.0, 15 * cell))
    caption = "\n".join(filter(None, (CAPTIONS[kind], note)))
    axes.set_xlabel(caption, fontsize=9, color=FAINT, loc="left", labelpad=10, parse_math=False)
    figure.suptitle(title, fontsize=13, color=INK, x=0.02, ha="left", parse_math=False)
    bar = figure.colorbar(
        image,
        ax=axes,
        fraction=0.05,
        pad=0.03,
        shrink=min(1.0, 3.0 / (T * cell)),
        ticks=[0, 0.5, 1],
        format=PercentFormatter(1),
    )
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, labelcolor=FAINT, length=0)
    return render(figure, file_format)


@rc_context(STYLE)
def plot_overview(title: str, attentions: Sequence[HeadPanels], file_format: str) -> bytes:
    """Plot a small map per head: one row per attention, one column per head."""
    heads = max(len(attention.weights) for attention in attentions)
    side, gap = 1.9, 0.3  # inches
    labels = [piece for attention in attentions for piece in (*attention.rows, *attention.columns)]
    margin = 0.2 + 0.065 * _max_length(labels)
    heights = [
        side * len(attention.rows) / max(len(attention.rows), len(attention.columns)) + margin + gap
        for attention in attentions
    ]
    figure = _figure(max(6.0, margin + heads * (side + gap)), sum(heights) + 0.8)
    grid = figure.add_gridspec(len(attentions), heads, height_ratios=heights)
    for i, attention in enumerate(attentions):
        size = max(1.5, min(7.0, 90 * side / max(len(attention.rows), len(attention.columns)) / 2))
        for head, weights in enumerate(attention.weights):
            axes = figure.add_subplot(grid[i, head])
            _draw(axes, weights)
            _label(axes, attention.rows if head == 0 else [], attention.columns, size)
            for label in axes.get_xticklabels():
                label.set(rotation=90)
            axes.set_title(
                f"{attention.name}, head {head}" if head == 0 else f"head {head}", fontsize=8, color=INK, loc="left"
            )
    figure.suptitle(title, fontsize=13, color=INK, x=0.02, ha="left", parse_math=False)
    return render(figure, file_format)


@rc_context(STYLE)
def plot_side_by_side(title: str, attentions: Sequence[HeadPanels], file_format: str) -> bytes:
    """Plot the first head of each attention side by side, up to four per row."""
    columns = min(4, len(attentions))
    rows = -(-len(attentions) // columns)
    side = 3.2  # inches
    figure = _figure(columns * side, rows * side + 0.6)
    for index, attention in enumerate(attentions):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw(axes, attention.weights[0])
        _label(
            axes,
            attention.rows,
            attention.columns,
            max(1.5, min(9.0, 110 / max(len(attention.rows), len(attention.columns)))),
        )
        for label in axes.get_xticklabels():
            label.set(rotation=90)
        name = attention.name if len(attention.name) <= 40 else attention.name[:39] + "…"
        axes.set_title(name, fontsize=10, color=INK, loc="left", parse_math=False)
    figure.suptitle(title, fontsize=13, color=INK, x=0.02, ha="left", parse_math=False)
    return render(figure, file_format)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _draw(axes: Axes, weights: Float[np.ndarray, "T S"]) -> Any:
    image = axes.imshow(weights, cmap=COLORS, vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest")
    axes.tick_params(length=0, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_color(LINE)
    return image


def _label(axes: Axes, rows: Sequence[str], columns: Sequence[str], size: float) -> None:
    axes.set_yticks(range(len(rows)), [_visible(row) for row in rows], fontsize=size)
    axes.set_xticks(range(len(columns)), [_visible(column) for column in columns], fontsize=size)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # $ is a plain character


def _write_numbers(axes: Axes, weights: Float[np.ndarray, "T S"], size: float) -> None:
    """Write the weights in percent; those that round to 0 are left out."""
    for (row, column), weight in np.ndenumerate(weights):
        if weight >= 0.005:
            color = "white" if weight > 0.55 else INK
            axes.text(column, row, f"{100 * weight:.0f}", ha="center", va="center", fontsize=size, color=color)


def _visible(token: str) -> str:
    """The token, or a space symbol for white space."""
    return token if token.strip() else "␣"


def _max_length(labels: Sequence[str]) -> int:
    return max((len(label) for label in labels), default=0)


def render(figure: Figure, file_format: str) -> bytes:
    """The figure as a file; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # No installed font has the script: a PNG shows boxes, an SVG uses the fonts of its reader.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format=file_format, dpi=160, metadata=_UNDATED.get(file_format))
    return buffer.getvalue()


# Overlays of patches. Each patch is drawn in one color: an interpolated map would show shapes that the model does not
# compute. The image is gray, so that all colors come from weights. The colormap is viridis: perceptually uniform,
# readable for color-blind people, and brighter is larger in black and white.
OVERLAY_COLORS = matplotlib.colormaps["viridis"]
# Opacity of the colors over the image, whose gray values are compressed to this range.
OPACITY, DARKEST, LIGHTEST = 0.65, 0.1, 0.8
LUMA = (0.299, 0.587, 0.114)
SCALE = "Each panel is scaled from 0 to its own maximum."
# Inches: the longer side of a panel in a plot with few and with many panels.
LARGE, SMALL = 2.3, 1.15
MARGIN, GAP, PANEL_TITLE, CAPTION_LINE, BAR = 0.2, 0.12, 0.2, 0.17, 0.7

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
    >>> np.allclose(colored[0, 3], OPACITY * np.array(OVERLAY_COLORS(1.0)[:3]) + (1 - OPACITY) * DARKEST)
    True
    """
    gray = (pixels @ np.array(LUMA) if pixels.shape[2] == 3 else pixels[..., 0]) / 255
    scaled = weights / max(weights.max(), np.finfo(weights.dtype).tiny)
    patch = len(pixels) // len(weights)
    colors = OVERLAY_COLORS(scaled)[..., :3].repeat(patch, axis=0).repeat(patch, axis=1)
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
        self.above, self.left, self.top = above, MARGIN + left, MARGIN + PANEL_TITLE + top
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
        figure_height = extra + self.bottom + len(caption_lines) * CAPTION_LINE + MARGIN
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
        shades = (
            OPACITY * OVERLAY_COLORS(np.linspace(1, 0, 256))[:, None, :3] + (1 - OPACITY) * (DARKEST + LIGHTEST) / 2
        )
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


# Confusion matrices, in inches: maximum side of a cell and of the matrix, minimum side of a cell with a number.
MAX_CELL, MAX_MATRIX, MIN_NUMBERED_CELL = 0.42, 11.0, 0.26
MATRIX_TITLE, MIN_WIDTH = 0.4, 5.0
# Characters per label.
MAX_LABEL = 28


@rc_context(STYLE)
def draw_confusion(
    counts: Int[np.ndarray, "V V"], labels: Sequence[str], title: str, items: str, file_format: str
) -> bytes:
    """Plot how often items of one label (rows) got another as prediction (columns), in percent of each row.

    `items` is the plural noun for the caption, such as "images".
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = min(MAX_CELL, MAX_MATRIX / len(labels))
    size = max(2.5, min(9.0, 55 * cell))  # points
    names = [textwrap.shorten(label, MAX_LABEL, placeholder=" …") or label[:MAX_LABEL] for label in labels]
    label_width = 0.15 + max(map(len, names)) * size * 0.0093
    side = cell * len(labels)
    left, top = MARGIN + label_width, MARGIN + MATRIX_TITLE + label_width
    width = max(MIN_WIDTH, left + side + MARGIN)
    caption = (
        f"One row per true label: predicted labels of its {items}, in percent. Rows of labels without any are empty."
    )
    title_lines, caption_lines = textwrap.wrap(title, int(8.5 * width)), textwrap.wrap(caption, int(14 * width))
    top += 0.25 * (len(title_lines) - 1)
    height = top + side + 0.15 + 0.17 * len(caption_lines) + MARGIN
    figure = Figure(figsize=(width, height), facecolor="white")
    for lines, y, points, color in ((title_lines, 0.1, 13, INK), (caption_lines, top + side + 0.15, 9, FAINT)):
        text = figure.text(MARGIN / width, 1 - y / height, "\n".join(lines), fontsize=points, color=color, va="top")
        text.set_parse_math(False)
    axes = figure.add_axes((left / width, 1 - (top + side) / height, side / width, side / height))
    axes.imshow(shares, cmap=COLORS, vmin=0.0, vmax=1.0, interpolation="nearest", aspect="equal")
    axes.set_xticks(range(len(names)), names, fontsize=size, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(0.5, len(names) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(names) - 1), minor=True)
    axes.grid(which="minor", color=LINE, linewidth=0.4)
    axes.tick_params(which="both", length=0, labelcolor=INK)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    for spine in axes.spines.values():
        spine.set_color(LINE)
    if cell >= MIN_NUMBERED_CELL:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                color = "white" if share > 0.55 else INK
                axes.text(
                    column,
                    row,
                    f"{100 * share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=min(8, 27 * cell),
                    color=color,
                )
    return render(figure, file_format)
