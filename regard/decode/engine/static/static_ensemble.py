"""Ensembles of models for the decoding engine."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.engine.static.static_attention import StepPositions
from regard.decode.ensemble import mean_log_probs


class StaticEnsemble:
    """Static decoders of several models; logits are the logarithm of their weighted mean probability."""

    def __init__(self, members: Sequence[Any], log_weights: Sequence[float]) -> None:
        self.members, self.log_weights = list(members), list(log_weights)
        self.device = self.members[0].device
        self.output_tokens: Int[Tensor, "U"] | None = None

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None:
        """Return the logits of these tokens only. The probabilities of each model are those over the vocabulary."""
        self.output_tokens = tokens

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        for member in self.members:
            member.load(slots, sources)

    def step(
        self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None
    ) -> Float[Tensor, "B K V"]:
        logits = mean_log_probs([member.step(last, at, ancestors) for member in self.members], self.log_weights)
        return logits if self.output_tokens is None else logits[..., self.output_tokens]

    def reorder(self, parents: Int[Tensor, "B K"]) -> None:
        for member in self.members:
            member.reorder(parents)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        for member in self.members:
            member.select_slots(slots)
