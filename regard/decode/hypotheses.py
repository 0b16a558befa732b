"""What decoding gives back."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Fate = Literal["live", "finished", "pruned"]


@dataclass(frozen=True)
class Hypothesis:
    """One output: its ids without `<sos>` and `<eos>`, and what the model thought of it.

    `token_logprobs` are the model's own, before temperature and truncation, forced tokens included; they end with
    that of `<eos>`, so they are one more than the ids (unless the model gave every continuation probability 0).
    `logprob` is their sum, `score` is what the hypotheses of a sentence are ranked by: see `DecodeConfig`.
    """

    ids: list[int]
    score: float
    logprob: float
    token_logprobs: list[float]


class Refused(NamedTuple):
    """A continuation that would have been considered if it had been allowed.

    `why` is "prefix" (another token is forced), "limit" (the output is as long as it may be, and must end), "min_len"
    (it must not end yet) or "special" (`<pad>` and `<sos>` are never written).
    """

    parent: int
    token: int
    logprob: float
    why: str


@dataclass(frozen=True)
class BeamStep:
    """The candidates that one step considered, best first.

    Candidate i continues live candidate number `parents[i]` of the step before (0, the empty output, at the first)
    by `tokens[i]`; `logprobs[i]` is that of the whole sequence so far. The live ones, in this order, are the beam.
    """

    parents: list[int]
    tokens: list[int]
    logprobs: list[float]
    fates: list[Fate]
    scores: list[float] = field(default_factory=list)
    """What each would be ranked by if it ended here: see `DecodeConfig`."""
    reasons: list[str] = field(default_factory=list)
    """Why a candidate was pruned: "beam" (better ones fill the beam), "end" (it ends, but not among the best `beam`),
    "greedy" (another is more probable), "top_k", "top_p" or "not drawn" (sampling). Others have ""."""
    refused: list[Refused] = field(default_factory=list)


@dataclass
class BeamHistory:
    """The tree that a search grew for one sentence. Greedy search is a beam of one; samples grow side by side."""

    eos: int
    steps: list[BeamStep] = field(default_factory=list)
    stopped: str = ""
    """Why the search was over: "enough" outputs had finished, no other could reach the `bound` of those that had, or
    there was nothing left to go on ("ended")."""

    def path(self, hypothesis: Hypothesis) -> list[int]:
        """The candidate that the hypothesis was at every step: an index into `steps[t].tokens`.

        >>> history = BeamHistory(3, [BeamStep([0, 0], [7, 5], [-0.1, -3.0], ["live", "live"]),
        ...                           BeamStep([1, 0], [3, 3], [-3.5, -4.0], ["finished", "finished"])])
        >>> history.path(Hypothesis([7], score=-2.0, logprob=-4.0, token_logprobs=[-0.1, -3.9]))
        [0, 1]
        """
        tokens = [*hypothesis.ids, self.eos][: len(hypothesis.token_logprobs)]
        path: list[int] = []
        beam = 0
        for step, token in zip(self.steps, tokens):
            # No two candidates share parent and token, so this one is the only one.
            here = next(i for i, pair in enumerate(zip(step.parents, step.tokens)) if pair == (beam, token))
            path.append(here)
            beam = step.fates[:here].count("live")
        return path


class NBest(list[Hypothesis]):
    """The hypotheses of one sentence, best first, and the tree they come from if `history` was asked for."""

    history: BeamHistory | None = None
