"""Several models that answer as one."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.decode.constraints import log_softmax
from regard.decode.protocol import Decodable
from regard.errors import RegardError


class Ensemble(nn.Module):
    """The weighted mean of the probabilities of several models that share both vocabularies, by the same protocol.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> first, second = Transformer(sizes), Transformer(sizes)
    >>> len(Ensemble([first, second], weights=[2.0, 1.0]).models)
    2
    """

    def __init__(self, models: Sequence[Decodable], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        weights = [1.0] * len(models) if weights is None else weights
        if not models:
            raise RegardError("An ensemble of no models.", "Give at least one.")
        if len(weights) != len(models):
            raise RegardError(f"{len(weights)} weights for {len(models)} models.", "Give one for each model.")
        if any(weight <= 0 for weight in weights):
            raise RegardError("A model of an ensemble has a weight of 0 or less.", "Leave it out instead.")
        self.models = list(models)
        # Known to torch as well, so that .eval(), .to() and recording reach the members.
        self.members = nn.ModuleList(model for model in models if isinstance(model, nn.Module))
        self.log_weights = [(torch.tensor(weight) / sum(weights)).log().item() for weight in weights]

    def start(self, source: Any) -> list[Any]:
        return [model.start(source) for model in self.models]

    def step(self, state: list[Any], last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], list[Any]]:
        """Log of the mean probability, which is its own log-softmax."""
        logits, states = zip(*(model.step(rows, last) for model, rows in zip(self.models, state)))
        sizes = [one.shape[-1] for one in logits]
        if len(set(sizes)) > 1:
            raise RegardError(
                f"The models of the ensemble have target vocabularies of {', '.join(map(str, sizes))} tokens.",
                "Only models trained with one and the same tokeniser can answer together.",
            )
        parts = [log_softmax(one) + weight for one, weight in zip(logits, self.log_weights)]
        return torch.logsumexp(torch.stack(parts), dim=0), list(states)

    def reorder(self, state: list[Any], indices: Int[Tensor, "B2 K2"]) -> list[Any]:
        return [model.reorder(rows, indices) for model, rows in zip(self.models, state)]
