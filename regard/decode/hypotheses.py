"""Results of decoding: hypotheses, and the history of the search."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CandidateStatus = Literal["live", "finished", "pruned"]


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


class RefusedToken(NamedTuple):
    """A token that would have been a candidate but is disallowed by a constraint.

    `reason` is "prefix" (another token is forced), "limit" (the output has its maximum length and must end), "min_len"
    (the output must not end yet), "special" (`<pad>` and `<sos>` are never generated), "suppressed" (it would repeat an
    n-gram or complete a suppressed sequence), "forbidden" (it would complete a forbidden phrase) or "required" (a
    required phrase is missing, or would not fit any more).
    """

    parent: int
    token: int
    logprob: float
    reason: str


@dataclass(frozen=True)
class SearchStep:
    """The candidates of one decoding step, best first.

    Candidate i extends live candidate `parents[i]` of the previous step (0, the empty output, at the first step) by
    `tokens[i]`; `logprobs[i]` is the log-probability of the sequence so far. The live candidates, in this order, are
    the beam.
    """

    parents: list[int]
    tokens: list[int]
    logprobs: list[float]
    statuses: list[CandidateStatus]
    scores: list[float] = field(default_factory=list)
    """Ranking score of each candidate if it ended here: see `DecodeConfig`."""
    reasons: list[str] = field(default_factory=list)
    """Why a candidate was pruned: "beam" (the beam is full of better ones), "end" (it ends, but is not among the best
    `beam`), "greedy" (another is more probable), "top_k", "top_p" or "not drawn" (sampling), "required" (the
    beam keeps less probable candidates with more of the required phrases). "" otherwise."""
    refused: list[RefusedToken] = field(default_factory=list)


@dataclass
class SearchHistory:
    """All steps of the search for one sentence. Greedy search is a beam of one; samples are parallel branches."""

    eos: int
    steps: list[SearchStep] = field(default_factory=list)
    stopped: str = ""
    """Why the search stopped: "enough" (enough outputs had finished), "bound" (no unfinished output could still enter
    the n best) or "ended" (no unfinished output was left)."""

    def path(self, hypothesis: Hypothesis) -> list[int]:
        """The index of the hypothesis among the candidates of each step: `steps[t].tokens[path[t]]` is its token.

        >>> history = SearchHistory(3, [SearchStep([0, 0], [7, 5], [-0.1, -3.0], ["live", "live"]),
        ...                           SearchStep([1, 0], [3, 3], [-3.5, -4.0], ["finished", "finished"])])
        >>> history.path(Hypothesis([7], score=-2.0, logprob=-4.0, token_logprobs=[-0.1, -3.9]))
        [0, 1]
        """
        tokens = [*hypothesis.ids, self.eos][: len(hypothesis.token_logprobs)]
        path: list[int] = []
        beam = 0
        for step, token in zip(self.steps, tokens):
            # Candidates that share parent and token end by different tokens (`other_eos`).
            indices = [i for i, pair in enumerate(zip(step.parents, step.tokens)) if pair == (beam, token)]
            index = next((i for i in indices if step.statuses[i] != "pruned"), indices[0])
            path.append(index)
            beam = step.statuses[:index].count("live")
        return path


class NBest(list[Hypothesis]):
    """The hypotheses of one sentence, best first, and the history of the search if `history=True`."""

    history: SearchHistory | None = None
