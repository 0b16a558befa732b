"""Reports of a run: a progress bar or log lines, metrics.jsonl, TensorBoard, and the plot of the losses."""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regard.errors import RegardError
from regard.files import write_whole
from regard.training.optim.schedules import format_duration

OnProgress = Callable[[int, int | None], None]
"""called with the amount of work that is done and, if known, the total"""
# Seconds between two log lines about the same work.
EVERY = 10.0


@contextmanager
def progress_bar(what: str) -> Iterator[OnProgress]:
    """A bar on a terminal, from the first call of the callback until the work is done."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    task = shown.add_task(what, total=None)

    def on_progress(done: int, total: int | None) -> None:
        shown.start()
        shown.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        shown.stop()


@contextmanager
def show_progress(what: str, silent: bool = False) -> Iterator[OnProgress]:
    """Progress of some work: a bar on a terminal; in a log a line every ten seconds.

    >>> with show_progress("decoding", silent=True) as on_progress:
    ...     on_progress(1, 20)
    """
    if silent:
        yield lambda done, total: None
    elif Console(stderr=True).is_terminal:
        with progress_bar(what) as on_progress:
            yield on_progress
    else:
        yield _Lines(what)


class _Lines:
    def __init__(self, what: str) -> None:
        self.what, self.since = what, time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        if time.monotonic() - self.since >= EVERY:
            self.since = time.monotonic()
            print(f"{self.what}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)


class Report:
    """Writes the metrics of a run. Every line of metrics.jsonl is one JSON object with its step."""

    def __init__(self, path: Path, steps: int, step: int = 0, silent: bool = False, writes: bool = True) -> None:
        self.path, self.steps, self.silent, self.writes = path, steps, silent, writes
        self.first, self.began = step, time.monotonic()
        if writes:
            self._forget_after(step)
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal and not silent:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
            self.task = self.bar.add_task("training", total=steps, completed=step, note="")
        self.board = _tensorboard(path.parent / "tensorboard") if writes else None

    def _forget_after(self, step: int) -> None:
        """Removes the lines after a resumed run's checkpoint, whose steps are about to be repeated."""
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def add(self, step: int, kind: str, **numbers: float) -> None:
        if not self.writes:
            return
        line = {"step": step, "kind": kind, "seconds": round(time.monotonic() - self.began, 3)} | numbers
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            hint = "What was saved before is intact; the same command resumes from there."
            raise RegardError(f"{self.path}: cannot be written: {error.strerror}.", hint) from None
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        text = f"step {step} of {self.steps}  {kind}  {text}"
        if self.bar is not None:
            if kind == "train":
                self.bar.update(self.task, note=f"loss {numbers['loss']:.3f}")
            else:
                self.bar.console.print(text, highlight=False)
        elif not self.silent:
            print(f"{text}  {self._left(step)}" if kind == "train" else text, file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Moves the bar to this step."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, total=self.steps)

    def _left(self, step: int) -> str:
        """The time left, from the pace since this process began."""
        pace = (time.monotonic() - self.began) / max(1, step - self.first)
        return f"{format_duration(pace * max(0, self.steps - step))} left"

    def say(self, *lines: str) -> None:
        if self.silent:
            return
        for line in lines:
            if self.bar is not None:
                self.bar.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "Report":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without what is not an object with a step, such as a line cut short by a crash."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                lines.append(found)
    return lines


def draw_losses(metrics: list[dict[str, Any]], path: Path, unit: str = "token") -> None:
    """Plots the loss curves of a run."""
    from matplotlib.figure import Figure  # slow to import, and needed only at the end of a run

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, name in (("train", "training"), ("validation", "validation")):
        points = [(line["step"], line["nll"]) for line in metrics if line["kind"] == kind and "nll" in line]
        if points:
            axes.plot(*zip(*points), label=name, marker="o" if kind == "validation" else None, markersize=3)
    axes.set(xlabel="step", ylabel=f"loss per {unit}", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    plot = io.BytesIO()
    figure.savefig(plot, dpi=120)
    write_whole(path, plot.getvalue())


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
