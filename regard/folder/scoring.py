"""How probable a model finds a given text."""

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


def logprobs(logits: Float[Tensor, "N V"], wanted: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The log-probability of one token in each row.

    >>> logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    return logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
