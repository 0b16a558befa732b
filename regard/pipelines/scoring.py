"""Results of scoring and classification."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class SequenceScore:
    """Log-probability of a sequence, and its number of tokens including `<eos>`."""

    logprob: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean log-probability per token."""
        return self.logprob / self.tokens


@dataclass(frozen=True)
class Classification:
    """The predicted label of a text or an image, its probability, and the probabilities of all labels."""

    label: str
    probability: float
    probabilities: dict[str, float]

    @classmethod
    def from_probabilities(cls, labels: Sequence[str], probabilities: Sequence[float]) -> "Classification":
        """The classification with the most probable label.

        >>> Classification.from_probabilities(["cat", "dog"], [0.25, 0.75]).label
        'dog'
        """
        best = max(range(len(labels)), key=lambda i: probabilities[i])
        return cls(labels[best], probabilities[best], dict(zip(labels, probabilities)))


def target_logprobs(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The log-probability of the target token of each row.

    >>> target_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
