"""What is asked of decoding, and what it answers: options, a request for encoded sentences, and hypotheses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from jaxtyping import Int

from regard.decode.phrases import LexicalConstraints
from regard.decode.protocol import SPECIAL, SpecialTokens
from regard.decode.shortlist import Shortlist, require_shortlist
from regard.errors import RegardError
from regard.ranges import Natural, NonNegative, Range, Seed, check_ranges

if TYPE_CHECKING:
    from regard.decode.history import SearchHistory

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
