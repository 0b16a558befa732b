"""Plot of a confusion matrix: a row per true label, a column per predicted label."""

import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from matplotlib import rc_context
from matplotlib.figure import Figure

from regard.viewer.plots.heatmaps import COLORS, FAINT, INK, LINE, STYLE, render

# Inches: maximum side of a cell, maximum side of the matrix, minimum side of a cell with a number.
MAX_CELL, MAX_MATRIX, MIN_NUMBERED_CELL = 0.42, 11.0, 0.26
MARGIN, TITLE, MIN_WIDTH = 0.2, 0.4, 5.0
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
    left, top = MARGIN + label_width, MARGIN + TITLE + label_width
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
