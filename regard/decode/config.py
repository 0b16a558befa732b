"""Options of greedy search, beam search and sampling."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from regard.errors import RegardError
from regard.ranges import Natural, NonNegative, Range, Seed, check_ranges

# Memory grows with the number of hypotheses.
Hypotheses = Annotated[int, Range(low=1, high=1000)]
# Logits divided by a smaller temperature would overflow.
Temperature = Annotated[float, Range(low=0.001, high=1000, hint="For the most probable token use method greedy.")]
TokenIds = tuple[Natural, ...]
TokenSequences = tuple[TokenIds, ...]
Precision = Literal["auto", "float32", "bfloat16", "float16", "float8", "int8"]


@dataclass(frozen=True)
class DecodeConfig:
    """Options of greedy search, beam search and sampling.

    A hypothesis of n tokens (including `<eos>`) is ranked by

        score = log P(y | x) / n ** length_penalty + coverage_penalty * sum over s of log min(sum over t of a_ts, 1)

    The first term is the mean log-probability per token at length_penalty 1 and the sum at 0; Marian, fairseq and
    CTranslate2 also divide by a power of the length. The second (GNMT, Wu et al. 2016, eq. 14) is low if some source
    position s has received little cross-attention a (mean over layers and heads); only beam search uses it.

    >>> DecodeConfig(method="beam", beam=4, n_best=2).limit(source_len=10)
    40
    """

    method: Literal["greedy", "beam", "sample"] = "beam"
    """decoding method"""
    beam: Hypotheses = 5
    """beam width: number of hypotheses per sentence in beam search"""
    n_best: Hypotheses = 1
    """number of hypotheses returned per sentence: the best of the beam, or independent samples"""
    length_penalty: Annotated[float, Range(low=0, high=10)] = 1.0
    """exponent of the length by which the log-probability is divided; 0: no normalization"""
    coverage_penalty: Annotated[float, Range(low=0, high=1000)] = 0.0
    """beam search: weight of the coverage penalty (GNMT) in the score"""
    patience: Annotated[float, Range(above=0, infinite=True)] = 1.0
    """beam search: stop after patience * beam finished hypotheses (Kasai et al. 2022), or if the n best are certain"""
    early_stopping: bool = True
    """beam search: stop as above (--no-early-stopping: once `beam` finished hypotheses have better scores than the best
    unfinished one has at its length, like transformers by default)"""
    max_len: Natural = 256
    """maximum output length in tokens, without `<eos>`; also limited to max_extra + max_ratio * source length"""
    max_ratio: NonNegative = 2.0
    """maximum output tokens per source token, see max_len"""
    max_extra: Natural = 20
    """output tokens allowed in addition to max_ratio * source length, see max_len"""
    min_len: Natural = 0
    """minimum output length in tokens, without `<eos>`, within the maximum"""
    max_total_len: Natural = 0
    """language models: maximum length of prompt and output together, in tokens; 0: unlimited"""
    unknown: bool = True
    """whether `<unk>`, which has no text, may be generated (--no-unknown: never); always off in word-level
    language models"""
    repetition_penalty: Annotated[float, Range(above=0, high=1000)] = 1.0
    """factor by which the scores of tokens that occurred before are lowered (Keskar et al. 2019); 1: none"""
    no_repeat_ngram_size: Natural = 0
    """length of n-grams that must not occur twice; 0: all may"""
    suppress_sequences: TokenSequences = ()
    """sequences of token ids that are never generated, such as 7,15-16 for the token 7 and for 15 before 16"""
    begin_suppress_tokens: TokenIds = ()
    """token ids that no output may begin with, such as 7,15"""
    temperature: Temperature = 1.0
    """sampling temperature: above 1 flattens the distribution, below 1 sharpens it"""
    top_k: Natural = 0
    """sampling from the k most probable tokens; 0: from all"""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """nucleus sampling: from the most probable tokens with this total probability"""
    seed: Seed = 0
    """random seed of sampling"""
    engine: Literal["auto", "plain"] = "auto"
    """what computes the steps: the fastest that supports the call (auto), or the model itself (plain)"""
    shortlist: bool = False
    """translate with the tokens of the model's shortlist only (see `regard shortlist`): faster, may lower quality"""
    precision: Precision = "auto"
    """precision of the weights in the decoding engine: that of the model (auto); int8 is for CPUs, bfloat16,
    float16 and float8 for GPUs"""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.method == "beam" and self.n_best > self.beam:
            raise RegardError(
                f"n_best must be at most the beam width, {self.beam} (got {self.n_best}).",
                "Lower n_best or raise beam.",
            )
        if self.method == "greedy" and self.n_best > 1:
            raise RegardError(
                f"n_best must be 1 for greedy decoding (got {self.n_best}).",
                "Use method beam or sample for several hypotheses.",
            )
        if self.min_len > self.max_len:
            raise RegardError(
                f"min_len must be at most max_len, {self.max_len} (got {self.min_len}).",
                "Lower min_len or raise max_len.",
            )
        if not all(self.suppress_sequences):
            raise RegardError("suppress_sequences contains an empty sequence.", "Remove it.")

    @property
    def finished(self) -> int:
        """Number of finished hypotheses that beam search keeps per sentence."""
        return self.n_best if self.early_stopping else self.beam

    @property
    def enough(self) -> float:
        """Number of finished hypotheses after which beam search stops."""
        return self.patience * self.beam if self.early_stopping else math.inf

    def limit(self, source_len: int) -> int:
        """Maximum output length in tokens, without `<eos>`, for a source of this length."""
        return int(min(self.max_len, self.max_extra + self.max_ratio * source_len))
