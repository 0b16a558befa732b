"""Ordered processing of blocks by several threads, one per copy of a model."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

B = TypeVar("B")
R = TypeVar("R")
OnBatch = Callable[[int, int], None]
"""called with the finished part of a block and its total"""
BlockWorker = Callable[[B, OnBatch], R]
"""returns the result of a block, and reports its progress"""
# Seconds between two reports while a block is processed.
REPORT_INTERVAL = 0.5
# Seconds to wait for the threads after an error; they stop at the next report of progress.
_JOIN_SECONDS = 10.0


class _Stopped(Exception):
    """Raised inside a worker to end its work early."""


@dataclass
class _Task(Generic[B, R]):
    """A block, and its result once it is available."""

    block: B
    is_done: threading.Event = field(default_factory=threading.Event)
    result: R | None = None
    error: BaseException | None = None
    share: float = 0.0
    """finished share of the block, from 0 to 1"""


def process_blocks(
    blocks: Iterator[B], workers: Sequence[BlockWorker[B, R]], on_wait: Callable[[list[tuple[B, float]]], None]
) -> Generator[tuple[B, R], None, None]:
    """Each block with its result, in the order of `blocks`. Each worker runs in a thread and takes the next block.

    At most one block more than there are workers is read ahead. An error from `blocks` is raised after the results of
    the blocks before it. `on_wait` is called now and then with the blocks in progress and their finished shares.

    >>> list(process_blocks(iter([1, 2, 3]), [lambda block, on_batch: 10 * block] * 2, lambda blocks: None))
    [(1, 10), (2, 20), (3, 30)]
    """
    queue: SimpleQueue[_Task[B, R] | None] = SimpleQueue()
    is_stopped = threading.Event()

    def run(worker: BlockWorker[B, R]) -> None:
        while (task := queue.get()) is not None:
            try:
                task.result = worker(task.block, _share_reporter(task, is_stopped))
            except BaseException as error:
                task.error = error
            task.is_done.set()

    # Daemon threads in a copy of this context, so that settings in context variables apply.
    threads = [threading.Thread(target=copy_context().run, args=(run, worker), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    pending: deque[_Task[B, R]] = deque()
    read_error: Exception | None = None
    has_more = True
    try:
        while has_more or pending:
            while has_more and len(pending) <= len(workers):
                try:
                    task = _Task[B, R](next(blocks))
                except StopIteration:
                    has_more = False
                except Exception as error:
                    has_more, read_error = False, error
                else:
                    pending.append(task)
                    queue.put(task)
            if not pending:
                break
            while not pending[0].is_done.wait(REPORT_INTERVAL):
                on_wait([(task.block, task.share) for task in pending])
            first = pending.popleft()
            if first.error is not None:
                raise first.error
            yield first.block, first.result  # type: ignore[misc]
        if read_error is not None:
            raise read_error
    finally:
        is_stopped.set()
        with contextlib.suppress(Empty):
            while True:
                queue.get_nowait()
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join(_JOIN_SECONDS)


def _share_reporter(task: _Task[B, R], is_stopped: threading.Event) -> OnBatch:
    def on_batch(done: int, total: int) -> None:
        if is_stopped.is_set():
            raise _Stopped
        task.share = done / total

    return on_batch
