"""Shards of weights as plain tensors: optimizers update them without the overhead of sharded operations."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LocalShard(nn.Parameter):
    """The shard of a weight on this rank, in the same memory; `sharded` is the weight."""

    sharded: DTensor

    @staticmethod
    def of(weight: DTensor) -> "LocalShard":
        with torch.no_grad():
            shard = torch.Tensor._make_subclass(LocalShard, weight.to_local().detach(), True)
        shard.sharded = weight
        return shard


def sharded_weight(parameter: Tensor) -> Tensor:
    """The weight of a local shard; any other parameter is a weight itself.

    >>> sharded_weight(torch.ones(2))
    tensor([1., 1.])
    """
    return parameter.sharded if isinstance(parameter, LocalShard) else parameter


@torch.no_grad()
def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of sharded tensors on this rank; a tensor that is not sharded is its own part.

    >>> local_tensors([torch.ones(2)])
    [tensor([1., 1.])]
    """
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def share_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of local shards use the gradients of their weights, and release them after each step."""
    shards = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, LocalShard)]

    def set_gradients(*_: Any) -> None:
        for shard in shards:
            grad = shard.sharded.grad
            shard.grad = None if grad is None else local_tensors([grad])[0]

    def release_gradients(*_: Any) -> None:
        for shard in shards:
            shard.grad = None

    if shards:
        optimizer.register_step_pre_hook(set_gradients)
        optimizer.register_step_post_hook(release_gradients)


def shard_like(state: Tensor, parameter: Tensor) -> Tensor:
    """The optimizer state of a parameter, sharded like its weight."""
    weight = sharded_weight(parameter)
    if not isinstance(weight, DTensor) or isinstance(state, DTensor) or not state.dim():
        return state
    return DTensor.from_local(
        state, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@torch.no_grad()
def total_norm(grads: list[Tensor]) -> Float[Tensor, ""]:
    """The norm of all gradients together; of sharded ones, over all ranks.

    >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None].append(grad)
    norms = []
    for layout, group in groups.items():
        norm = torch.nn.utils.get_total_norm(local_tensors(group))
        if layout is not None:
            mesh, placements = layout
            norm = norm.square()
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(norm, group=mesh.get_group(dimension))
            norm = norm.sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
