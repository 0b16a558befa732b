"""The model on the ranks of a run: replicated (DDP) or sharded (FSDP2), and compiled block by block."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from regard.data.batching.batch import Batch, RankSlice
from regard.layers.blocks import DecoderBlock, EncoderBlock
from regard.layers.embeddings import Embedding
from regard.training.guards import BatchTooLargeError, detect_out_of_memory, refuse_to_split
from regard.training.losses import LossParts
from regard.training.machine import make_autocast, peak_memory
from regard.training.recipe import TrainConfig
from regard.training.tasks.task import BatchSource, Task
from regard.training.workers import Workers, report_dead_ranks

# Gradients that are sent together: larger messages use the network better, smaller ones start earlier.
BUCKET_BYTES = 25 * 2**20
# Models up to this size (float32) keep their gathered weights from the forward to the backward pass.
KEPT_BYTES = 2**31
# The methods to compile, by module type: they take most of the time, and all layers of a type share the code.
REGIONS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("forward",),
    EncoderBlock: ("forward", "forward_first"),
    DecoderBlock: ("forward",),
}


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
        task: Task,
        config: TrainConfig,
        workers: Workers,
        device: torch.device,
        batches: BatchSource,
        *,
        is_resumed: bool,
        is_silent: bool,
    ) -> None:
        self.model, self.config, self.workers, self.device = model, config, workers, device
        model.train()
        if workers.update_group is not None and not is_resumed:
            workers.broadcast(model.parameters())
        self.is_sharded = workers.update_group is not None and config.sharding == "fsdp"
        self.loss = TaskLoss(task, model, config, device)
        self.cost: Cost | None = None
        """time and memory of a forward and a backward pass, for the plan of a new run"""
        measures_cost = not is_resumed and (not is_silent or self.is_sharded)  # all ranks of a sharded model take part
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
                with refuse_to_split(1, workers.rank), report_dead_ranks():
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
            refuse = (
                refuse_to_split(1, self.workers.rank) if self.is_sharded else contextlib.suppress(BatchTooLargeError)
            )
            with report_dead_ranks(), refuse, detect_out_of_memory():
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
        self.exchange: GradientExchange | None = None
        """the exchange of gradients with other ranks that have the same weights"""

    def forward(self, batch: Batch) -> LossParts:
        with self.autocast():
            parts = self.task.loss(self.model, self.features, batch, self.config)
        # A rank without a sequence computes the loss of another one, since all ranks exchange gradients.
        return parts if batch.sentences else LossParts(*(0 * part for part in parts))


class GradientExchange:
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
    loss.exchange = GradientExchange([p for p, count in zip(parameters, is_used.tolist()) if count], group)


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard the weights of a module over the ranks of a mesh (FSDP2), in place: each layer by itself, then the rest.

    Gradients are summed. The weights of layers are gathered as `dtype` (default: float32) and computed with in it; the
    shards that the optimizer updates, and the sum of gradients, stay float32. The gathered weights of a small model
    stay in memory until its backward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    frees_gathered = sum(p.nbytes for p in module.parameters()) > KEPT_BYTES
    for layer in [layer for layer in module.modules() if isinstance(layer, EncoderBlock | DecoderBlock)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_gathered)
        if isinstance(layer, EncoderBlock):
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
    with loss.exchange.run() if loss.exchange and is_last else contextlib.nullcontext():
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
    methods = [(module, name) for module in model.modules() for name in REGIONS.get(type(module), ())]
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
