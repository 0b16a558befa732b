"""Iterators over the values that a function passes to a callback."""

from collections.abc import Callable, Iterator
from contextvars import copy_context
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class _Closed(Exception):
    """Raised inside the function when the iterator is closed."""


class _End(NamedTuple):
    error: BaseException | None


def iterate_callback(function: Callable[[Callable[[T], None]], object]) -> Iterator[T]:
    """The values that `function(emit)` passes to `emit`, as they come. Its errors are raised by the iterator.

    The function runs in a thread, at most two values ahead. When the iterator is closed, `emit` raises an exception,
    which ends the function.

    >>> list(iterate_callback(lambda emit: [emit(i) for i in range(3)]))
    [0, 1, 2]
    """
    values: SimpleQueue[T | _End] = SimpleQueue()
    permits: SimpleQueue[None] = SimpleQueue()  # one for each value that may still be computed
    is_closed = Event()

    def emit(value: T) -> None:
        values.put(value)
        permits.get()
        if is_closed.is_set():
            raise _Closed

    def run() -> None:
        error: BaseException | None = None
        try:
            function(emit)
        except BaseException as caught:
            error = caught
        values.put(_End(error))

    # A daemon thread in a copy of this context, so that settings in context variables apply.
    thread = Thread(target=copy_context().run, args=(run,), daemon=True)
    thread.start()
    try:
        permits.put(None)
        while not isinstance(value := values.get(), _End):
            permits.put(None)
            yield value
        if value.error is not None:
            raise value.error
    finally:
        is_closed.set()
        permits.put(None)
        if thread is not current_thread():  # the garbage collector may close the iterator in any thread
            thread.join()
