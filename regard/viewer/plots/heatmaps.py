"""Heat maps of attention weights (matplotlib, without its global state). Darker is larger."""

import io
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

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
    heads = max(len(one.weights) for one in attentions)
    side, gap = 1.9, 0.3  # inches
    labels = [piece for one in attentions for piece in (*one.rows, *one.columns)]
    margin = 0.2 + 0.065 * _max_length(labels)
    heights = [side * len(one.rows) / max(len(one.rows), len(one.columns)) + margin + gap for one in attentions]
    figure = _figure(max(6.0, margin + heads * (side + gap)), sum(heights) + 0.8)
    grid = figure.add_gridspec(len(attentions), heads, height_ratios=heights)
    for i, one in enumerate(attentions):
        size = max(1.5, min(7.0, 90 * side / max(len(one.rows), len(one.columns)) / 2))
        for head, weights in enumerate(one.weights):
            axes = figure.add_subplot(grid[i, head])
            _draw(axes, weights)
            _label(axes, one.rows if head == 0 else [], one.columns, size)
            for label in axes.get_xticklabels():
                label.set(rotation=90)
            axes.set_title(
                f"{one.name}, head {head}" if head == 0 else f"head {head}", fontsize=8, color=INK, loc="left"
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
    for index, one in enumerate(attentions):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw(axes, one.weights[0])
        _label(axes, one.rows, one.columns, max(1.5, min(9.0, 110 / max(len(one.rows), len(one.columns)))))
        for label in axes.get_xticklabels():
            label.set(rotation=90)
        name = one.name if len(one.name) <= 40 else one.name[:39] + "…"
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
    axes.set_yticks(range(len(rows)), [_visible(one) for one in rows], fontsize=size)
    axes.set_xticks(range(len(columns)), [_visible(one) for one in columns], fontsize=size)
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
