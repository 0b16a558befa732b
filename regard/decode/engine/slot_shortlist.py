"""Vocabulary shortlists in the decoding engine: one column of logits per token that some slot allows."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.shortlist import allowed_mask


class SlotShortlist:
    """The allowed tokens of B slots. Logits have a column for each token of the union of the slots, in order of ids.

    Every slot is restricted to its own tokens exactly; the union only limits the size of the matrix product.

    >>> shortlist = SlotShortlist(2, 9, torch.device("cpu"))
    >>> shortlist.set_slots([0, 1], [np.array([3, 5]), np.array([3, 8])])
    >>> shortlist.tokens
    tensor([3, 5, 8])
    >>> shortlist.restrict(torch.zeros(2, 1, 3))[1]
    tensor([[0., -inf, 0.]])
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.allowed: Bool[Tensor, "B V"] = torch.zeros((slots, vocab), dtype=torch.bool, device=device)
        self._update()

    def set_slots(self, slots: Sequence[int], token_lists: Sequence[Int[np.ndarray, "_"]]) -> None:
        """The allowed tokens of new sentences in these slots."""
        rows = torch.tensor(slots, device=self.allowed.device)
        self.allowed[rows] = allowed_mask(token_lists, self.allowed.shape[1]).to(self.allowed.device)
        self._update()

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.allowed = self.allowed[slots]
        self._update()

    def _update(self) -> None:
        is_column = self.allowed.any(0)
        self.tokens: Int[Tensor, "U"] = is_column.nonzero().squeeze(1)
        self._column = (is_column.cumsum(0) - 1).clamp_(min=0)
        self.refused: Bool[Tensor, "B U"] = ~self.allowed[:, self.tokens]

    def columns(self, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The columns of tokens, all of which are in the union."""
        return self._column[tokens]

    def restrict(self, logits: Float[Tensor, "B K U"]) -> Float[Tensor, "B K U"]:
        """The logits, with -inf for the tokens that are not in the list of the slot."""
        return logits.masked_fill(self.refused[:, None], -torch.inf)
