"""Bias: what is added to the scores for where a query and a key stand, before the softmax."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn


@runtime_checkable
class Bias(Protocol):
    """A module that gives its numbers block by block, so that nobody needs all T×S of them: T5's buckets, ALiBi.

    Positions are those of `masks`: on the keys' axis, the last query at the last key. Gradients reach its parameters.

    >>> import torch
    >>> class Near(nn.Module):
    ...     def forward(self, p, s):
    ...         return -(p[:, None] - s).abs().float()[None]
    >>> Near()(torch.tensor([2]), torch.arange(3))
    tensor([[[-2., -1., -0.]]])
    >>> isinstance(Near(), Bias)
    True
    """

    def __call__(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Float[Tensor, "H t s"]:
        """The (H, t, s) numbers for queries at positions p and keys at s."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class OfHeads(nn.Module):
    """A bias for a few of its heads."""

    def __init__(self, bias: Bias, chosen: list[int]) -> None:
        super().__init__()
        self.bias, self.chosen = bias, chosen

    def forward(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Float[Tensor, "h t s"]:
        return self.bias(p, s)[self.chosen]
