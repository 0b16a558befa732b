"""Optimizers by name, Muon, gradient scaling, and the exponential moving average of the weights; also of shards."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from regard.attention.scores import Score
from regard.layers.positions import LearnedGrid, RelativeBias

OptimizerName = Literal["adam", "adamw", "muon", "sgd"]
# Modules whose parameters named weight* are matrices, embedding tables or filters.
_DECAYED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, Score, LearnedGrid)
# Newton-Schulz polynomial: applied five times, it maps singular values up to 1 to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_MOMENTUM = 0.95
# Updates are scaled to the size of AdamW's, so that both share learning rate and weight decay (Liu et al. 2025).
_RMS = 0.2


def make_optimizer(
    name: OptimizerName, model: nn.Module, lr: float, beta2: float, weight_decay: float, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Create an optimizer: Adam, AdamW, Muon, or SGD with `momentum`. Only `decayed_parameters` have weight decay.

    Muon updates the weight matrices of the layers; AdamW updates embeddings, output layers, norms and biases.

    >>> make_optimizer("adam", nn.Linear(2, 2), 1e-3, 0.98, 0.0).defaults["betas"]
    (0.9, 0.98)
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = {id(p) for p in decayed_parameters(model).values()}
    matrix_ids = {id(p) for p in _layer_matrices(model)} if name == "muon" else set()
    # Muon needs whole matrices; the others update each number by itself, so that they need not know of shards.
    local = {id(p): p if name == "muon" or not isinstance(p, DTensor) else LocalShard.of(p) for p in parameters}
    on_gpu = bool(parameters) and parameters[0].is_cuda and not isinstance(local[id(parameters[0])], DTensor)
    # A learning rate in device memory can change between replays of a CUDA graph.
    rate = torch.tensor(lr, device=parameters[0].device) if on_gpu else lr
    groups: list[dict[str, Any]] = [
        {"params": [local[id(p)] for p in parameters if id(p) in decayed - matrix_ids], "weight_decay": weight_decay},
        {"params": [local[id(p)] for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    if name == "muon":
        matrices = [p for p in parameters if id(p) in decayed & matrix_ids]
        groups.append({"params": matrices, "weight_decay": weight_decay, "orthogonal": True})
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=True)
        for p in local.values() if momentum else ():  # otherwise a skipped first update would leave them uninitialized
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    else:
        kind = {"muon": Muon, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        optimizer = kind(groups, lr=rate, betas=(0.9, beta2), eps=1e-9, fused=True, capturable=on_gpu)
    share_gradients(optimizer)
    return optimizer


def decayed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with weight decay, by name: weights of linear layers, convolutions, recurrent cells and scores,
    and embeddings including position tables. A tied weight appears once.

    Excluded: norms, biases (relative position biases included), scales, and single learned vectors such as class
    tokens, registers, queries and mask tokens. The module type decides, not the shape: the scale of Cosine has shape
    (heads, 1, 1) but is not a matrix.

    >>> list(decayed_parameters(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    ['0.weight']
    """
    biases = {id(p) for module in model.modules() if isinstance(module, RelativeBias) for p in module.parameters()}
    decayed = {
        id(p)
        for module in model.modules()
        if isinstance(module, _DECAYED)
        for name, p in module.named_parameters(recurse=False)
        if name.startswith("weight")
    }
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in decayed - biases}


def _layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers inside the stacked layers (nn.ModuleList) of a model."""
    layers = (layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module)
    linear = (module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear))
    return [p for module in linear for name, p in module.named_parameters(recurse=False) if name == "weight"]


def scale_gradients(grads: list[Tensor], count: Float[Tensor, ""], clip: float) -> Float[Tensor, ""]:
    """Divide the gradients of a sum by `count` and clip their norm to `clip` (0: no clipping), in place, in one pass.

    Returns the norm before clipping.

    >>> grads = [torch.tensor([6.0, 8.0])]
    >>> scale_gradients(grads, torch.tensor(2.0), clip=1.0)
    tensor(5.)
    >>> grads[0]
    tensor([0.6000, 0.8000])
    """
    factor = 1 / count.clamp(min=1)  # a batch of unknown words has no masked tokens
    norm = total_norm(grads) * factor
    if clip:
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(local_tensors(grads), factor)
    return norm


def step_optimizer(optimizer: torch.optim.Optimizer, accepted: Bool[Tensor, ""]) -> None:
    """Apply an update if `accepted`; otherwise weights and optimizer state keep their values.

    On a GPU the decision is made there: the host does not wait for it, and a CUDA graph includes it. Only the updates
    of sharded weights by Muon, which are not captured, wait.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> step_optimizer(torch.optim.Adam([weight]), torch.tensor(False))
    >>> weight.data
    tensor([1., 1.])
    """
    if accepted.is_cuda and not isinstance(optimizer.param_groups[0]["params"][0], DTensor):
        step_on_device(optimizer, accepted)
    elif accepted:
        optimizer.step()


def step_on_device(optimizer: torch.optim.Optimizer, accepted: Bool[Tensor, ""]) -> None:
    """`step_optimizer` without reading `accepted` on the host: fused optimizers skip an update if `found_inf` is 1."""
    optimizer.found_inf = (~accepted).float()  # type: ignore[attr-defined]
    optimizer.step()


def update_ema(ema_model: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Update the exponential moving average of the weights after `step` updates.

    The decay of the first updates is smaller, step / (step + 10), so that the random initial weights fade quickly.

    >>> ema_model, model = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> update_ema(ema_model, model, decay=0.0, step=1)
    >>> torch.equal(ema_model.weight, model.weight)
    True
    """
    average = get_ema_multi_avg_fn(min(decay, step / (step + 10)))
    average(local_tensors(ema_model.parameters()), local_tensors(model.parameters()), step)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def orthogonalize(x: Float[Tensor, "M R C"]) -> Float[Tensor, "M R C"]:
    """Orthogonalize matrices by Newton-Schulz iteration: same singular vectors, all singular values near 1.

    >>> y = orthogonalize(torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)))
    >>> bool(((y @ y.mT).diagonal(dim1=1, dim2=2).sqrt() - 1).abs().max() < 0.35)
    True
    """
    y = x.bfloat16() if x.is_cuda else x.float()
    tall = y.shape[1] > y.shape[2]
    y = y.mT if tall else y
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), y, beta=_A)
    return (y.mT if tall else y).to(x.dtype)


class Muon(torch.optim.AdamW):
    """AdamW, except for parameter groups with `orthogonal`: their update is the orthogonalized momentum.

    Jordan et al. (2024). torch.optim.Muon is no substitute: it copies the learning rate from GPU to host (impossible in
    a CUDA graph), processes one matrix at a time, and rounds to bfloat16 on a CPU.

    >>> weight = torch.nn.Parameter(torch.eye(4))
    >>> optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=0.1, weight_decay=0.0)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> bool(weight[0, 1] < 0)
    True
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__([{"orthogonal": False} | group for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if group["orthogonal"]:
                self._update_matrices(group)
        try:
            self.param_groups = [group for group in groups if not group["orthogonal"]]
            super().step(closure)
        finally:
            self.param_groups = groups

    def _update_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[tuple(p.shape)].append(p)
        for (*rows, columns), parameters in by_shape.items():
            grads = [p.grad for p in parameters if p.grad is not None]
            rate = group["lr"]  # a float, or on a GPU a tensor that changes between replays of a CUDA graph
            share: Any = 1 - _MOMENTUM
            skipped = getattr(self, "found_inf", None)
            if skipped is not None:  # 1: the update is skipped, so momenta and matrices must keep their values
                grads = [torch.where(skipped > 0, 0.0, grad) for grad in grads]
                rate, share = rate * (1 - skipped), [share * (1 - skipped)] * len(grads)
            for p in parameters:
                if not self.state[p]:
                    # AdamW.load_state_dict expects a step in every state.
                    self.state[p] |= {"step": torch.zeros(()), "momentum": torch.zeros_like(p)}
            momenta = [self.state[p]["momentum"] for p in parameters]
            torch._foreach_lerp_(momenta, grads, share)
            torch._foreach_lerp_(grads, momenta, _MOMENTUM)  # in place: torch 2.11 cannot shard the other form
            updates = _orthogonalize_shards(grads)
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
            torch._foreach_mul_(updates, -rate * _RMS * max(math.prod(rows), columns) ** 0.5)
            torch._foreach_add_(parameters, updates)


def _orthogonalize_shards(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices of one shape. Sharded ones are gathered, since the iteration needs all rows."""
    shards = [matrix for matrix in matrices if isinstance(matrix, DTensor)]
    if not shards:
        return list(orthogonalize(torch.stack(list(matrices))).unbind())
    full = orthogonalize(torch.stack([shard.full_tensor() for shard in shards]))
    return [
        distribute_tensor(matrix, shard.device_mesh, shard.placements, src_data_rank=None)
        for matrix, shard in zip(full, shards)
    ]


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
