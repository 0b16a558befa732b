"""Progress of long work: a bar on a terminal, lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

OnProgress = Callable[[int, int | None], None]
"""called with the number of items that are done and, if known, the total"""
# Seconds between two progress lines in a log.
LOG_INTERVAL = 10.0


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
def show_status(description: str, silent: bool = False) -> Iterator[Callable[[str, float | None], None]]:
    """Yield a callback that shows a text, such as rate and time left, and a finished share, like `show_progress`.

    >>> with show_status("translating", silent=True) as on_status:
    ...     on_status("500 lines/s, 0:00:10 left", 0.5)
    """
    if silent:
        yield lambda text, share: None
    elif Console(stderr=True).is_terminal:
        columns = (TextColumn(description), BarColumn(), TextColumn("{task.fields[text]}"))
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(description, total=None, text="")

        def update_bar(text: str, share: float | None) -> None:
            bar.start()
            bar.update(task, completed=share or 0.0, total=None if share is None else 1.0, text=text)

        try:
            yield update_bar
        finally:
            bar.stop()
    else:
        lines = _ProgressLines(description)
        yield lambda text, share: lines.show(text)


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
