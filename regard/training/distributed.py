"""Training on several ranks: worker processes, or the ranks of torchrun, and the model on them (DDP or FSDP2).

On a CPU, two single-threaded processes are faster than one process with two threads, most of all when another program
uses a core: threads inside an operation synchronize hundreds of times per step, processes once.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from regard.attention import SCORES
from regard.data.batching.batch import Batch, RankSlice
from regard.devices import find_device
from regard.errors import Interrupted, RegardError
from regard.layers import POSITIONS
from regard.layers.blocks import TransformerBlock
from regard.layers.embeddings import Embedding
from regard.layers.fusion import fuse_residuals
from regard.pipelines import pipeline_class
from regard.training.guards import BatchTooLargeError, catch_out_of_memory
from regard.training.losses import LossParts
from regard.training.machine import make_autocast, peak_memory
from regard.training.recipe import TASKS, Recipe, TrainConfig
from regard.training.tasks.task import BatchSource, Task

# The program of a worker process. It reads its rank from standard input.
_PROGRAM = "from regard.training.distributed import worker_main; worker_main()"
# Long, since the other ranks wait while rank 0 validates; a dead process closes its connection at once.
_TIMEOUT = timedelta(days=7)
# For the exchange of gradients: a host that was switched off, or whose link was cut for longer, does not close it.
UPDATE_TIMEOUT = timedelta(minutes=10)
# With a smaller share of the batch, a worker spends more time on exchanging gradients than it saves.
MAX_WORKERS, MIN_WORKER_TOKENS, MIN_WORKER_IMAGES = 16, 512, 8
_BROADCAST_BYTES = 2**28
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Gradients that are sent together: larger messages use the network better, smaller ones start earlier.
BUCKET_BYTES = 25 * 2**20
# Models up to this size (float32) keep their gathered weights from the forward to the backward pass.
KEPT_BYTES = 2**31
# The methods to compile, by module class: they take most of the time, and all layers of a class share the code.
REGIONS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("forward",),
    TransformerBlock: ("forward", "forward_first"),
}


# -- ranks and processes


def count_ranks(recipe: Recipe, previous: int | None = None) -> int:
    """The number of processes to train with: the ranks of torchrun, or workers on a CPU.

    By default, a resumed run keeps its `previous` number: with dropout, another one gives other results.
    """
    ranks = _fixed_ranks(recipe)
    if ranks is None:
        ranks = previous or _suggest_workers(recipe)
    return ranks if previous or torchrun_rank() is not None else usable_workers(ranks)


def _fixed_ranks(recipe: Recipe) -> int | None:
    """The number of ranks, unless it is to be chosen."""
    if torchrun_rank() is not None:
        return torchrun_size()
    if find_device(recipe.train.device).type != "cpu" or not _is_built_in(recipe):
        return 1
    return recipe.train.workers or None


def _is_built_in(recipe: Recipe) -> bool:
    """Whether all components are part of Regard; worker processes cannot import those of a user's script."""
    scores = [value for name, value in vars(recipe.model).items() if name == "score" or name.endswith("_score")]
    classes = [type(TASKS[recipe.task]), type(recipe.model), *(SCORES[score] for score in scores)]
    if positions := POSITIONS.get(getattr(recipe.model, "positions", "")):
        classes.append(positions)
    return all(cls.__module__.startswith("regard.") for cls in classes)


def _suggest_workers(recipe: Recipe) -> int:
    """One worker per core, as long as each gets a large enough share of the batch and can hold the longest example."""
    config = recipe.train
    model: Any = recipe.model
    if pipeline_class(model).tokenizer_count:
        shares = config.batch_tokens // max(MIN_WORKER_TOKENS, model.max_len)
    elif recipe.data.longest:
        max_tokens = model.prefix + (recipe.data.longest // model.patch) ** 2
        shares = config.batch_tokens // max(MIN_WORKER_TOKENS, max_tokens)
    else:
        shares = config.batch_images // MIN_WORKER_IMAGES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_WORKERS, shares))


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


# -- the model on the ranks


class Cost(NamedTuple):
    """Measured cost of an update: its seconds, and the peak memory of each worker in bytes."""

    seconds: float
    memory: int
    workers: int
    device: torch.device


class DistributedModel:
    """The weights that this rank updates, and the loss that it computes with them.

    Rank 0 also has `full`, the model that is validated and saved: the EMA of the weights or the weights themselves. Of
    a sharded model it is a full copy, which `gather` updates.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        workers: Workers,
        device: torch.device,
        batches: BatchSource,
        *,
        is_new: bool,
        measures_cost: bool,
    ) -> None:
        self.model, self.workers, self.device, config = model, workers, device, recipe.train
        model.train()
        if device.type == "cuda":
            fuse_residuals(model)
        if workers.update_group is not None and is_new:
            workers.broadcast(model.parameters())
        self.is_sharded = workers.update_group is not None and config.sharding == "fsdp"
        self.loss = TaskLoss(TASKS[recipe.task], model, config, device)
        self.cost: Cost | None = None
        """time and memory of a forward and a backward pass, for the plan of a new run"""
        measures_cost |= is_new and self.is_sharded  # all its ranks take part
        is_rank_0 = workers.rank == 0
        if self.is_sharded:
            self.ema_model = copy.deepcopy(model) if config.ema else None
            self.full = copy.deepcopy(model).to(device) if is_rank_0 else None
            mesh = DeviceMesh.from_group(workers.update_group, device.type)
            shard(self.loss, mesh, torch.bfloat16 if config.precision == "bfloat16" else None)
            if measures_cost:
                self.cost = self._measure_cost(batches, workers.part)
            if self.ema_model is not None:
                shard(self.ema_model, mesh)
        else:
            model.to(device)
            self.ema_model = copy.deepcopy(model) if config.ema and is_rank_0 else None
            self.full = self.ema_model or model
            if measures_cost:
                self.cost = self._measure_cost(batches, workers.part)
            if workers.size > 1 and workers.update_group is not None:
                batch = next(batches.epoch(0, 0, workers.part)).to(device)
                with catch_out_of_memory(1, workers.rank, can_split=False), report_dead_ranks():
                    replicate(self.loss, workers.update_group, batch)

    def gather(self) -> None:
        """Copy the weights of a sharded model to `full` of rank 0."""
        if self.is_sharded:
            with report_dead_ranks():
                gather_weights(self.ema_model or self.model, self.full)

    def _measure_cost(self, batches: BatchSource, part: RankSlice) -> Cost:
        """Measure time and peak memory of a forward and a backward pass; the gradients are discarded."""
        times = []
        for batch in itertools.islice(batches.epoch(0, 0, part), 3):
            start = time.monotonic()
            # Unless it is sharded, the first update splits a batch that does not fit.
            catch = catch_out_of_memory(1, self.workers.rank, can_split=not self.is_sharded)
            with report_dead_ranks(), contextlib.suppress(BatchTooLargeError), catch:
                self.loss(batch.to(self.device)).loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        self.loss.zero_grad()
        return Cost(min(times), peak_memory(self.device), self.workers.size, self.device)


class TaskLoss(nn.Module):
    """The loss of a task on a batch. Everything that uses the weights is inside `forward`, as FSDP needs it."""

    def __init__(self, task: Task, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        super().__init__()
        self.task, self.model, self.config = task, model, config
        self.features: Any = compiled_features(model) if config.compile else model.features
        self.autocast = make_autocast(config, device)
        self.gradient_buckets: GradientBuckets | None = None
        """the exchange of gradients with other ranks that have the same weights"""

    def forward(self, batch: Batch) -> LossParts:
        with self.autocast():
            parts = self.task.loss(self.model, self.features, batch, self.config)
        # A rank without a sequence computes the loss of another one, since all ranks exchange gradients.
        return parts if batch.sentences else LossParts(*(0 * part for part in parts))


class GradientBuckets:
    """Sums gradients over all ranks while the backward pass runs, in buckets that are sent as they become complete.

    Every rank sends the same buckets in the same order. On a GPU, nothing waits on the host, and memory addresses do
    not change, so that an update can be captured as a CUDA graph.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self.group = group
        self.buckets: list[_Bucket] = []
        self.is_running = False
        last: list[nn.Parameter] = []
        for parameter in reversed(parameters):  # the backward pass begins with the last layer
            last.append(parameter)
            if sum(p.nbytes for p in last) >= BUCKET_BYTES or parameter is parameters[0]:
                self.buckets.append(_Bucket(last))
                last = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._count_gradient, bucket))

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Exchange the gradients of the backward pass in this context; they are summed when it ends."""
        self.is_running, self.unsent = True, list(self.buckets)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        try:
            yield
            while self.unsent:  # buckets with parameters that the loss of this batch does not depend on
                self.unsent.pop(0).send(self.group)
            for bucket in self.buckets:
                bucket.wait()
        finally:
            self.is_running = False

    def _count_gradient(self, bucket: "_Bucket", _: Tensor) -> None:
        if self.is_running:
            bucket.missing -= 1
            while self.unsent and not self.unsent[0].missing:
                self.unsent.pop(0).send(self.group)


class _Bucket:
    """Parameters whose gradients are sent together, as views of one buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.missing = parameters, 0
        sizes = [p.numel() for p in parameters]
        self.buffer = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = [view.view_as(p) for p, view in zip(parameters, self.buffer.split(sizes))]

    def send(self, group: Any) -> None:
        if self.missing:
            self.buffer.zero_()
        views = [view for p, view in zip(self.parameters, self.views) if p.grad is not None]
        if views:
            torch._foreach_copy_(views, [p.grad for p in self.parameters if p.grad is not None])
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view
        self.work = dist.all_reduce(self.buffer, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum: on a GPU, later operations wait, not the host."""
        assert self.work is not None
        self.work.wait()
        self.work = None


def replicate(loss: TaskLoss, group: Any, batch: Batch) -> None:
    """Exchange the gradients of a loss whose weights every rank has (DDP).

    Gradients are not averaged: the loss is a sum over tokens, and is divided by the tokens of all ranks. A pass over
    `batch`, without effect, finds the parameters that have gradients.
    """
    loss(dataclasses.replace(batch, sentences=0)).loss.backward()
    parameters = [p for p in loss.parameters() if p.requires_grad]
    is_used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(is_used, group=group)
    loss.zero_grad()
    loss.gradient_buckets = GradientBuckets([p for p, count in zip(parameters, is_used.tolist()) if count], group)


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard the weights of a module over the ranks of a mesh (FSDP2), in place: each layer by itself, then the rest.

    Gradients are summed. The weights of layers are gathered as `dtype` (default: float32) and computed with in it; the
    shards that the optimizer updates, and the sum of gradients, stay float32. The gathered weights of a small model
    stay in memory until its backward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    frees_gathered = sum(p.nbytes for p in module.parameters()) > KEPT_BYTES
    for layer in [layer for layer in module.modules() if isinstance(layer, TransformerBlock)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_gathered)
        register_fsdp_forward_method(layer, "forward_first")
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if hasattr(part, "set_reduce_scatter_unused_params"):  # newer versions of torch skip unused parameters
                part.set_reduce_scatter_unused_params(True)


@contextlib.contextmanager
def accumulating(loss: TaskLoss, is_last: bool) -> Iterator[None]:
    """Exchange gradients only in the backward pass of the last batch of an update."""
    if isinstance(loss, FSDPModule):
        loss.set_requires_gradient_sync(is_last)
    with loss.gradient_buckets.run() if loss.gradient_buckets and is_last else contextlib.nullcontext():
        yield


@torch.no_grad()
def gather_weights(model: nn.Module, target: nn.Module | None) -> None:
    """Copy the full weights of a sharded model to `target`, which only rank 0 has, one tensor at a time."""
    copies = None if target is None else dict(target.named_parameters())
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if copies is not None:
            copies[name].copy_(full.view_as(copies[name]))


def compiled_features(model: nn.Module) -> Callable[..., Tensor]:
    """A compiled version of `model.features`; the model itself is not changed.

    Compiling an entire model takes a minute or more, and again for each value of max_len. Blocks are compiled once, and
    a second time, with dynamic shapes, when max_len changes. A model without such blocks is compiled in one piece.
    """
    methods = [
        (module, name)
        for module in model.modules()
        for region, names in REGIONS.items()
        if isinstance(module, region)
        for name in names
    ]
    eager: Callable[..., Tensor] = model.features  # type: ignore[assignment]
    if not methods:
        return torch.compile(eager, dynamic=False)
    compiled = [torch.compile(getattr(module, name)) for module, name in methods]

    def features(*inputs: Any) -> Tensor:
        for (module, name), method in zip(methods, compiled):
            setattr(module, name, method)
        try:
            return eager(*inputs)
        finally:
            for module, name in methods:
                delattr(module, name)  # uncovers the method of the class

    return features
