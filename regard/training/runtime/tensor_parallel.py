"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): ranks divide the heads and the hidden units of every layer.

Each rank of a tensor-parallel group computes some heads of an attention layer and some hidden units of a feed-forward
network, and the group sums their outputs. Everything else (embeddings, norms, residuals, output layer, loss) is
computed by all of them alike. Parameters are DTensors, so that optimizers, FSDP2 and distributed checkpoints treat them
as shards; modules compute with the local parts, which are plain tensors.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from regard.kernels.derivatives import once_differentiable
from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHead
from regard.layers.positions import RelativeBias, RelativeEmbedding
from regard.training.runtime.workers import Workers, report_dead_ranks


class Division(NamedTuple):
    """How a parameter is divided among the ranks of a tensor-parallel group."""

    dim: int | None = None
    """the dimension that is divided; None: every rank has a copy"""
    is_stacked: bool = False
    """the first dimension holds two matrices (keys and values, or both inputs of a gate), each of which is divided"""


_COPY, _ROWS, _COLUMNS, _STACKED_ROWS = Division(), Division(0), Division(1), Division(1, is_stacked=True)


class TensorParallel:
    """The ranks as a mesh, data parallel × tensor parallel, and the division of models over it.

    The ranks of a tensor-parallel group are consecutive: GPUs of one machine. `is_sharded`: FSDP shards the parts of
    the model over the data-parallel ranks, and sums their gradients; otherwise `sum_gradients` does.
    """

    def __init__(self, workers: Workers, device: torch.device, *, is_sharded: bool) -> None:
        self.workers, self.is_sharded = workers, is_sharded
        ranks = torch.arange(workers.size).view(-1, workers.tensor_parallel)
        groups = [workers.join_group(rows.tolist()) for rows in (ranks.T, ranks)]
        self.mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("data", "tensor"))
        # Advice to merge the exchanges of both dimensions, which happen only when weights are gathered.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.partial_gradients: set[str] = set()
        """names of the parameters that all heads share: each rank has the gradient of its own heads"""

    def divide(self, model: nn.Module) -> None:
        """Divide a model in place: each rank keeps its heads and hidden units, and copies of all other parameters."""
        divisions: dict[Tensor, Division] = {}
        for module in model.modules():
            if isinstance(module, MultiHead):
                divisions |= self._divide_attention(module)
            elif isinstance(module, FeedForward):
                divisions |= self._divide_feedforward(module)
            elif isinstance(module, RelativeBias):
                divisions[module.table.weight] = _COLUMNS
            elif isinstance(module, RelativeEmbedding):  # the heads of all ranks read it
                divisions |= dict.fromkeys(module.parameters(), _COPY)
        self.partial_gradients = {
            name for name, p in model.named_parameters() if p in divisions and divisions[p] == _COPY
        }
        distributed: dict[Tensor, nn.Parameter] = {}  # tied weights stay one parameter
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            for name, parameter in own.items():
                if parameter not in distributed:
                    division = divisions.get(parameter, _COPY)
                    distributed[parameter] = _distribute(parameter, self.mesh["tensor"], division)
                module.register_parameter(name, distributed[parameter])
            if own:
                stacked = tuple((name, divisions.get(p, _COPY).is_stacked) for name, p in own.items())
                module.__class__ = _with_local_parameters(type(module), stacked)  # type: ignore[arg-type]

    def _divide_attention(self, module: MultiHead) -> dict[Tensor, Division]:
        size, score = self.workers.tensor_parallel, module.score
        if module.kv_heads % size:  # only in the decoder of masked patches, which has other sizes than the model
            return {}
        module.heads, module.kv_heads = module.heads // size, module.kv_heads // size
        shared = [*module.query_norm.parameters(), *module.key_norm.parameters()]
        divisions = {module.out.weight: _COLUMNS}
        divisions |= dict.fromkeys(module.query.parameters(), _ROWS)
        divisions |= dict.fromkeys(module.key_value.parameters(), _STACKED_ROWS)
        if score.heads is None:
            shared += score.parameters()
        else:
            score.heads //= size
            divisions |= dict.fromkeys(score.parameters(), _ROWS)
        self._exchange(module, module.out)
        return divisions | dict.fromkeys(shared, _COPY)

    def _divide_feedforward(self, module: FeedForward) -> dict[Tensor, Division]:
        if module.outer.in_features % self.workers.tensor_parallel:
            return {}
        self._exchange(module, module.outer)
        rows = _STACKED_ROWS if module.is_gated else _ROWS
        return dict.fromkeys(module.inner.parameters(), rows) | {module.outer.weight: _COLUMNS}

    def _exchange(self, module: nn.Module, last: nn.Linear) -> None:
        """Sum the output of the last linear layer over the group, and the gradients of the inputs of the module."""
        group = self.mesh.get_group("tensor")

        def copy_inputs(_: nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if options.get("memory") is not None:
                options = options | {"memory": _copy_input(options["memory"], group)}
            return (_copy_input(inputs[0], group), *inputs[1:]), options

        module.register_forward_pre_hook(copy_inputs, with_kwargs=True)
        last.__class__ = _SummedLinear
        last.group = group  # type: ignore[assignment]

    @torch.no_grad()
    def sum_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Sum the gradients over the ranks that have a part of them, after the last backward pass of an update.

        The gradients of copies are equal on all ranks of a tensor-parallel group, apart from the rounding of GPUs; they
        are averaged, so that the copies stay equal.
        """
        copy_group = self.mesh.get_group("tensor") if self.is_sharded else self.workers.update_group
        part_group = None if self.is_sharded else self.mesh.get_group("data")
        sums: list[tuple[Any, Tensor, Tensor]] = []
        with report_dead_ranks():
            for name, parameter in parameters.items():
                if not isinstance(parameter.grad, DTensor):
                    continue
                grad, is_copy = parameter.grad.to_local(), parameter.grad.placements[-1].is_replicate()
                if is_copy and name not in self.partial_gradients:
                    grad /= self.workers.tensor_parallel
                group = copy_group if is_copy else part_group
                if group is not None:
                    dense = grad.contiguous()
                    sums.append((dist.all_reduce(dense, group=group, async_op=True), grad, dense))
            for work, grad, dense in sums:
                work.wait()
                if dense is not grad:
                    grad.copy_(dense)


class _SummedLinear(nn.Linear):
    """A linear layer of which each rank has some columns: the ranks sum their products, then add the bias."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        y = _Sum.apply(nn.functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Sum(torch.autograd.Function):
    """The sum over all ranks of a group, of which each continues with all of it (g in the paper)."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None


class _Copy(torch.autograd.Function):
    """The same tensor, with which each rank of a group continues in its own way: gradients are summed (f)."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _copy_input(x: Tensor, group: Any) -> Tensor:
    return _Copy.apply(x, group)


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, division: Division) -> nn.Parameter:
    data = parameter.detach()
    # Stacked matrices get a dimension of their own, since the shards of a DTensor are contiguous.
    data = data.unflatten(0, (2, -1)) if division.is_stacked else data
    placement = Replicate() if division.dim is None else Shard(division.dim)
    # All ranks have the same parameters, so that none has to send them.
    parts = distribute_tensor(data, mesh, [placement], src_data_rank=None)
    return nn.Parameter(parts, requires_grad=parameter.requires_grad)


@functools.cache
def _with_local_parameters(cls: type[nn.Module], parameters: tuple[tuple[str, bool], ...]) -> type[nn.Module]:
    """A subclass whose parameters, given by name and whether they are stacked, are read as local, plain tensors.

    The registered parameters remain DTensors.
    """

    def make_property(name: str, is_stacked: bool) -> property:
        def get(module: nn.Module) -> Tensor:
            parameter: Any = module._parameters[name]
            if parameter.device_mesh.ndim > 1:  # FSDP reads its shards; modules run only with gathered ones
                return parameter
            local = parameter.to_local()
            return local.flatten(0, 1) if is_stacked else local

        return property(get)

    return type(cls.__name__, (cls,), {name: make_property(name, is_stacked) for name, is_stacked in parameters})
