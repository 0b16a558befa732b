"""Worker processes on one machine that train one model, each on its share of every batch.

On a CPU, two single-threaded processes are faster than one process with two threads, most of all when another program
uses a core: threads inside an operation synchronize hundreds of times per step, processes once.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import RegardError

# The program of a worker process. It reads the run specification from standard input.
_PROGRAM = "from regard.training.runtime.workers import worker_main; worker_main()"
# Long, since the other workers wait while rank 0 validates; a dead worker closes its connection at once.
_TIMEOUT = timedelta(days=7)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass
class Workers:
    """The process group, as used by one of its processes; rank 0 starts and ends the others."""

    rank: int = 0
    size: int = 1
    processes: list[subprocess.Popen] = field(default_factory=list)
    store: tempfile.TemporaryDirectory | None = None
    """folder of the file store through which the processes connect"""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers, in place; the result is bit-identical on all workers."""
        self._exchange(tensors, dist.all_reduce)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of rank 0, in place."""
        self._exchange(tensors, lambda flat: dist.broadcast(flat, src=0))

    def _exchange(self, tensors: Sequence[Tensor], operation: Callable[[Tensor], Any]) -> None:
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        try:
            operation(flat)
        except RuntimeError as error:
            raise RegardError(
                f"A worker process died during training ({str(error).splitlines()[0]}).",
                "Check that there is enough memory; run the same command to resume from the last checkpoint.",
            ) from None
        with torch.no_grad():
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(part.view_as(tensor))

    def connect(self, spec: Any) -> None:
        """Send the run specification to the workers, each of which calls `trainer.run_worker`, and join the group."""
        if self.size == 1:
            return
        self.store = tempfile.TemporaryDirectory(prefix="regard-")
        for rank, process in enumerate(self.processes, 1):
            _send(process, {"rank": rank, "size": self.size, "folder": self.store.name, "spec": spec})
        for process in self.processes:
            if not process.stdout.read(1):  # type: ignore[union-attr]
                raise _start_error(process)
        _join_and_watch(self.size, self.store.name, self.processes)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        if self.store is not None:
            self.store.cleanup()


def start_workers(size: int) -> Workers:
    """Start all workers except this process. Leaving the context ends them; `connect` sends them their work.

    >>> with start_workers(1) as workers:
    ...     workers.size
    1
    """
    if size > 1 and not has_loopback():
        raise RegardError(
            f"There is no loopback network interface, so {size} workers cannot connect.",
            "Enable it (ip link set lo up), or start a new run with --train.workers 1.",
        )
    workers = Workers(size=size)
    try:
        for _ in range(1, size):
            workers.processes.append(_start())
    except BaseException:
        workers.__exit__()
        raise
    return workers


def usable_workers(size: int) -> int:
    """The number of workers that can connect: `size`, or 1 (with a note on stderr) without a loopback interface.

    >>> usable_workers(1)
    1
    """
    if size == 1 or has_loopback():
        return size
    print("regard: no loopback network interface; training with 1 worker.", file=sys.stderr)
    return 1


def has_loopback() -> bool:
    """Whether processes on this machine can connect to each other; some containers have no loopback interface."""
    if os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK) != _LOOPBACK:  # another interface was chosen
        return True
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True


def worker_main() -> None:
    """Entry point of a worker process: receive the run specification, train, and end with rank 0."""
    from regard.training.trainer import run_worker

    try:
        received = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # rank 0 ended before sending
        sys.exit(1)
    threading.Thread(target=_exit_with_rank_0, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.write(sys.stdout.fileno(), b"!")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # rank 0 does not read the pipe any further
    try:
        _join(received["rank"], received["size"], received["folder"])
    except RuntimeError:
        sys.exit(2)  # rank 0 gets the same error, or notices the end of this process
    try:
        run_worker(received["spec"], Workers(received["rank"], received["size"]))
    except RegardError:
        sys.exit(2)  # rank 0 raises the same error, which is printed once


def _start() -> subprocess.Popen:
    # In a new session, so that Ctrl-C reaches only rank 0, which then ends the workers.
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        start_new_session=True,
    )


class _Pickler(pickle.Pickler):
    """Pickles a memory-mapped file by name, so that the workers share one copy of decoded images in memory."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.memmap) and _covers_file(value):
            return np.memmap, (value.filename, value.dtype, "r", 0, value.shape)
        return NotImplemented


def _covers_file(array: np.memmap) -> bool:
    try:
        size = os.path.getsize(array.filename) if array.filename else None
    except OSError:  # removed in the meantime
        return False
    return array.flags.c_contiguous and array.nbytes == size


def _send(process: subprocess.Popen, message: dict[str, Any]) -> None:
    """Send a message to a worker. The pipe stays open, so that its end signals the end of rank 0."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the worker is dead; `connect` notices the missing reply
        _Pickler(process.stdin).dump(message)
        process.stdin.flush()


def _join_and_watch(size: int, folder: str, processes: list[subprocess.Popen]) -> None:
    """Join the process group in a thread, since joining blocks; meanwhile check the workers and react to Ctrl-C."""
    errors: list[BaseException] = []

    def join() -> None:
        try:
            _join(0, size, folder)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=join, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        for process in processes:
            if process.poll() is not None:
                raise _start_error(process)
    if errors:
        reason = str(errors[0]).splitlines() or [type(errors[0]).__name__]
        raise RegardError(f"The workers could not connect ({reason[0]}).", "Try again with --train.workers 1.")


def _join(rank: int, size: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if not dist.is_initialized():
        # PyTorch numbers process groups, and processes connect only if their numbers agree. A failed startup leaves
        # the count of rank 0 too high for the new workers of the next run in the same process.
        dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size, timeout=_TIMEOUT
    )


def _start_error(process: subprocess.Popen) -> RegardError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)  # its pipe may close shortly before it ends
    status = f"signal {-process.returncode}" if (process.returncode or 0) < 0 else f"status {process.returncode}"
    return RegardError(
        f"A worker process ended during startup ({status}).",
        "Check that there is enough memory, or try again with --train.workers 1.",
    )


def _exit_with_rank_0() -> None:
    """End this process when rank 0 ends, also by SIGKILL: the system then closes its end of the pipe."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
