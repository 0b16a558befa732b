"""Plots of benchmark results."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.bench.measurement import Measurement
from regard.errors import RegardError
from regard.files import write_atomically

if TYPE_CHECKING:
    from regard.bench.bench_report import BenchReport

# The palette of Okabe and Ito, which color-blind readers can distinguish. Regard has the first color.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osDv^Px"
FORMATS = (".png", ".svg", ".pdf")
MAX_PANELS = 12


def plot_report(report: "BenchReport", path: Path) -> None:
    """Save a plot: lines over the length if there are several lengths and few cases, otherwise bars."""
    if path.suffix not in FORMATS:
        raise RegardError(f"{path}: unsupported plot format.", f"Use a file name that ends in {' or '.join(FORMATS)}.")
    rows = [row for row in report.rows if row.seconds is not None]
    if not rows:
        raise RegardError("There are no measurements to plot.", "Leave out --plot.")
    has_lengths = len({row.length for row in rows if row.length is not None}) > 1
    figure = _plot_lines(rows) if has_lengths and len({row.case for row in rows}) <= MAX_PANELS else _plot_bars(rows)
    figure.suptitle(f"{report.benchmark}: {report.ceilings.machine}", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=150)
    write_atomically(path, buffer.getvalue())


def _plot_lines(rows: list[Measurement]) -> Figure:
    """One row of two panels per case (time and memory), with logarithmic axes."""
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.implementation for row in rows))
    figure = Figure(figsize=(10, 0.6 + 2.6 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for case, (times, memories) in zip(cases, panels):
        for index, name in enumerate(names):
            selected = [row for row in rows if row.case == case and row.implementation == name]
            style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "label": name}
            for axes, values in (
                (times, [row.seconds for row in selected]),
                (memories, [_mebibytes(row) for row in selected]),
            ):
                points = [(row.length, value) for row, value in zip(selected, values) if row.length and value]
                if points:
                    axes.plot(*zip(*points), **style)
        _format_axes(times, f"{case}: seconds")
        _format_axes(memories, f"{case}: peak memory, MiB")
    # An implementation may be missing from the first panels.
    lines = {line.get_label(): line for pair in panels for line in pair[0].get_lines()}
    figure.legend(handles=[lines[name] for name in names], loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _mebibytes(row: Measurement) -> float | None:
    return None if row.memory is None else row.memory / 2**20


def _format_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length", fontsize=8)
    axes.grid(alpha=0.3)


def _describe(row: Measurement) -> str:
    return f"{row.case}{'' if row.length is None else f', {row.length}'}: {row.implementation}"


def _plot_bars(rows: list[Measurement]) -> Figure:
    """One horizontal bar per measurement."""
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.implementation for row in rows))
    axes.barh(
        range(len(rows)),
        [row.seconds or 0 for row in rows],
        color=[COLORS[names.index(row.implementation) % len(COLORS)] for row in rows],
    )
    axes.set_yticks(range(len(rows)), [_describe(row) for row in rows], fontsize=7)
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    return figure
