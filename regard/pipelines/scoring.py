"""Results of scoring and classification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """The predicted label of a text or an image, its probability, and the probabilities of all labels.

    A model with several labels per text gives each its own probability; a regression model gives values instead.
    """

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


class TaggedWord(NamedTuple):
    """A word with its tag, the tag's probability, and its (start, end) in the text."""

    text: str
    tag: str
    probability: float
    start: int
    end: int


def format_classification(result: Classification, all_labels: bool = False) -> str:
    """A classification as a line of text: label, tab and probability; or every label with its probability.

    >>> result = Classification.from_probabilities(["cat", "dog"], [0.25, 0.75])
    >>> format_classification(result), format_classification(result, all_labels=True)
    ('dog\\t0.7500', 'cat 0.2500\\tdog 0.7500')
    """
    if all_labels:
        return "\t".join(f"{label} {probability:.4f}" for label, probability in result.probabilities.items())
    return f"{result.label}\t{result.probability:.4f}"


def target_logprobs(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The log-probability of the target token of each row.

    >>> target_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def format_score(score: SequenceScore) -> str:
    """A score as a line of text: log-probability, mean per token and number of tokens, separated by tabs.

    >>> format_score(SequenceScore(-3.0, 4)).split("\\t")
    ['-3.000000', '-0.750000', '4']
    """
    return f"{score.logprob:.6f}\t{score.mean:.6f}\t{score.tokens}"
