"""How to decode: every option, once."""

from dataclasses import dataclass
from typing import Literal

from regard.errors import RegardError


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
    beam: int = 5
    """Hypotheses kept for each sentence in beam search."""
    n_best: int = 1
    """Hypotheses returned for each sentence: the best ones of a beam, or so many independent samples."""
    length_penalty: float = 1.0
    coverage_penalty: float = 0.0
    patience: float = 1.0
    """A sentence is done when patience * beam of its hypotheses have finished (Kasai et al. 2022), or earlier if no
    unfinished one can still enter the n best. With inf, only that proof ends the search."""
    max_len: int = 256
    """No output has more tokens (`<eos>` not counted) than this, nor than max_extra + max_ratio * source length."""
    max_ratio: float = 2.0
    max_extra: int = 20
    min_len: int = 0
    """No output ends before this number of tokens, unless it has reached its limit."""
    temperature: float = 1.0
    """Sampling: above 1 flattens the distribution, below 1 sharpens it."""
    top_k: int = 0
    """Sampling: draw from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sampling: draw from the most probable tokens that together reach this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        def need(condition: bool, option: str, hint: str) -> None:
            if not condition:
                raise RegardError(f"{option} = {getattr(self, option)} makes no sense.", hint)

        need(self.method in ("greedy", "beam", "sample"), "method", "Choose greedy, beam or sample.")
        need(self.beam >= 1, "beam", "It must be at least 1.")
        need(self.n_best >= 1, "n_best", "It must be at least 1.")
        if self.method == "beam":
            need(self.n_best <= self.beam, "n_best", f"A beam of {self.beam} gives at most {self.beam} hypotheses.")
        if self.method == "greedy":
            need(self.n_best == 1, "n_best", "Greedy decoding gives one hypothesis; use beam or sample for more.")
        need(self.length_penalty >= 0, "length_penalty", "It must be 0 or more.")
        need(self.coverage_penalty >= 0, "coverage_penalty", "It must be 0 or more.")
        need(self.patience > 0, "patience", "It must be above 0.")
        need(self.max_len >= 0, "max_len", "It must be 0 or more.")
        need(self.max_ratio >= 0, "max_ratio", "It must be 0 or more.")
        need(self.max_extra >= 0, "max_extra", "It must be 0 or more.")
        need(self.min_len >= 0, "min_len", "It must be 0 or more.")
        if self.min_len > self.max_len:
            raise RegardError(
                f"min_len is {self.min_len}, more than max_len ({self.max_len}).", "Lower min_len or raise max_len."
            )
        need(self.temperature > 0, "temperature", "It must be above 0; for the most probable token use greedy.")
        need(self.top_k >= 0, "top_k", "It must be 0 (all tokens) or more.")
        need(0 < self.top_p <= 1, "top_p", "It must be above 0 and at most 1.")

    def limit(self, source_len: int) -> int:
        """The most tokens, `<eos>` not counted, of an output for a source of this length."""
        return min(self.max_len, int(self.max_extra + self.max_ratio * source_len))
