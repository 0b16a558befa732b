"""Dropout (on a CPU with a mask of random bytes) and drop path (stochastic depth)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.kernels.derivatives import is_transformed


class _ByteDropout(torch.autograd.Function):
    """Dropout with probability threshold / 256.

    Each 64-bit draw gives eight mask bytes: random numbers dominate the cost on a CPU.
    """

    @staticmethod
    def forward(ctx, x: Tensor, threshold: int) -> Tensor:
        count = x.numel()
        draws = torch.empty((count + 7) // 8, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
        mask = (draws.view(torch.uint8)[:count] >= threshold).view(x.shape)
        ctx.save_for_backward(mask)
        ctx.scale = 256 / (256 - threshold)
        return torch.where(mask, x * ctx.scale, 0.0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad * ctx.scale, 0.0), None


class Dropout(nn.Module):
    """Set each element to zero with probability p while training, and scale the rest to keep the mean.

    On a CPU p is rounded to a multiple of 1/256, and the scale follows the rounded value.

    >>> Dropout(0.5).eval()(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not self.training or self.p == 0:
            return x
        if x.device.type == "cpu" and not is_transformed():
            return _ByteDropout.apply(x, min(round(self.p * 256), 255))
        return nn.functional.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class DropPath(nn.Module):
    """Set entire sequences to zero with probability p while training, and scale the rest to keep the mean.

    Applied to the update of a residual connection, it skips a sublayer for that sequence (stochastic depth, Huang et
    al. 2016). Sequences are the rows of (B, T, E) or, with offsets, packed sequences.

    >>> DropPath(0.5).eval()(torch.ones(1, 2, 3)).sum()
    tensor(6.)
    """

    rate: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # A tensor, so that layers that differ only in p share compiled code.
        self.register_buffer("rate", torch.tensor(p), persistent=False)

    def forward(self, x: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None = None) -> Float[Tensor, "*n E"]:
        if not self.training:
            return x
        offsets = None if isinstance(offsets, Lengths) else offsets  # padded: one sequence per row
        count = len(x) if offsets is None else len(offsets.starts) - 1
        # Drawn on the device from torch's generator, so that each replay of a CUDA graph draws a new mask.
        scale = (torch.rand(count, device=x.device) >= self.rate).to(x.dtype) / (1 - self.rate)
        return x * (scale[:, None, None] if offsets is None else scale[offsets.sequences, None])

    def extra_repr(self) -> str:
        return f"p={self.p}"
