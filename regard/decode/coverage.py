"""Coverage penalty: how much cross-attention each source position has received (GNMT, Wu et al. 2016, section 7)."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.recording import record
from regard.errors import RegardError

T = TypeVar("T")


def with_attention(model: Any, step: Callable[[], T]) -> tuple[T, list[Float[Tensor, "B K S"]]]:
    """The result of a step of a model, and its cross-attention per layer, averaged over heads."""
    if not isinstance(model, nn.Module):
        raise no_cross_attention()
    with record(model) as recording:
        result = step()
    # The beams are the queries of the cross-attention: (B, H, K, S).
    recorded = [calls for calls in recording.values() if calls.kind == "cross" and calls.calls]
    if not recorded:
        raise no_cross_attention()
    return result, [calls.weights().mean(1) for calls in recorded]


def no_cross_attention() -> RegardError:
    """That a model has no cross-attention to penalize."""
    return RegardError(
        "coverage_penalty requires a model with cross-attention; this model has none.", "Set coverage_penalty to 0."
    )


class Coverage:
    """The cross-attention that each source position has received so far from the hypotheses in B slots."""

    def __init__(self, slots: int, hypotheses: int, source_capacity: int, device: torch.device) -> None:
        self.received = torch.zeros((slots, hypotheses, source_capacity), device=device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)

    def start(self, slots: list[int], lengths: list[int]) -> None:
        """New sentences in these slots, with sources of these lengths."""
        rows = torch.tensor(slots, device=self.lengths.device)
        self.received[rows] = 0.0
        self.lengths[rows] = torch.tensor(lengths, device=self.lengths.device)

    def add(self, layers: Sequence[Float[Tensor, "B K S"]]) -> None:
        """Add the attention of a step, averaged over the layers."""
        for attention in layers:
            self.received[..., : attention.shape[-1]] += attention / len(layers)

    def select(self, parents: Int[Tensor, "B K"]) -> None:
        """The coverage of new hypotheses is that of their parents."""
        self.received = self.received.gather(1, parents[..., None].expand_as(self.received))

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.received, self.lengths = self.received[slots], self.lengths[slots]

    def terms(self, parents: Int[Tensor, "B P"]) -> Float[Tensor, "B P"]:
        """The coverage terms of candidates with these parents."""
        return coverage_term(self.received, self.lengths).gather(1, parents)


def coverage_term(coverage: Float[Tensor, "B C S"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B C"]:
    """sum over s of log min(coverage_s, 1): 0 if every source position is fully covered, else negative.

    >>> coverage_term(torch.tensor([[[0.5, 1.5, 0.0]]]), torch.tensor([2]))
    tensor([[-0.6931]])
    """
    is_valid = torch.arange(coverage.shape[-1], device=coverage.device) < lengths[:, None]
    clamped = coverage.clamp(min=torch.finfo(coverage.dtype).tiny, max=1.0)  # log 0 would exclude the hypothesis
    return clamped.log().masked_fill(~is_valid[:, None], 0.0).sum(-1)
