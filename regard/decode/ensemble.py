"""Ensembles of models, and of steppers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.decode.protocol import Decodable, StepPositions, continues_source
from regard.decode.rules import log_softmax
from regard.errors import RegardError


class Ensemble(nn.Module):
    """Mean of the probabilities of several models with the same vocabularies; implements `Decodable`.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> first, second = Transformer(sizes), Transformer(sizes)
    >>> len(Ensemble([first, second]).models)
    2
    """

    def __init__(self, models: Sequence[Decodable]) -> None:
        super().__init__()
        if not models:
            raise RegardError("An ensemble needs at least one model (got none).", "Pass at least one model.")
        self.models = list(models)
        # Registered as submodules, so that .eval(), .to() and recording reach them.
        self.members = nn.ModuleList(model for model in models if isinstance(model, nn.Module))

    @property
    def continues_source(self) -> bool:
        """Whether the output of the models continues its source."""
        return continues_source(self.models[0])

    def start(self, source: Any) -> list[Any]:
        return [model.start(source) for model in self.models]

    def step(self, state: list[Any], last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], list[Any]]:
        """Log of the mean probability, which is already normalized."""
        all_logits, states = zip(*(model.step(model_state, last) for model, model_state in zip(self.models, state)))
        return mean_log_probs(all_logits), list(states)

    def reorder(self, state: list[Any], indices: Int[Tensor, "B2 K2"]) -> list[Any]:
        return [model.reorder(model_state, indices) for model, model_state in zip(self.models, state)]


class EnsembleStepper:
    """Steppers of several models; logits are the logarithm of their mean probability."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)
        self.device = self.members[0].device
        self.output_tokens: Int[Tensor, "U"] | None = None

    @property
    def attention(self) -> list[Float[Tensor, "B K S"]]:
        """The cross-attention of all layers of all models."""
        return [attention for member in self.members for attention in member.attention]

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None:
        """Return the logits of these tokens only. The probabilities of each model are those over the vocabulary."""
        self.output_tokens = tokens

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        for member in self.members:
            member.load(slots, sources)

    def step(
        self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None
    ) -> Float[Tensor, "B K V"]:
        logits = mean_log_probs([member.step(last, at, ancestors) for member in self.members])
        return logits if self.output_tokens is None else logits[..., self.output_tokens]

    def reorder(self, parents: Int[Tensor, "B K"]) -> None:
        for member in self.members:
            member.reorder(parents)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        for member in self.members:
            member.select_slots(slots)


def mean_log_probs(all_logits: Sequence[Float[Tensor, "B K V"]]) -> Float[Tensor, "B K V"]:
    """The logarithm of the mean of the probabilities of several models.

    >>> mean_log_probs([torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)]).exp()
    tensor([[[0.2500, 0.2500, 0.2500, 0.2500]]])
    """
    sizes = [logits.shape[-1] for logits in all_logits]
    if len(set(sizes)) > 1:
        raise RegardError(
            f"The models of an ensemble have target vocabularies of different sizes: {', '.join(map(str, sizes))}.",
            "Use models that were trained with the same tokenizer.",
        )
    return torch.stack([log_softmax(logits) for logits in all_logits]).logsumexp(0) - math.log(len(all_logits))
