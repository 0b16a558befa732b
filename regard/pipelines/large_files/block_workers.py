"""Ordered processing of blocks by several threads, one per copy of a model, here or on another machine."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from regard.errors import RegardError

B = TypeVar("B")
R = TypeVar("R")
OnBatch = Callable[[int, int], None]
"""called with the finished part of a block and its total"""
BlockWorker = Callable[[B, OnBatch], R]
"""returns the result of a block, and reports its progress"""
# A block is given up after it was lost this often: it is probably what ends the workers.
MAX_LOSSES = 5
# Seconds between two reports while a block is processed.
REPORT_INTERVAL = 0.5
# Seconds to wait for the threads after an error; they stop at the next report of progress.
_JOIN_SECONDS = 10.0


class _Stopped(Exception):
    """Raised inside a worker to end its work early."""


class WorkerLost(Exception):
    """Raised by a worker that died, or that cannot be reached: another one processes its block."""


@dataclass
class _Task(Generic[B, R]):
    """A block, and its result once it is available."""

    block: B
    is_done: threading.Event = field(default_factory=threading.Event)
    result: R | None = None
    error: BaseException | None = None
    share: float = 0.0
    """finished share of the block, from 0 to 1"""
    losses: int = 0
    """number of workers that were lost while they processed the block"""


def process_blocks(
    blocks: Iterator[B], workers: Sequence[BlockWorker[B, R]], on_wait: Callable[[list[tuple[B, float]]], None]
) -> Generator[tuple[B, R], None, None]:
    """Each block with its result, in the order of `blocks`. Each worker runs in a thread and takes the next block.

    At most one block more than there are workers is read ahead. An error from `blocks` is raised after the results of
    the blocks before it. `on_wait` is called now and then with the blocks in progress and their finished shares.

    A worker may have a method `wait_until_ready(is_stopped)`, which is called before its first block and after a
    `WorkerLost`; it returns once the worker can take a block, or `is_stopped()`.

    >>> list(process_blocks(iter([1, 2, 3]), [lambda block, on_batch: 10 * block] * 2, lambda blocks: None))
    [(1, 10), (2, 20), (3, 30)]
    """
    queue: SimpleQueue[_Task[B, R] | None] = SimpleQueue()
    is_stopped = threading.Event()

    def run(worker: BlockWorker[B, R]) -> None:
        while True:
            error = _wait_until_ready(worker, is_stopped)
            while (task := queue.get()) is not None:
                if error is not None:
                    task.error = error
                elif _is_lost(task, worker, is_stopped):
                    queue.put(task)
                    break
                task.is_done.set()
            else:
                return

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


def _wait_until_ready(worker: BlockWorker[B, R], is_stopped: threading.Event) -> Exception | None:
    """Wait for a worker. Returns the error if it cannot start."""
    try:
        if hasattr(worker, "wait_until_ready"):
            worker.wait_until_ready(is_stopped.is_set)
    except Exception as error:
        return error
    return None


def _is_lost(task: _Task[B, R], worker: BlockWorker[B, R], is_stopped: threading.Event) -> bool:
    """Process a task. Returns True if the worker is lost, so that the task must be processed again."""
    try:
        task.result = worker(task.block, _share_reporter(task, is_stopped))
    except WorkerLost as error:
        task.losses, task.share = task.losses + 1, 0.0
        if task.losses < MAX_LOSSES:
            return True
        task.error = RegardError(
            f"{task.losses} workers were lost, one after another, with the same block: {error}.",
            "Check the memory of the machines.",
        )
    except BaseException as error:
        task.error = error
    return False


def _share_reporter(task: _Task[B, R], is_stopped: threading.Event) -> OnBatch:
    def on_batch(done: int, total: int) -> None:
        if is_stopped.is_set():
            raise _Stopped
        task.share = done / total

    return on_batch
