"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices of layers, AdamW for everything else.

torch.optim.Muon is no substitute: it copies the learning rate from GPU to host (impossible in a CUDA graph), processes
one matrix at a time, and rounds to bfloat16 on a CPU.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

# Newton-Schulz polynomial: applied five times, it maps singular values up to 1 to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_MOMENTUM = 0.95
# Updates are scaled to the size of AdamW's, so that both share learning rate and weight decay (Liu et al. 2025).
_RMS = 0.2


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
