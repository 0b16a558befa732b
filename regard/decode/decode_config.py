"""How to decode: every option, once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from regard.errors import RegardError
from regard.ranges import Natural, NonNegative, Range, Seed, check_ranges

# The memory of a search grows with its hypotheses.
Hypotheses = Annotated[int, Range(low=1, high=1000)]
# Logits divided by less would be infinite.
Temperature = Annotated[float, Range(low=0.001, high=1000, hint="For the most probable token use method greedy.")]


@dataclass(frozen=True)
class DecodeConfig:
    """The options of greedy, beam and sampled decoding.

    A hypothesis of n tokens (`<eos>` counted) is ranked by

        score = log P(y | x) / n ** length_penalty + coverage_penalty * sum over s of log min(sum over t of a_ts, 1)

    The first term is the average log-probability per token at length_penalty 1 and the bare sum at 0; powers of the
    length are what Marian, fairseq and CTranslate2 use too. The second (GNMT, Wu et al. 2016, eq. 14) is small when
    some source position s has received little cross-attention a (mean of layers and heads); beam search alone knows it.

    >>> DecodeConfig(method="beam", beam=4, n_best=2).limit(source_len=10)
    40
    """

    method: Literal["greedy", "beam", "sample"] = "beam"
    beam: Hypotheses = 5
    """Hypotheses kept for each sentence in beam search."""
    n_best: Hypotheses = 1
    """Hypotheses returned for each sentence: the best ones of a beam, or so many independent samples."""
    length_penalty: Annotated[float, Range(low=0, high=10)] = 1.0
    coverage_penalty: Annotated[float, Range(low=0, high=1000)] = 0.0
    patience: Annotated[float, Range(above=0, infinite=True)] = 1.0
    """A sentence is done when patience * beam of its hypotheses have finished (Kasai et al. 2022), or earlier if no
    unfinished one can still enter the n best. With inf, only that proof ends the search."""
    max_len: Natural = 256
    """No output has more tokens (`<eos>` not counted) than this, nor than max_extra + max_ratio * source length."""
    max_ratio: NonNegative = 2.0
    max_extra: Natural = 20
    min_len: Natural = 0
    """No output ends before this number of tokens, unless it has reached its limit."""
    unknown: bool = True
    """Whether `<unk>` may be written; its text is empty. A language model of words never writes it."""
    temperature: Temperature = 1.0
    """Sampling: above 1 flattens the distribution, below 1 sharpens it."""
    top_k: Natural = 0
    """Sampling: draw from the k most probable tokens; 0: from all."""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """Sampling: draw from the most probable tokens that together reach this probability."""
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.method == "beam" and self.n_best > self.beam:
            raise RegardError(
                f"n_best must be at most the beam, {self.beam} (got {self.n_best}).",
                "Ask for fewer hypotheses, or use a wider beam.",
            )
        if self.method == "greedy" and self.n_best > 1:
            raise RegardError(
                f"n_best must be 1 for greedy decoding (got {self.n_best}).", "For several use beam or sample."
            )
        if self.min_len > self.max_len:
            raise RegardError(
                f"min_len is {self.min_len}, more than max_len ({self.max_len}).", "Lower min_len or raise max_len."
            )

    def limit(self, source_len: int) -> int:
        """The most tokens, `<eos>` not counted, of an output for a source of this length."""
        return int(min(self.max_len, self.max_extra + self.max_ratio * source_len))
