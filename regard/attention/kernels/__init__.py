"""Kernels: ways to compute attention, one file each.

Each has the same two functions: `takes(call)` says whether this kernel is made for such a call, `run(call)` does it.
All are linear in memory. Only `dispatch` knows which kernels there are.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.bias import Bias
from regard.attention.masks import Form
from regard.attention.offsets import Offsets
from regard.attention.scores import Score


class Call(NamedTuple):
    """What a kernel is given: (B, H, T, D) tensors, or with offsets (N, H, D); S may have a divisor of H's heads."""

    q: Float[Tensor, "..."]
    k: Float[Tensor, "..."]
    v: Float[Tensor, "..."]
    score: Score
    form: Form
    bias: Bias | None = None
    q_offsets: Offsets | None = None
    k_offsets: Offsets | None = None
    # Rectangles made of packed sequences: the keys' places are to be asked for explicitly, see Score.fold.
    unpacked: bool = False

    def fold(self, k: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], float]:
        """The folded queries and keys, both in the values' dtype (autocast may leave others), and the scale."""
        positions = torch.arange(k.shape[-2], device=k.device) if self.unpacked else None
        q, k, scale = self.score.fold(self.q, k, positions)
        dtype = self.v.dtype
        if q.dtype != dtype or k.dtype != dtype:
            q, k = q.to(dtype), k.to(dtype)
        return q, k, scale


def outside_graphs(run: Callable[[Call], Tensor]) -> Callable[[Call], Tensor]:
    """`torch.compiler.disable`, but its import, a second or more, waits for the first compiler that comes by."""

    @functools.wraps(run)
    def either_way(call: Call) -> Tensor:
        return torch.compiler.disable(run)(call) if torch.compiler.is_compiling() else run(call)

    return either_way
