"""Pictures of what was measured."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.bench.measurement import Row
from regard.errors import RegardError
from regard.files import write_whole

if TYPE_CHECKING:
    from regard.bench.bench_report import Report

# Okabe and Ito's colours, which the colour-blind can tell apart; ours is the first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osDv^Px"
FORMS = (".png", ".svg")
MOST_PANELS = 12


def draw(report: "Report", path: Path) -> None:
    """Lines over the length where there are several and not too many cases, otherwise bars."""
    if path.suffix not in FORMS:
        raise RegardError(f"{path}: a plot is written as {' or '.join(FORMS)}.", "Choose such a name.")
    rows = [row for row in report.rows if row.seconds is not None]
    if not rows:
        raise RegardError("Nothing was measured, so there is nothing to draw.", "Leave out --plot.")
    several = len({row.length for row in rows if row.length is not None}) > 1
    figure = _lines(rows) if several and len({row.case for row in rows}) <= MOST_PANELS else _bars(rows)
    figure.suptitle(f"{report.what}: {report.ceilings.machine}", fontsize=9)
    written = io.BytesIO()
    figure.savefig(written, format=path.suffix[1:], dpi=150)
    write_whole(path, written.getvalue())


def _lines(rows: list[Row]) -> Figure:
    """A line of panels for each case: time and memory, both axes logarithmic."""
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.entrant for row in rows))
    figure = Figure(figsize=(10, 0.6 + 2.6 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for case, (times, memories) in zip(cases, panels):
        for number, name in enumerate(names):
            there = [row for row in rows if row.case == case and row.entrant == name]
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "label": name}
            for axes, values in (
                (times, [row.seconds for row in there]),
                (memories, [_mebibytes(row) for row in there]),
            ):
                points = [(row.length, value) for row, value in zip(there, values) if row.length and value]
                if points:
                    axes.plot(*zip(*points), **style)
        _label(times, f"{case}: seconds")
        _label(memories, f"{case}: peak memory, MiB")
    # An entrant may be missing from the first panels.
    drawn = {line.get_label(): line for pair in panels for line in pair[0].get_lines()}
    figure.legend(handles=[drawn[name] for name in names], loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _mebibytes(row: Row) -> float | None:
    return None if row.memory is None else row.memory / 2**20


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length", fontsize=8)
    axes.grid(alpha=0.3)


def _of_row(row: Row) -> str:
    return f"{row.case}{'' if row.length is None else f', {row.length}'}: {row.entrant}"


def _bars(rows: list[Row]) -> Figure:
    """A bar for each row, cases one below the other."""
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.entrant for row in rows))
    axes.barh(
        range(len(rows)),
        [row.seconds or 0 for row in rows],
        color=[COLOURS[names.index(row.entrant) % len(COLOURS)] for row in rows],
    )
    axes.set_yticks(range(len(rows)), [_of_row(row) for row in rows], fontsize=7)
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    return figure
