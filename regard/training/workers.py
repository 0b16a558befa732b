"""The process group of a run: worker processes that rank 0 starts on this machine, or the ranks of torchrun.

On a CPU, two single-threaded processes are faster than one process with two threads, most of all when another program
uses a core: threads inside an operation synchronize hundreds of times per step, processes once.
"""

import contextlib
import io
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from regard.data.batching.rank_slice import RankSlice
from regard.errors import Interrupted, RegardError

# The program of a worker process. It reads its rank from standard input.
_PROGRAM = "from regard.training.workers import worker_main; worker_main()"
# Long, since the other ranks wait while rank 0 validates; a dead process closes its connection at once.
_TIMEOUT = timedelta(days=7)
# For the exchange of gradients: a host that was switched off, or whose link was cut for longer, does not close it.
UPDATE_TIMEOUT = timedelta(minutes=10)
_BROADCAST_BYTES = 2**28
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass
class Workers:
    """The process group, as used by one of its processes. The default group, on CPU tensors, has no time limit."""

    rank: int = 0
    size: int = 1
    processes: list[subprocess.Popen] = field(default_factory=list)
    """the other processes, if rank 0 started them"""
    store: tempfile.TemporaryDirectory | None = None
    """folder of the file store through which they connect"""
    update_group: Any = None
    """the group that exchanges gradients"""

    timeout: ClassVar[timedelta] = _TIMEOUT
    """time limit of operations that wait for rank 0"""

    @property
    def part(self) -> RankSlice:
        """The part of every batch for this rank."""
        return RankSlice(self.rank, self.size)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all parts of the batch, in place; bit-identical on all ranks."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        with report_dead_ranks():
            dist.all_reduce(flat, group=self.update_group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    def any(self, *flags: bool) -> list[bool]:
        """Whether each flag is set on any rank. Waits for all ranks, without a time limit."""
        if self.size == 1:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.int32)
        with report_dead_ranks():
            dist.all_reduce(counts)
        return [bool(count) for count in counts]

    def wait(self) -> None:
        """Wait for all ranks, without a time limit."""
        self.any(False)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace each CPU tensor by that of rank 0, in place."""
        if self.size > 1:
            with report_dead_ranks():
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), src=0)

    def connect(self, spec: Any) -> None:
        """Send the run specification to the other ranks, each of which calls `run.run_worker`.

        Processes that this one started join the group first.
        """
        if self.size == 1:
            return
        if self.processes:
            self.store = tempfile.TemporaryDirectory(prefix="regard-")
            for rank, process in enumerate(self.processes, 1):
                _send(process, {"rank": rank, "size": self.size, "folder": self.store.name})
            for process in self.processes:
                if not process.stdout.read(1):  # type: ignore[union-attr]
                    raise _start_error(process)
            self.update_group = _join_and_watch(self.size, self.store.name, self.processes)
        self._broadcast_object(spec)

    def receive(self) -> Any:
        """The run specification that rank 0 sends with `connect`."""
        return self._broadcast_object(None)

    def _broadcast_object(self, value: Any) -> Any:
        stream = io.BytesIO()
        if self.rank == 0:
            _Pickler(stream).dump(value)
        content = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8) if self.rank == 0 else None
        length = torch.tensor([0 if content is None else len(content)])
        self.broadcast([length])
        if content is None:
            content = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast(content.split(_BROADCAST_BYTES))
        return value if self.rank == 0 else pickle.loads(content.numpy().data)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        # After an error, the group of a GPU might wait for ranks that no longer answer.
        joined = self.size > 1 or self.update_group is not None
        if joined and dist.is_initialized() and not (error and torch.cuda.is_available()):
            dist.destroy_process_group()
        if self.store is not None:
            self.store.cleanup()


@contextlib.contextmanager
def report_dead_ranks() -> Iterator[None]:
    """Turn the failure of a collective operation, which happens when another rank ended, into a RegardError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RegardError(
            f"A worker process died during training ({_reason(error)}).",
            "Check that there is enough memory; run the same command to resume from the last checkpoint.",
        ) from None


def _reason(error: BaseException) -> str:
    """The first sentence of an error, without the place in the source of gloo.

    >>> _reason(RuntimeError("[/a/gloo/pair.cc:5] Read error [127.0.0.1]:5: Connection reset by peer. This is …"))
    'Read error [127.0.0.1]:5: Connection reset by peer'
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] ", "", line).split(". ")[0]


def torchrun_rank() -> int | None:
    """The rank of this process, if torchrun started it, else None.

    >>> torchrun_rank()
    """
    is_rank = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    return int(os.environ["RANK"]) if is_rank else None


def torchrun_size() -> int:
    """The number of ranks that torchrun started.

    >>> torchrun_size()
    1
    """
    return 1 if torchrun_rank() is None else int(os.environ["WORLD_SIZE"])


def join_torchrun() -> Workers:
    """Join the group of the processes that torchrun started; on a GPU machine, each uses the GPU of its local rank."""
    _check_no_group()
    rank, size, local_rank = torchrun_rank(), torchrun_size(), int(os.environ["LOCAL_RANK"])
    assert rank is not None
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=size, timeout=_TIMEOUT))
    store = _fresh_store(store, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return Workers(rank, size, update_group=dist.new_group(timeout=UPDATE_TIMEOUT, backend=backend))


def _fresh_store(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store without the entries of earlier processes.

    torchrun keeps its store when it restarts the ranks, so the addresses of dead processes are still in it. Each rank
    announces itself under a name that was never used before, and rank 0 offers its own name to all as the prefix until
    they have accepted it.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"rank/{rank}", name)
        prefix = store.get(f"offer/{name}").decode()
        store.set(f"{prefix}/accepted/{rank}", "yes")
        return dist.PrefixStore(prefix, store)
    waiting = list(range(1, size))
    while waiting:
        for other in waiting:
            if store.check([f"rank/{other}"]):
                store.set(f"offer/{store.get(f'rank/{other}').decode()}", name)
        time.sleep(0.02)
        waiting = [other for other in waiting if not store.check([f"{name}/accepted/{other}"])]
    return dist.PrefixStore(name, store)


def start_workers(size: int) -> Workers:
    """Start all workers except this process, or join the ranks of torchrun; `connect` sends them their work.

    Leaving the context ends the started processes.

    >>> with start_workers(1) as workers:
    ...     workers.size
    1
    """
    if torchrun_rank() is not None:
        return join_torchrun()
    if size > 1 and not has_loopback():
        raise RegardError(
            f"There is no loopback network interface, so {size} workers cannot connect.",
            "Enable it (ip link set lo up), or start a new run with --train.workers 1.",
        )
    if size > 1:
        _check_no_group()
    workers = Workers(size=size)
    try:
        for _ in range(1, size):
            workers.processes.append(_start())
    except BaseException:
        workers.__exit__()
        raise
    return workers


def _check_no_group() -> None:
    """Raise an error if the caller has joined a process group: PyTorch has one default group per process."""
    if dist.is_initialized():
        raise RegardError(
            "This process belongs to a process group of its own (torch.distributed).",
            "End it (torch.distributed.destroy_process_group()), or train with workers=1 outside of torchrun.",
        )


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
    """Entry point of a worker process that rank 0 started: join the group, train, and end with rank 0."""
    try:
        received = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # rank 0 ended before sending
        sys.exit(1)
    threading.Thread(target=_exit_with_rank_0, daemon=True).start()
    os.write(sys.stdout.fileno(), b"!")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # rank 0 does not read the pipe any further
    try:
        group = _join(received["rank"], received["size"], received["folder"])
    except RuntimeError:
        sys.exit(2)  # rank 0 gets the same error, or notices the end of this process
    _train(Workers(received["rank"], received["size"], update_group=group))


def run_torchrun_rank() -> None:
    """Train in a process of torchrun other than rank 0, which sends the run specification; end the process on errors.

    Rank 0 reads the data, prints and writes files.
    """
    with join_torchrun() as workers:
        _train(workers)


def _train(workers: Workers) -> None:
    from regard.training.run import run_worker

    try:
        spec = workers.receive()
        if spec is not None:  # None: there is nothing left to train
            run_worker(spec, workers)
    except (RegardError, Interrupted) as error:
        sys.exit(error.exit_code)  # rank 0 raises the same error, which is printed once


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


def _join_and_watch(size: int, folder: str, processes: list[subprocess.Popen]) -> Any:
    """Join the process group in a thread, since joining blocks; meanwhile check the workers and react to Ctrl-C."""
    errors: list[BaseException] = []
    groups: list[Any] = []

    def join() -> None:
        try:
            groups.append(_join(0, size, folder))
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
        raise RegardError(f"The workers could not connect ({_reason(errors[0])}).", "Try again with --train.workers 1.")
    return groups[0]


def _join(rank: int, size: int, folder: str) -> Any:
    """Join the process group and return the group for updates."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if not dist.is_initialized():
        # PyTorch numbers process groups, and processes connect only if their numbers agree. A failed startup leaves
        # the count of rank 0 too high for the new workers of the next run in the same process.
        dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size, timeout=_TIMEOUT
    )
    return dist.new_group(timeout=UPDATE_TIMEOUT)


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
