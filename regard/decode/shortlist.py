"""Vocabulary shortlists: the target tokens that may translate a source sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.protocol import SpecialTokens
from regard.errors import RegardError


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The most probable target tokens of each source token, and the most frequent target tokens of all.

    A translation may contain the targets of the tokens of its source, the frequent tokens, the special tokens and those
    of a forced prefix. Log-probabilities are normalized over these tokens of the sentence, so that its result does not
    depend on the other sentences of its batch.

    >>> shortlist = Shortlist(np.array([[-1, -1], [7, -1], [6, 8]]), np.array([5]), target_vocab=10)
    >>> shortlist.allowed_tokens([1, 2], SpecialTokens(), prefix=[9]).tolist()
    [0, 1, 2, 3, 5, 6, 7, 8, 9]
    """

    targets: Int[np.ndarray, "S n"]
    """target tokens of each source token, most probable first, padded with -1"""
    frequent: Int[np.ndarray, "f"]
    target_vocab: int

    def allowed_tokens(
        self, source: Sequence[int], special: SpecialTokens, prefix: Sequence[int] = ()
    ) -> Int[np.ndarray, "a"]:
        """The allowed tokens of a sentence, sorted."""
        always = [*special.ids, *prefix]
        targets = self.targets[np.asarray(source, np.int64)].ravel()
        tokens = np.concatenate((targets, self.frequent, np.array(always, np.int64)))
        is_allowed = np.zeros(self.target_vocab, np.bool_)
        is_allowed[tokens[(tokens >= 0) & (tokens < self.target_vocab)]] = True
        return is_allowed.nonzero()[0].astype(np.int32)

    def all_tokens(self) -> Int[np.ndarray, "a"]:
        """The whole vocabulary."""
        return np.arange(self.target_vocab, dtype=np.int32)


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


def require_shortlist(shortlist: Shortlist | None) -> Shortlist:
    """The shortlist; an error if the model has none."""
    if shortlist is None:
        raise RegardError(
            "shortlist is set, but the model has no shortlist.",
            "Learn one from the training data: regard shortlist MODEL --data pairs.tsv",
        )
    return shortlist


def allowed_mask(token_lists: Sequence[Int[np.ndarray, "_"]], vocab: int) -> Bool[Tensor, "B V"]:
    """True for the tokens of each list.

    >>> allowed_mask([np.array([0, 2]), np.array([1])], 3)
    tensor([[ True, False,  True],
            [False,  True, False]])
    """
    mask = np.zeros((len(token_lists), vocab), bool)
    for row, tokens in enumerate(token_lists):
        mask[row, tokens] = True
    return torch.from_numpy(mask)
