"""Norms over channels: LayerNorm (mean 0, variance 1, learned gain and bias) and RMSNorm (mean square 1, gain)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

NormKind = Literal["layer", "rms"]
EncoderNormKind = Literal["layer", "rms", "layer_without_bias"]
"""norms of encoder-only models"""
DecoderNormKind = Literal["layer", "rms", "rms_zero_centered"]
"""norms of decoder-only models"""


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm computed in the dtype of its weight; the output has the dtype of the input.

    Without the conversion torch makes several passes over a bf16 input, and warns.

    >>> RMSNorm(8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight, so that weight decay shrinks the gain to 1 (Gemma).

    >>> ZeroCenteredRMSNorm(2)(torch.tensor([3.0, -3.0]))
    tensor([ 1.0000, -1.0000], grad_fn=<MulBackward0>)
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        dtype = self.weight.dtype
        return nn.functional.rms_norm(x.to(dtype), self.weight.shape, 1 + self.weight, self.eps).to(x.dtype)


def make_norm(kind: EncoderNormKind | DecoderNormKind, width: int, eps: float = 1e-5) -> nn.Module:
    """Make a norm by its name.

    >>> make_norm("layer", 8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """
    kinds: dict[str, Callable[..., nn.Module]] = {
        "layer": nn.LayerNorm,
        "layer_without_bias": partial(nn.LayerNorm, bias=False),
        "rms": RMSNorm,
        "rms_zero_centered": ZeroCenteredRMSNorm,
    }
    return kinds[kind](width, eps=eps)
