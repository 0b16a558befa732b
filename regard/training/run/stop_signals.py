"""Signals that end a run after a checkpoint: Ctrl-C, and the signals of a cluster before its time limit."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import Interrupted, Preempted

# SIGUSR1 does not exist on Windows.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGINT, SIGTERM and SIGUSR1 append their number; a second SIGINT raises KeyboardInterrupt.

    An update must not be interrupted, so the signal is only recorded, and the training loop checks the list. A cluster
    may send SIGTERM while the run still saves because of SIGUSR1, so these two never interrupt.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def record(number: int, _frame: Any) -> None:
        signals.append(number)
        if number == signal.SIGINT and len(signals) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, record) for number in _SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupted_error(number: int, step: int | None, out: Path) -> Interrupted:
    """The error that ends a run after a signal; its exit code is 130 for Ctrl-C and 75 otherwise.

    >>> interrupted_error(signal.SIGTERM, 500, Path("model")).exit_code
    75
    """
    kind = Interrupted if number == signal.SIGINT else Preempted
    return kind(
        f"Interrupted; everything up to step {step} is saved in {out}.",
        "Run the same command to resume.",
    )
