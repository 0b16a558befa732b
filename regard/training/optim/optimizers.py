"""Optimizers by name, gradient scaling, and the exponential moving average of the weights."""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from regard.attention.scores import Score
from regard.layers.positions import LearnedGrid, RelativeBias
from regard.training.optim.local_shards import LocalShard, local_tensors, share_gradients, total_norm
from regard.training.optim.muon import Muon

OptimizerName = Literal["adam", "adamw", "muon", "sgd"]


def make_optimizer(
    name: OptimizerName, model: nn.Module, lr: float, beta2: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Create an optimizer: Adam, AdamW, Muon, or SGD with momentum 0.9. Only `decayed_parameters` have weight decay.

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
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, fused=True)
        for p in local.values():  # otherwise a skipped first update would leave them uninitialized
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    else:
        kind = {"muon": Muon, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        optimizer = kind(groups, lr=rate, betas=(0.9, beta2), eps=1e-9, fused=True, capturable=on_gpu)
    share_gradients(optimizer)
    return optimizer


# Modules whose parameters named weight* are matrices, embedding tables or filters.
_DECAYED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, Score, LearnedGrid)


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


def step_if(optimizer: torch.optim.Optimizer, accepted: Bool[Tensor, ""]) -> None:
    """Apply an update if `accepted`; otherwise weights and optimizer state keep their values.

    On a GPU the decision is made there: the host does not wait for it, and a CUDA graph includes it. Only the updates
    of sharded weights by Muon, which are not captured, wait.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> step_if(torch.optim.Adam([weight]), torch.tensor(False))
    >>> weight.data
    tensor([1., 1.])
    """
    if accepted.is_cuda and not isinstance(optimizer.param_groups[0]["params"][0], DTensor):
        step_on_device(optimizer, accepted)
    elif accepted:
        optimizer.step()


def step_on_device(optimizer: torch.optim.Optimizer, accepted: Bool[Tensor, ""]) -> None:
    """`step_if` without reading `accepted` on the host: fused optimizers skip an update if `found_inf` is 1."""
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
