"""How probable a model finds a given text, and each of the labels that it knows."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class PairScore:
    """The log-probability of a given text, and over how many tokens (its end included)."""

    logprob: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.logprob / self.tokens


@dataclass(frozen=True)
class Classified:
    """The label of a text or an image, how likely it is, and how likely every label is."""

    label: str
    probability: float
    probabilities: dict[str, float]


def classified(labels: Sequence[str], shares: Sequence[float]) -> Classified:
    """The likeliest of the labels.

    >>> classified(["cat", "dog"], [0.25, 0.75]).label
    'dog'
    """
    best = max(range(len(labels)), key=lambda i: shares[i])
    return Classified(labels[best], shares[best], dict(zip(labels, shares)))


def logprobs(logits: Float[Tensor, "N V"], wanted: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The log-probability of one token in each row.

    >>> logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    return logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
