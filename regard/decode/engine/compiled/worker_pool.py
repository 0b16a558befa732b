"""Worker processes that decode on a CPU in parallel.

The matrices of a decoding step are too small to divide among threads, and Python threads wait for each other between
operations. Workers are forked, as by PyTorch's data loader: they share the memory of the weights.
"""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from regard.allocator import keep_freed_memory
from regard.errors import RegardError

_Handler = Callable[[Any], Iterator[Any]]


def can_fork() -> bool:
    """Whether worker processes are supported: on Linux, outside of a worker."""
    return sys.platform.startswith("linux") and not _is_worker


_is_worker = False
# The ends of all pipes in this process. A worker closes its copies: an end that stays open in another worker would keep
# the pipe open when this process closes it. The lock: no process is forked between the start and the end of another.
_parent_ends: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_fork_lock = threading.Lock()


class WorkerPool:
    """Processes that run `handler(task)`, a generator, and send what it yields.

    >>> pool = WorkerPool(lambda task: iter([task + 1, task + 2]), 1) if can_fork() else None
    >>> pool is None or (pool.submit(0, 10), list(pool.results(0)))[1] == [11, 12]
    True
    """

    def __init__(self, handler: _Handler, count: int) -> None:
        context = get_context("fork")
        self.connections: list[Connection] = []
        self.processes = []
        self.lock = threading.Lock()
        """held by the thread that uses the workers"""
        for _ in range(count):
            with _fork_lock:
                ours, theirs = context.Pipe()
                _parent_ends.add(ours)
                process = context.Process(target=_work, args=(handler, theirs), daemon=True, name="regard-decode")
                process.start()
                theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        weakref.finalize(self, _close, self.connections)

    def submit(self, worker: int, task: Any) -> None:
        """Start a task in a worker."""
        try:
            self.connections[worker].send(task)
        except OSError:
            raise self._failure(worker) from None

    def poll(self, worker: int) -> bool:
        """Whether a result of the worker is waiting."""
        return self.connections[worker].poll()

    def receive(self, worker: int) -> tuple[bool, Any]:
        """The next result of the worker's task as (True, result), or (False, None) at its end."""
        try:
            kind, value = self.connections[worker].recv()
        except (EOFError, OSError):
            raise self._failure(worker) from None
        if kind == "error":
            raise value
        return kind == "result", value

    def results(self, worker: int) -> Iterator[Any]:
        """All remaining results of the worker's task."""
        while (item := self.receive(worker))[0]:
            yield item[1]

    def close(self) -> None:
        """Stop the workers."""
        _close(self.connections)
        for process in self.processes:
            process.terminate()
            process.join()

    def _failure(self, worker: int) -> RegardError:
        process = self.processes[worker]
        process.join(timeout=5)
        self.close()
        return RegardError(
            f"A decoding worker stopped (exit code {process.exitcode}).",
            "The machine may be out of memory: close other programs, or use one worker with OMP_NUM_THREADS=1.",
        )


def _close(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()


def _work(handler: _Handler, connection: Connection) -> None:
    """Entry point of a worker: run tasks until the parent closes the connection."""
    global _is_worker
    _is_worker = True
    for other in list(_parent_ends):
        other.close()
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what happens
    torch.set_num_threads(1)
    try:
        while True:
            task = connection.recv()
            try:
                for result in handler(task):
                    connection.send(("result", result))
                connection.send(("end", None))
            except RegardError as error:
                connection.send(("error", error))
    except (EOFError, OSError):
        pass
    os._exit(0)  # without running the parent's exit handlers
