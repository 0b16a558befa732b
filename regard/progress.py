"""Progress of long work: a bar on a terminal, lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

OnProgress = Callable[[int, int | None], None]
"""called with the number of items that are done and, if known, the total"""
# Seconds between two progress lines in a log.
LOG_INTERVAL = 10.0


@dataclass(frozen=True)
class FileProgress:
    """Progress of the work on a file.

    >>> print(FileProgress(items=12288, share=0.34, items_per_second=5012.0, seconds_left=46.0))
    12,288 lines (34%), 5,012 lines/s, 0:00:46 left
    """

    items: int
    """finished lines"""
    share: float | None
    """finished share of the file, from 0 to 1; None if unknown"""
    items_per_second: float
    seconds_left: float | None

    def __str__(self) -> str:
        share = "" if self.share is None else f" ({self.share:.0%})"
        left = "" if self.seconds_left is None else f", {timedelta(seconds=round(self.seconds_left))} left"
        return f"{self.items:,} lines{share}, {self.items_per_second:,.0f} lines/s{left}"


@contextmanager
def progress_bar(description: str) -> Iterator[OnProgress]:
    """Yield a callback that shows a progress bar on the terminal, from its first call until the context ends."""
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=None)

    def on_progress(done: int, total: int | None) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        bar.stop()


@contextmanager
def show_progress(description: str, silent: bool = False) -> Iterator[OnProgress]:
    """Yield a callback that shows progress: a bar on a terminal, a line every ten seconds in a log.

    >>> with show_progress("decoding", silent=True) as on_progress:
    ...     on_progress(1, 20)
    """
    if silent:
        yield lambda done, total: None
    elif Console(stderr=True).is_terminal:
        with progress_bar(description) as on_progress:
            yield on_progress
    else:
        yield _ProgressLines(description)


@contextmanager
def show_file_progress(description: str, silent: bool = False) -> Iterator[Callable[[FileProgress], None]]:
    """Yield a callback that shows the progress of the work on a file, like `show_progress`, with rate and time left.

    >>> with show_file_progress("translating", silent=True) as on_progress:
    ...     on_progress(FileProgress(1, 0.5, 1.0, 1.0))
    """
    if silent:
        yield lambda progress: None
    elif Console(stderr=True).is_terminal:
        columns = (TextColumn(description), BarColumn(), TextColumn("{task.fields[text]}"))
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(description, total=None, text="")

        def update_bar(progress: FileProgress) -> None:
            bar.start()
            total = None if progress.share is None else 1.0
            bar.update(task, completed=progress.share or 0.0, total=total, text=str(progress))

        try:
            yield update_bar
        finally:
            bar.stop()
    else:
        lines = _ProgressLines(description)
        yield lambda progress: lines.show(str(progress))


class _ProgressLines:
    def __init__(self, description: str) -> None:
        self.description, self.last_line = description, time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        self.show(f"{done:,}" + (f" of {total:,}" if total else ""))

    def show(self, text: str) -> None:
        """Print a line if the last one is long enough ago."""
        if time.monotonic() - self.last_line >= LOG_INTERVAL:
            self.last_line = time.monotonic()
            print(f"{self.description}: {text}", file=sys.stderr, flush=True)
