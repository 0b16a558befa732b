"""Residual connections: x + dropout(update), optionally fused with the norm of the sum."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.kernels.triton import add_norm
from regard.layers.dropout import Dropout, DropPath
from regard.layers.norms import RMSNorm


class Residual(nn.Module):
    """x + dropout(update), in plain PyTorch.

    With `layer_scale` the update is multiplied by a learned factor per channel, which starts at this value (LayerScale,
    Touvron et al. 2021). With `drop_path` it is dropped for entire sequences at this rate (stochastic depth).

    >>> Residual(8, dropout=0.0)(torch.ones(3, 8), torch.ones(3, 8)).sum().item()
    48.0
    """

    def __init__(self, width: int, dropout: float, layer_scale: float = 0.0, drop_path: float | None = None) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.layer_scale = nn.Parameter(torch.empty(width)) if layer_scale else None
        if self.layer_scale is not None:
            nn.init.constant_(self.layer_scale, layer_scale)
        self.drop_path = DropPath(drop_path) if drop_path is not None else None

    def forward(
        self, x: Float[Tensor, "*n E"], update: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None = None
    ) -> Float[Tensor, "*n E"]:
        update = self.dropout(update)
        if self.layer_scale is not None:
            update = update * self.layer_scale.to(update.dtype)
        if self.drop_path is not None:
            update = self.drop_path(update, offsets)
        return x + update

    def add_norm(
        self,
        x: Float[Tensor, "*n E"],
        update: Float[Tensor, "*n E"],
        norm: nn.Module,
        offsets: Offsets | Lengths | None = None,
    ) -> tuple[Float[Tensor, "*n E"], Float[Tensor, "*n E"]]:
        """The sum and its norm."""
        x = self(x, update, offsets)
        # Under autocast LayerNorm returns float32; a low-precision residual stream keeps its dtype.
        return x, norm(x).to(x.dtype)


class FusedResidual(Residual):
    """`Residual` without layer scale and drop path, whose `add_norm` runs as one fused CUDA kernel where supported.

    Pre-norm: only in training, since for single decoded tokens the launch overhead dominates. Post-norm: for packed
    tokens, if the residual stream has the dtype of the update.
    """

    def __init__(self, width: int, dropout: float, *, norm_first: bool) -> None:
        super().__init__(width, dropout)
        self.norm_first = norm_first

    def add_norm(
        self,
        x: Float[Tensor, "*n E"],
        update: Float[Tensor, "*n E"],
        norm: nn.Module,
        offsets: Offsets | Lengths | None = None,
    ) -> tuple[Float[Tensor, "*n E"], Float[Tensor, "*n E"]]:
        use_kernel = self.training if self.norm_first else x.dim() == 2 and x.dtype == update.dtype
        if use_kernel and isinstance(norm, nn.LayerNorm | RMSNorm) and add_norm.supports(x, update):
            bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
            if bias is not None or isinstance(norm, RMSNorm):
                eps = norm.eps or torch.finfo(norm.weight.dtype).eps
                p = self.dropout.p if self.training else 0.0
                return add_norm.add_norm(x, update, norm.weight, bias, eps, p)
        return super().add_norm(x, update, norm, offsets)
