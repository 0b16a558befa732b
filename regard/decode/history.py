"""The search history: the candidates of every step, why they were pruned, and which tokens a constraint refused."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.protocol import SpecialTokens
from regard.decode.request import DecodeConfig, Hypothesis
from regard.decode.rules import Constraints, log_softmax

# Number of continuations recorded per branch and step of greedy decoding and sampling, in addition to the chosen one.
MAX_CANDIDATES = 5


CandidateStatus = Literal["live", "finished", "pruned"]


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


class Recorder:
    """The histories of the sentences in B slots."""

    def __init__(self, config: DecodeConfig, special: SpecialTokens, slots: int) -> None:
        self.config, self.special = config, special
        self.histories = [SearchHistory(special.eos) for _ in range(slots)]

    def start(self, slots: list[int]) -> None:
        """Empty histories of new sentences in these slots."""
        for slot in slots:
            self.histories[slot] = SearchHistory(self.special.eos)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.histories = [self.histories[slot] for slot in slots.tolist()]


class BeamRecorder(Recorder):
    """Records beam search."""

    def add_step(
        self,
        search: Any,
        logits: Float[Tensor, "B K V"],
        candidates: tuple[Int[Tensor, "B P"], Int[Tensor, "B P"], Float[Tensor, "B P"], Float[Tensor, "B P"]],
        ends: Bool[Tensor, "B P"],
        finishes: Bool[Tensor, "B P"],
        chosen: Int[Tensor, "B K"],
        is_live: Bool[Tensor, "B K"],
    ) -> None:
        """Record a step, before the search keeps what it chose.

        `candidates` are parents, tokens, log-probabilities and scores of the candidates, `chosen` the next beam.
        """
        refused = self._refused_tokens(search, logits, candidates[0].shape[1])
        status = finishes.long().scatter_add(1, chosen, 2 * is_live.long())
        names: tuple[CandidateStatus, ...] = ("pruned", "finished", "live")
        columns = [column.tolist() for column in (*candidates, status, ends)]
        for slot, is_done in enumerate(search.done.tolist()):
            if is_done:
                continue
            step = SearchStep([], [], [], [], refused=refused[slot])
            for parent, token, log_prob, score, index, ended in zip(*(column[slot] for column in columns)):
                if log_prob > -float("inf"):
                    step.parents.append(parent)
                    step.tokens.append(token)
                    step.logprobs.append(log_prob)
                    step.statuses.append(names[index])
                    step.scores.append(score)
                    step.reasons.append("" if index else "end" if ended else "beam")
            kept = [log_prob for log_prob, status in zip(step.logprobs, step.statuses) if status == "live"]
            for i, log_prob in enumerate(step.logprobs):  # pruned for a less probable candidate
                if step.reasons[i] == "beam" and log_prob > min(kept, default=log_prob):
                    step.reasons[i] = "required"
            self.histories[slot].steps.append(step)

    def _refused_tokens(self, search: Any, logits: Float[Tensor, "B K V"], count: int) -> list[list[RefusedToken]]:
        """Tokens of each sentence that only a constraint keeps out of the best `count` candidates."""
        constraints: Constraints = search.constraints
        allowed = constraints.log_probs(logits, search.step)
        log_p, columns = log_softmax(constraints.restrict(logits)).topk(min(count, logits.shape[-1]), dim=-1)
        total = (search.log_prob[..., None] + log_p).flatten(1)
        is_refused = allowed.gather(-1, columns).flatten(1) == -torch.inf
        tokens = constraints.tokens(columns).flatten(1)
        best, index = total.topk(min(count, total.shape[1]), dim=1)
        refused: list[list[RefusedToken]] = [[] for _ in search.done]
        banned = is_refused.gather(1, index) & (best > -torch.inf) & ~search.done[:, None]
        steps = search.step.tolist()
        for slot, i in banned.nonzero().tolist():
            at = int(index[slot, i])
            beam, token = at // log_p.shape[-1], int(tokens[slot, at])
            reason = constraints.refusal_reason(slot, beam, steps[slot], token)
            refused[slot].append(RefusedToken(beam, token, float(best[slot, i]), reason))
        return refused

    def note_end(self, ended: Bool[Tensor, "B"], can_continue: Bool[Tensor, "B"], enough: Bool[Tensor, "B"]) -> None:
        """Note why searches that end now do."""
        for slot in ended.nonzero()[:, 0].tolist():
            reason = "ended" if not can_continue[slot] else "enough" if enough[slot] else "bound"
            self.histories[slot].stopped = reason


class StepwiseRecorder(Recorder):
    """Records greedy decoding and sampling. Samples that have been equal so far share a branch."""

    def __init__(self, config: DecodeConfig, special: SpecialTokens, slots: int) -> None:
        super().__init__(config, special, slots)
        # For each output, its index among the live candidates of the previous step (None: it has ended), and the
        # log-probabilities of these candidates.
        self.branches: list[list[int | None]] = [[] for _ in range(slots)]
        self.totals: list[list[float]] = [[] for _ in range(slots)]

    def start(self, slots: list[int]) -> None:
        super().start(slots)
        for slot in slots:
            self.histories[slot].stopped = "ended"
            self.branches[slot], self.totals[slot] = [0] * self.config.n_best, [0.0]

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        super().select_slots(slots)
        self.branches = [self.branches[slot] for slot in slots.tolist()]
        self.totals = [self.totals[slot] for slot in slots.tolist()]

    def add_step(self, search: Any, logits: Float[Tensor, "B K V"], chosen: Int[Tensor, "B K"]) -> None:
        """Record the step of every sentence that has not ended: the best tokens, and the chosen ones."""
        constraints: Constraints = search.constraints
        log_p = constraints.log_probs(logits, search.step)
        unconstrained = log_softmax(constraints.restrict(logits))
        steps, last_steps = search.step.tolist(), constraints.last_step.tolist()
        for slot, is_done in enumerate(search.done.tolist()):
            # The search may take one more step than the output of a language model has tokens.
            if not is_done and steps[slot] <= last_steps[slot]:
                self._add(constraints, slot, steps[slot], unconstrained[slot], log_p[slot], chosen[slot].tolist())

    def _add(
        self,
        constraints: Constraints,
        slot: int,
        t: int,
        unconstrained: Float[Tensor, "K V"],
        log_p: Float[Tensor, "K V"],
        chosen: list[int],
    ) -> None:
        branches, totals = self.branches[slot], self.totals[slot]
        chosen_pairs = {(branch, token) for branch, token in zip(branches, chosen) if branch is not None}
        candidates: list[tuple[float, int, int, str]] = []
        refused: list[RefusedToken] = []
        for branch in sorted({branch for branch, _ in chosen_pairs}):
            k = branches.index(branch)
            chosen_here = sorted(token for parent, token in chosen_pairs if parent == branch)
            probable = log_p[k].topk(min(MAX_CANDIDATES, log_p.shape[-1])).indices
            best = constraints.tokens(probable).tolist()
            reasons = dict(zip(best, self._pruning_reasons(log_p[k], probable.tolist())))
            columns = constraints.columns(torch.tensor([*best, *chosen_here], device=log_p.device)).tolist()
            by_token = {token: float(log_p[k, column]) for token, column in zip([*best, *chosen_here], columns)}
            for token, token_log_p in by_token.items():
                if token_log_p > -float("inf"):
                    reason = "" if token in chosen_here else reasons[token]
                    candidates.append((totals[branch] + token_log_p, branch, token, reason))
            for column in unconstrained[k].topk(min(MAX_CANDIDATES, unconstrained.shape[-1])).indices:
                if float(log_p[k, column]) == -float("inf") < float(unconstrained[k, column]):
                    token = int(constraints.tokens(column))
                    total = totals[branch] + float(unconstrained[k, column])
                    refused.append(RefusedToken(branch, token, total, constraints.refusal_reason(slot, k, t, token)))
        candidates.sort(key=lambda candidate: -candidate[0])
        ends, is_last = set(self.special.ends), t >= int(constraints.last_step[slot])
        statuses: list[CandidateStatus] = [
            "pruned" if reason else "finished" if is_last or token in ends else "live"
            for _, _, token, reason in candidates
        ]
        scores = [total / (t + 1) ** self.config.length_penalty for total, *_ in candidates]
        log_probs, parents, tokens, reasons_column = (
            [list(column) for column in zip(*candidates)] if candidates else ([], [], [], [])
        )
        tokens = [self.special.eos if token in ends else token for token in tokens]
        self.histories[slot].steps.append(
            SearchStep(parents, tokens, log_probs, statuses, scores, reasons_column, refused)  # type: ignore[arg-type]
        )
        live = [(branch, token) for (_, branch, token, _), status in zip(candidates, statuses) if status == "live"]
        self.totals[slot] = [total for (total, *_), status in zip(candidates, statuses) if status == "live"]
        pairs = zip(branches, chosen)
        self.branches[slot] = [live.index(pair) if pair in live else None for pair in pairs]

    def _pruning_reasons(self, log_p: Float[Tensor, "V"], best: list[int]) -> list[str]:
        """Why each of the best tokens (best first) would not be chosen."""
        if self.config.method == "greedy":
            return ["greedy"] * len(best)
        top_k, top_p = self.config.top_k, self.config.top_p
        p = (log_p / self.config.temperature).softmax(-1)
        if top_k > 0:
            p = p / p.topk(min(top_k, len(p))).values.sum()
        before = 0.0  # total probability of the better tokens
        reasons = []
        for rank, column in enumerate(best):
            reasons.append("top_k" if 0 < top_k <= rank else "top_p" if before >= top_p else "not drawn")
            before += float(p[column])
        return reasons
