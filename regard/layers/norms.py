"""Normalisation: each token gets mean 0 and variance 1, then a learned gain and bias (layer); or unit power (rms)."""

from typing import Literal

from torch import nn

NormKind = Literal["layer", "rms"]


def make_norm(kind: NormKind, width: int, eps: float = 1e-5) -> nn.Module:
    """The norm by its name.

    >>> make_norm("layer", 8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[kind](width, eps=eps)
