"""Norms over channels: LayerNorm (mean 0, variance 1, learned gain and bias) and RMSNorm (mean square 1, gain)."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

NormKind = Literal["layer", "rms"]


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm computed in the dtype of its weight; the output has the dtype of the input.

    Without the conversion torch makes several passes over a bf16 input, and warns.

    >>> RMSNorm(8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def make_norm(kind: NormKind, width: int, eps: float = 1e-5) -> nn.Module:
    """Make a norm by its name.

    >>> make_norm("layer", 8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """
    return {"layer": nn.LayerNorm, "rms": RMSNorm}[kind](width, eps=eps)
