"""Bias: a term that depends on the positions of query and key and is added to the scores before the softmax."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn


@runtime_checkable
class Bias(Protocol):
    """A module that computes a bias block by block, so that the T×S matrix never exists: T5's buckets, ALiBi.

    Positions are on the axis of the keys, with the last query at the last key, as in `masks`. Gradients flow to the
    parameters of the module.

    >>> import torch
    >>> class Distance(nn.Module):
    ...     def forward(self, p, s):
    ...         return -(p[:, None] - s).abs().float()[None]
    >>> Distance()(torch.tensor([2]), torch.arange(3))
    tensor([[[-2., -1., -0.]]])
    >>> isinstance(Distance(), Bias)
    True
    """

    def __call__(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Float[Tensor, "H t s"]:
        """The (H, t, s) bias of queries at positions p and keys at positions s."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class HeadSubsetBias(nn.Module):
    """Some heads of a bias."""

    def __init__(self, bias: Bias, heads: list[int]) -> None:
        super().__init__()
        self.bias, self.heads = bias, heads

    def forward(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Float[Tensor, "h t s"]:
        return self.bias(p, s)[self.heads]
