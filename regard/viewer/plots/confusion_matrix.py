"""What was taken for what: a row for each label that is right, a column for each that was given."""

import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from matplotlib import rc_context
from matplotlib.figure import Figure

from regard.viewer.plots.heatmaps import COLOURS, FAINT, INK, LINE, STYLE, render

# Inches: the side of a cell at most, of all cells together at most, of one in which a number can be read.
CELL, WHOLE, READABLE = 0.42, 11.0, 0.26
MARGIN, TITLE, NARROWEST, LONGEST = 0.2, 0.4, 5.0, 28


@rc_context(STYLE)
def draw_confusion(counts: Int[np.ndarray, "V V"], labels: Sequence[str], title: str, what: str, form: str) -> bytes:
    """A picture of how often what has one label (rows) was given another (columns), in percent of each row.

    `what` are the things that have labels, such as "pictures".
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = min(CELL, WHOLE / len(labels))
    size = max(2.5, min(9.0, 55 * cell))  # points
    names = [textwrap.shorten(label, LONGEST, placeholder=" …") or label[:LONGEST] for label in labels]
    beside = 0.15 + max(map(len, names)) * size * 0.0093
    side = cell * len(labels)
    left, top = MARGIN + beside, MARGIN + TITLE + beside
    wide = max(NARROWEST, left + side + MARGIN)
    says = f"A row for each label: what its {what} were taken for, in percent; those of a label without any are empty."
    named, told = textwrap.wrap(title, int(8.5 * wide)), textwrap.wrap(says, int(14 * wide))
    top += 0.25 * (len(named) - 1)
    high = top + side + 0.15 + 0.17 * len(told) + MARGIN
    figure = Figure(figsize=(wide, high), facecolor="white")
    for lines, place, points, colour in ((named, 0.1, 13, INK), (told, top + side + 0.15, 9, FAINT)):
        text = figure.text(MARGIN / wide, 1 - place / high, "\n".join(lines), fontsize=points, color=colour, va="top")
        text.set_parse_math(False)
    axes = figure.add_axes((left / wide, 1 - (top + side) / high, side / wide, side / high))
    axes.imshow(shares, cmap=COLOURS, vmin=0.0, vmax=1.0, interpolation="nearest", aspect="equal")
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
    if cell >= READABLE:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                colour = "white" if share > 0.55 else INK
                axes.text(
                    column,
                    row,
                    f"{100 * share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=min(8, 27 * cell),
                    color=colour,
                )
    return render(figure, form)
