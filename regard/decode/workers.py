"""Worker processes that decode on a CPU in parallel.

The matrices of a decoding step are too small to divide among threads, and Python threads wait for each other between
operations. A worker is a new interpreter, not a fork of this process, which may have threads, locks and signal
handlers; it starts while this process decodes, and receives the weights in shared memory.
"""

import io
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, reduction
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.allocator import keep_freed_memory
from regard.decode.request import NBest
from regard.decode.slots import DecodingJob
from regard.errors import RegardError

# Seconds between two signs of life of a worker, and without one until its sentences are decoded here.
HEARTBEAT, MAX_SILENCE = 1.0, 60.0
# Seconds between two messages with results.
RESULTS_INTERVAL = 0.1
# Models that a worker keeps.
KEPT_MODELS = 2
# Fewer sentences are not worth handing out.
MIN_SHARE = 4
# Tensors in shared memory begin at multiples of this many bytes.
_ALIGNMENT = 64
_CODE = "import sys; sys.path[:] = {path}; from regard.decode.workers import main; main({descriptor})"


class SharedModel:
    """A model whose tensors are in shared memory; the rest of it is pickled."""

    count = 0

    def __init__(self, model: Any) -> None:
        SharedModel.count += 1
        self.number = SharedModel.count
        tensors: list[Tensor] = []
        indices: dict[int, int] = {}

        class Pickler(pickle.Pickler):
            def persistent_id(self, item: Any) -> Any:
                if not isinstance(item, Tensor):
                    return None
                if id(item) not in indices:
                    indices[id(item)] = len(tensors)
                    tensors.append(item)
                return indices[id(item)]

        stream = io.BytesIO()
        Pickler(stream).dump(model)
        self.pickled = stream.getvalue()
        self.layout: list[tuple[int, torch.dtype, tuple[int, ...], bool]] = []
        end = 0
        for tensor in tensors:
            self.layout.append((end, tensor.dtype, tuple(tensor.shape), isinstance(tensor, nn.Parameter)))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.size = max(end, 1)
        self.descriptor = _make_memory(self.size)
        weakref.finalize(self, os.close, self.descriptor)
        with mmap.mmap(self.descriptor, self.size) as memory:
            for tensor, (start, *_) in zip(tensors, self.layout):
                if tensor.nbytes:
                    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                    memory[start : start + tensor.nbytes] = values.data

    @staticmethod
    def load(pickled: bytes, layout: list[tuple[int, torch.dtype, tuple[int, ...], bool]], memory: mmap.mmap) -> Any:
        """The model, given its description and its memory."""
        tensors = []
        for start, dtype, shape, is_parameter in layout:
            count = torch.Size(shape).numel()
            flat = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=start) if count else torch.empty(0).to(dtype)
            )
            tensor = flat.reshape(shape)
            tensors.append(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, index: Any) -> Tensor:
                return tensors[index]

        return Unpickler(io.BytesIO(pickled)).load()


def _make_memory(size: int) -> int:
    """A descriptor of memory that has no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("regard-weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class RefusedError(Exception):
    """A worker cannot decode with this model, for example because it lacks a class of the main program."""


class Worker:
    """A worker process, seen from this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = [folder or os.getcwd() for folder in sys.path]
        code = _CODE.format(path=path, descriptor=theirs.fileno())
        with theirs:
            # A session of its own: Ctrl-C is sent to this process alone, which decides what happens.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.connection = connection.Connection(ours.detach())
        self.is_ready = False
        self.models: list[int] = []
        """numbers of the models that it has, the latest last"""
        self.sentences: dict[int, int] = {}
        """index in the job of each sentence that it decodes, by index in its part"""
        self.last_sign = time.monotonic()

    def start(self, model: SharedModel, job: DecodingJob, indices: list[int], budget: int) -> None:
        """Begin to decode these sentences of a job."""
        if model.number in self.models:
            self.models.remove(model.number)
        else:
            self.connection.send(("model", model.number, model.size, model.pickled, model.layout))
            reduction.send_handle(self.connection, model.descriptor, self.process.pid)
        self.models = [*self.models, model.number][-KEPT_MODELS:]
        self.sentences = dict(enumerate(indices))
        self.last_sign = time.monotonic()
        self.connection.send(("job", model.number, self.models, job.part(indices), budget))

    def receive(self, deliver: Callable[[int, NBest], None]) -> None:
        """Read what the worker has sent. Raises an OSError if it has ended or is silent."""
        while self.connection.poll():
            kind, *values = self.connection.recv()
            self.last_sign = time.monotonic()
            if kind == "ready":
                self.is_ready = True
            elif kind == "results":
                for index, n_best in values[0]:
                    deliver(self.sentences.pop(index), n_best)
            elif kind == "refused":
                raise RefusedError
            elif kind == "error":
                raise values[0]
        if self.sentences and time.monotonic() - self.last_sign > MAX_SILENCE:
            raise TimeoutError

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class _Pool:
    """The workers of this process."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.lock = threading.Lock()
        """held by the thread that uses the workers"""
        self.models: WeakKeyDictionary[nn.Module, tuple[Any, SharedModel | None]] = WeakKeyDictionary()

    def share(self, model: Any, key: Any, member: nn.Module) -> SharedModel | None:
        """The model in shared memory, kept with `member` while `key` is the same; None if it cannot be pickled."""
        known, shared = self.models.get(member, (None, None))
        if known != key:
            try:
                shared = SharedModel(model)
            except (pickle.PicklingError, AttributeError, TypeError, OSError):
                shared = None
            self.models[member] = key, shared
        return shared

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


_pool = _Pool()
# The end of this process ends the workers, however it comes about: their connection is closed.
weakref.finalize(_pool, _pool.close)


def _forget_workers() -> None:
    """In a forked process: the workers belong to its parent."""
    inherited = _pool.workers
    _pool.__init__()  # type: ignore[misc]
    for worker in inherited:
        worker.connection.close()
        worker.process.returncode = 0  # not a child of this process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


@contextmanager
def acquire_workers(count: int) -> Iterator[list[Worker]]:
    """`count` workers of this process, which are started where they do not run.

    None if this process cannot have any, or while another thread has them.
    """
    pool, lock = _pool, _pool.lock
    can_start = hasattr(socket, "send_fds") and bool(sys.executable)
    if not can_start or not lock.acquire(blocking=False):
        yield []
        return
    try:
        pool.workers = [worker for worker in pool.workers if worker.process.poll() is None]
        try:
            while len(pool.workers) < count:
                pool.workers.append(Worker())
        except OSError:
            pass  # no more processes can be started
        yield pool.workers[:count]
    except BaseException:
        # Workers may be in the middle of a job: the next call starts new ones.
        pool.close()
        raise
    finally:
        lock.release()


def decode_in_parallel(
    model: Any, key: Any, member: nn.Module, job: DecodingJob, budget: int, count: int, run_job: Callable[..., None]
) -> None:
    """Decode a job in this process and `count` workers; a worker takes part as soon as it is ready.

    `key` changes with the weights of the model, and `member` is a module that lives as long as it. `run_job` decodes in
    this process. The sentences of a worker that ends are decoded here.
    """
    deliver = job.on_result
    assert deliver is not None
    with acquire_workers(count) as workers:
        shared = _pool.share(model, key, member) if workers else None
        lost: list[int] = []

        def receive() -> None:
            for worker in list(workers):
                try:
                    worker.receive(deliver)
                except (RefusedError, EOFError, OSError) as error:
                    lost.extend(worker.sentences.values())
                    worker.sentences = {}
                    workers.remove(worker)
                    if isinstance(error, RefusedError):
                        _pool.models[member] = key, None
                    else:
                        worker.close()

        def hand_out() -> None:
            """Divide the sentences that are left among this process and the workers that are ready and idle."""
            idle = [worker for worker in workers if worker.is_ready and not worker.sentences]
            if shared is None or len(job.pending) < MIN_SHARE * (len(idle) + 1):
                return
            parts = [job.pending[i :: len(idle) + 1] for i in range(len(idle) + 1)]
            job.pending = parts.pop()
            for worker, part in zip(idle, parts):
                try:
                    worker.start(shared, job, part, budget)
                except OSError:
                    worker.sentences = dict(enumerate(part))  # lost, as `receive` finds

        def on_result(index: int, n_best: NBest) -> None:
            nonlocal next_look
            deliver(index, n_best)
            if time.monotonic() >= next_look:
                receive()
                hand_out()
                next_look = time.monotonic() + RESULTS_INTERVAL

        next_look = 0.0
        job.on_result = on_result
        receive()
        hand_out()
        run_job(model, job, budget)
        while busy := [worker.connection for worker in workers if worker.sentences]:
            connection.wait(busy, timeout=HEARTBEAT)
            receive()
        if lost:
            rest = job.part(lost)
            rest.on_result = lambda index, n_best: deliver(lost[index], n_best)
            run_job(model, rest, budget)


def main(descriptor: int) -> None:
    """Entry point of a worker: decode until the connection is closed."""
    from regard.decode.engine import run_job

    keep_freed_memory()
    torch.set_num_threads(1)
    parent, lock = connection.Connection(descriptor), threading.Lock()
    models: dict[int, Any] = {}

    def send(*message: Any) -> None:
        with lock:
            parent.send(message)

    def send_signs_of_life() -> None:
        try:
            while True:
                time.sleep(HEARTBEAT)
                send("alive")
        except OSError:
            os._exit(0)

    last_results = 0.0

    def send_results(finished: list[tuple[int, NBest]], at_once: bool = False) -> None:
        """Send finished sentences together: each message interrupts the decoding of the parent."""
        nonlocal last_results
        if at_once or time.monotonic() - last_results > RESULTS_INTERVAL:
            send("results", finished)
            finished.clear()
            last_results = time.monotonic()

    try:
        send("ready")
        threading.Thread(target=send_signs_of_life, daemon=True).start()
        while True:
            kind, number, *values = parent.recv()
            if kind == "model":
                size, pickled, layout = values
                handle = reduction.recv_handle(parent)
                memory = mmap.mmap(handle, size, mmap.MAP_PRIVATE)
                os.close(handle)
                try:
                    models[number] = SharedModel.load(pickled, layout, memory)
                except Exception:
                    models[number] = None
            else:
                kept, job, budget = values
                models = {other: model for other, model in models.items() if other in kept}
                finished: list[tuple[int, NBest]] = []

                def on_result(index: int, n_best: NBest, finished: list[Any] = finished) -> None:
                    finished.append((index, n_best))
                    send_results(finished)

                job.on_result = on_result
                try:
                    with torch.inference_mode():
                        run_job(models[number], job, budget)
                    send_results(finished, at_once=True)
                except RegardError as error:
                    send("error", error)
                except (EOFError, OSError):
                    raise
                except Exception:
                    send("refused")  # the parent decodes the sentences, and meets the same exception
    except (EOFError, OSError):
        os._exit(0)
