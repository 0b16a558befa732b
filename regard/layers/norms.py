"""Normalisation: each token gets mean 0 and variance 1, then a learned gain and bias (layer); or unit power (rms)."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

NormKind = Literal["layer", "rms"]


class RMSNorm(nn.RMSNorm):
    """torch's own; what products under autocast have made narrow is normed in float32, and comes out as narrow.

    torch would take many passes for that, and warn of it.

    >>> RMSNorm(8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def make_norm(kind: NormKind, width: int, eps: float = 1e-5) -> nn.Module:
    """The norm by its name.

    >>> make_norm("layer", 8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """
    return {"layer": nn.LayerNorm, "rms": RMSNorm}[kind](width, eps=eps)
