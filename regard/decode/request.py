"""What is asked of decoding, and what it answers: a request for encoded sentences, and hypotheses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Int

from regard.decode.config import DecodeConfig
from regard.decode.phrases import LexicalConstraints
from regard.decode.protocol import SPECIAL, SpecialTokens
from regard.decode.shortlist import Shortlist, require_shortlist

if TYPE_CHECKING:
    from regard.decode.history import SearchHistory


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Request:
    """Sentences to decode, encoded, with their options.

    >>> request = Request([[4, 5, 3], [6, 3]], DecodeConfig(beam=2), prefixes=[[7], []])
    >>> request.select([1]).sources, request.select([1]).sample_index(0)
    ([[6, 3]], 1)
    """

    sources: list[list[int]]
    config: DecodeConfig = field(default_factory=DecodeConfig)
    special: SpecialTokens = SPECIAL
    prefixes: Sequence[Sequence[int]] | None = None
    """tokens that each output begins with"""
    lexical: Sequence[LexicalConstraints] | None = None
    """required and forbidden phrases of each sentence"""
    sample_indices: Sequence[int] | None = None
    """numbers on which the samples of each sentence depend, in addition to the seed; by default 0, 1, 2, …"""
    max_total_len: int | None = None
    """maximum length of source and output together, for models whose output continues the source"""
    shortlist: Shortlist | None = None
    """is used with `config.shortlist`; sentences with required phrases may contain all tokens"""
    history: bool = False
    """whether to record the candidates of every step (`NBest.history`); the outputs are the same, bit for bit"""

    def __len__(self) -> int:
        """The number of sentences."""
        return len(self.sources)

    @property
    def hypotheses(self) -> int:
        """The number of hypotheses per sentence."""
        return self.config.beam if self.config.method == "beam" else self.config.n_best

    def prefix(self, i: int) -> Sequence[int]:
        """The tokens that output i begins with."""
        return () if self.prefixes is None else self.prefixes[i]

    def sample_index(self, i: int) -> int:
        """The number on which the samples of sentence i depend, in addition to the seed."""
        return i if self.sample_indices is None else self.sample_indices[i]

    def select(self, indices: Sequence[int]) -> "Request":
        """The request for some of the sentences."""

        def pick(column: Sequence[T] | None) -> list[T] | None:
            return None if column is None else [column[i] for i in indices]

        return replace(
            self,
            sources=[self.sources[i] for i in indices],
            prefixes=pick(self.prefixes),
            lexical=pick(self.lexical),
            sample_indices=[self.sample_index(i) for i in indices],
        )

    @property
    def vocab(self) -> int:
        """The size of the target vocabulary with a shortlist; 0 without."""
        return require_shortlist(self.shortlist).target_vocab if self.config.shortlist else 0

    def token_lists(self) -> list[Int[np.ndarray, "_"]] | None:
        """The tokens that the output of each sentence may contain; None without a shortlist: all.

        Required phrases need all tokens, however they are split.
        """
        if not self.config.shortlist:
            return None
        shortlist = require_shortlist(self.shortlist)
        forced = dict(enumerate(self.prefixes or ()))
        return [
            shortlist.all_tokens()
            if self.lexical is not None and self.lexical[i].required
            else shortlist.allowed_tokens(source, self.special, forced.get(i, ()))
            for i, source in enumerate(self.sources)
        ]


@dataclass(frozen=True)
class Hypothesis:
    """One output: its ids without `<sos>` and `<eos>`, and its log-probabilities.

    `token_logprobs` are those of the model before temperature, top-k and top-p (but after the repetition penalty, if
    any), including forced tokens. The last one is that of `<eos>`, so there is one more than ids, except where an
    output ends without `<eos>`: at the maximum length of a language model, or if every continuation had probability 0.
    `logprob` is their sum. `score` ranks the hypotheses of a sentence: see `DecodeConfig`.
    """

    ids: list[int]
    score: float
    logprob: float
    token_logprobs: list[float]


class NBest(list[Hypothesis]):
    """The hypotheses of one sentence, best first, and the history of the search if `history=True`."""

    history: "SearchHistory | None" = None
