"""Interruption of a search between its steps, when its result is not wanted any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` between the steps of searches inside; what it raises ends them."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_interruption() -> None:
    """Called between the steps of a search.

    >>> def stop():
    ...     raise TimeoutError("too late")
    >>> with interruptible(stop):
    ...     check_interruption()
    Traceback (most recent call last):
    TimeoutError: too late
    """
    check = _check.get()
    if check is not None:
        check()
