"""Vocabulary shortlists: the target tokens that may translate a source sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
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
