"""Data parallelism: the loss of a task as one module, and its replicas (DDP) or shards (FSDP2) on several ranks."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from regard.data.batching.pair_batches import Batch
from regard.layers.blocks import DecoderBlock, EncoderBlock
from regard.training.losses import LossParts
from regard.training.recipe import TrainConfig
from regard.training.runtime.compilation import compiled_features
from regard.training.runtime.precision import make_autocast
from regard.training.tasks.task import Task


class TaskLoss(nn.Module):
    """The loss of a task on a batch. Everything that uses the weights is inside `forward`, as DDP and FSDP need it."""

    def __init__(self, task: Task, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        super().__init__()
        self.task, self.model, self.config = task, model, config
        self.features: Any = compiled_features(model) if config.compile else model.features
        self.autocast = make_autocast(config, device)

    def forward(self, batch: Batch) -> LossParts:
        with self.autocast():
            parts = self.task.loss(self.model, self.features, batch, self.config)
        # A rank without a sequence computes the loss of another one, since all ranks exchange gradients.
        return parts if batch.sentences else LossParts(*(0 * part for part in parts))


def replicate(loss: TaskLoss, group: Any, device: torch.device, batch: Batch) -> DistributedDataParallel:
    """Replicas of the weights on all ranks (DDP), whose gradients are summed while the backward pass runs.

    The sum is not averaged: the loss is a sum over tokens, and is divided by the tokens of all ranks. A first pass over
    `batch`, without effect, settles the buckets of gradients, so that a resumed run sums in the same order.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # `forward_sync_buffers`, the new name, is not in older versions
        replicas = DistributedDataParallel(
            loss,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=group,
            broadcast_buffers=False,  # they are constants
            static_graph=True,  # every update uses the same parameters; unused ones are allowed
            gradient_as_bucket_view=True,
        )
    replicas.register_comm_hook(group, _sum_bucket)
    replicas(dataclasses.replace(batch, sentences=0)).loss.backward()
    replicas.zero_grad()
    return replicas


def _sum_bucket(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard the weights of a module over the ranks of a mesh (FSDP2), in place: each layer by itself, then the rest.

    Gradients are summed. The weights of layers are gathered as `dtype` (default: float32) and computed with in it; the
    shards that the optimizer updates, and the sum of gradients, stay float32.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        # The first dimension of stacked matrices (tensor parallelism) is 2; torch shards others only into equal parts.
        is_stacked = isinstance(parameter, DTensor) and parameter.dim() == 3 and parameter.placements == (Shard(1),)
        return Shard(2) if is_stacked and parameter.shape[2] % mesh.size() == 0 else None

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in [layer for layer in module.modules() if isinstance(layer, EncoderBlock | DecoderBlock)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, shard_placement_fn=place)
        if isinstance(layer, EncoderBlock):
            register_fsdp_forward_method(layer, "forward_first")
    fully_shard(module, mesh=mesh, shard_placement_fn=place)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if hasattr(part, "set_reduce_scatter_unused_params"):  # newer versions of torch skip unused parameters
                part.set_reduce_scatter_unused_params(True)


@contextlib.contextmanager
def accumulating(loss: nn.Module, is_last: bool) -> Iterator[None]:
    """Exchange gradients only in the backward pass of the last batch of an update."""
    if isinstance(loss, DistributedDataParallel) and not is_last:
        with loss.no_sync():
            yield
        return
    if isinstance(loss, FSDPModule):
        loss.set_requires_gradient_sync(is_last)
    yield


@torch.no_grad()
def gather_weights(model: nn.Module, target: nn.Module | None) -> None:
    """Copy the full weights of a sharded model to `target`, which only rank 0 has, one tensor at a time."""
    copies = None if target is None else dict(target.named_parameters())
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if copies is not None:
            copies[name].copy_(full.view_as(copies[name]))
