"""Beam search: extends the `beam` best unfinished hypotheses of every sentence in parallel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.coverage import coverage_term, step_with_attention
from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import CandidateStatus, NBest, RefusedToken, SearchHistory, SearchStep
from regard.decode.interruption import check_interruption
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, SpecialTokens
from regard.decode.rules.constraints import Constraints, check_no_nan, log_softmax
from regard.decode.rules.lexical_constraints import LexicalConstraints, LexicalTracker, allocate_beam
from regard.decode.sampling import gather_hypotheses


@dataclass(frozen=True)
class LiveHypotheses:
    """Unfinished hypotheses. A log-probability of -inf marks an unused beam."""

    ids: Int[Tensor, "B K T"]
    log_ps: Float[Tensor, "B K T"]
    log_prob: Float[Tensor, "B K"]
    coverage: Float[Tensor, "B K S"]
    """Cross-attention that each source position has received so far; S is 0 without a coverage penalty."""

    @classmethod
    def empty(cls, B: int, S: int, device: torch.device) -> "LiveHypotheses":
        """One hypothesis without tokens per sentence."""
        ids = torch.zeros((B, 1, 0), dtype=torch.long, device=device)
        return cls(ids, ids.float(), torch.zeros((B, 1), device=device), torch.zeros((B, 1, S), device=device))

    def extend(
        self, parent: Int[Tensor, "B C"], token: Int[Tensor, "B C"], log_p: Float[Tensor, "B C"], total: Tensor
    ) -> "LiveHypotheses":
        """Candidates: each is its parent hypothesis plus one token."""
        ids = torch.cat((_pick(self.ids, parent), token[..., None]), dim=-1)
        log_ps = torch.cat((_pick(self.log_ps, parent), log_p[..., None]), dim=-1)
        return LiveHypotheses(ids, log_ps, total, _pick(self.coverage, parent))

    def select(self, index: Int[Tensor, "B K"], total: Float[Tensor, "B K"]) -> "LiveHypotheses":
        """The hypotheses at these indices of each sentence, with the given log-probabilities."""
        return LiveHypotheses(_pick(self.ids, index), _pick(self.log_ps, index), total, _pick(self.coverage, index))

    def select_sentences(self, rows: Int[Tensor, "B2"]) -> "LiveHypotheses":
        """All hypotheses of these sentences."""
        return LiveHypotheses(self.ids[rows], self.log_ps[rows], self.log_prob[rows], self.coverage[rows])


@dataclass(frozen=True)
class FinishedHypotheses:
    """The N best finished hypotheses of each sentence; unused slots have a score of -inf."""

    ids: Int[Tensor, "B N M"]
    log_ps: Float[Tensor, "B N M"]
    lengths: Int[Tensor, "B N"]
    log_prob: Float[Tensor, "B N"]
    score: Float[Tensor, "B N"]
    count: Int[Tensor, "B"]
    """Hypotheses that have finished, including those that are no longer among the N best."""

    @classmethod
    def empty(cls, B: int, N: int, max_len: int, device: torch.device) -> "FinishedHypotheses":
        ids = torch.zeros((B, N, max_len), dtype=torch.long, device=device)
        score = torch.full((B, N), -torch.inf, device=device)
        return cls(ids, ids.float(), ids.new_zeros(B, N), score, score, ids.new_zeros(B))

    def add(self, outputs: LiveHypotheses, score: Float[Tensor, "B C"]) -> "FinishedHypotheses":
        """Adds hypotheses with a score above -inf and keeps the N best of all."""
        padding = self.ids.shape[-1] - outputs.ids.shape[-1]
        lengths = torch.full_like(score, outputs.ids.shape[-1], dtype=torch.long)
        best, index = torch.cat((self.score, score), dim=1).topk(self.score.shape[1], dim=1)
        return FinishedHypotheses(
            ids=_pick(torch.cat((self.ids, F.pad(outputs.ids, (0, padding))), dim=1), index),
            log_ps=_pick(torch.cat((self.log_ps, F.pad(outputs.log_ps, (0, padding))), dim=1), index),
            lengths=torch.cat((self.lengths, lengths), dim=1).gather(1, index),
            log_prob=torch.cat((self.log_prob, outputs.log_prob), dim=1).gather(1, index),
            score=best,
            count=self.count + (score > -torch.inf).sum(1),
        )

    def select_sentences(self, rows: Int[Tensor, "B2"]) -> "FinishedHypotheses":
        """The finished hypotheses of these sentences."""
        return FinishedHypotheses(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@torch.no_grad()  # not inference_mode: a model may cache tensors here that are used in training later
def beam(
    model: Decodable,
    source: SourceBatch,
    config: DecodeConfig | None = None,
    *,
    special: SpecialTokens = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    max_total_len: int | None = None,
    lexical: Sequence[LexicalConstraints] | None = None,
    shortlist: Bool[Tensor, "B V"] | None = None,
) -> list[NBest]:
    """Beam search with beam width `config.beam`; returns the `n_best` best hypotheses of each sentence.

    Each step ranks all continuations of all beams by log-probability and keeps the best 2K as candidates. Candidates
    among the first K that end in `<eos>` are finished; the K best others are the new beam. At the maximum length, the
    first K are finished: by a forced `<eos>`, or in language models, like in transformers, without.

    `history` records every step. `max_total_len` limits the length of source and output together, for models whose
    output continues the source. `lexical` are the required and forbidden phrases of each sentence. With required
    phrases, the candidates are those of dynamic beam allocation (`allocate_beam`), and "the first K" are the first in
    its order. `shortlist` are the tokens that each output may contain.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> first, second = beam(model, pack([[4, 5, 3]]), DecodeConfig(beam=5, n_best=2))[0]
    >>> first.score >= second.score
    True
    """
    config = config or DecodeConfig()
    constraints = Constraints.from_config(source, config, special, prefixes, max_total_len, lexical, shortlist, model)
    B, K, device = len(constraints.limit), config.beam, constraints.limit.device
    if B == 0:
        return []
    results = [NBest() for _ in range(B)]
    histories = [SearchHistory(special.eos) for _ in range(B)] if history else []

    rows = torch.arange(B, device=device)  # the sentences still in the batch
    lengths = source.offsets.lengths
    live = LiveHypotheses.empty(B, source.offsets.max_len if config.coverage_penalty else 0, device)
    finished = FinishedHypotheses.empty(B, config.finished, int(constraints.limit.max()) + 1, device)
    state = model.start(source)
    last = torch.full((B, 1), special.sos, device=device)
    pool = (1 + len(special.ends)) * K
    t = 0
    while len(rows) > 0:
        check_interruption()
        if config.coverage_penalty:
            logits, state, attention = step_with_attention(model, state, last)
            live = replace(live, coverage=live.coverage + attention)
        else:
            logits, state = model.step(state, last)
        logits = constraints.restrict(logits)
        beams = logits.shape[1]  # 1 at the first step, then K
        log_p = constraints.log_probs(logits, live.ids)
        if constraints.lexical is None:
            candidates, parent = _best_candidates(live, log_p, pool)
            check_no_nan(candidates.log_prob)
            rank = torch.arange(pool, device=device)
        else:
            candidates, parent, rank = _allocated_candidates(live, log_p, pool, constraints.lexical, special.eos)

        candidates = replace(candidates, ids=constraints.unify_ends(candidates.ids))
        ends = candidates.ids[..., -1] == special.eos
        is_last = (t >= constraints.last_step)[:, None]
        finishes = (ends | is_last) & (rank < K)
        finished = finished.add(candidates, _score(candidates, finishes, lengths, config))
        # The K best unfinished candidates, in order. A beam has at most one candidate per end token, so the pool
        # contains K others.
        unfinished = candidates.log_prob.masked_fill(ends | is_last, -torch.inf)
        if constraints.lexical is not None:
            unfinished = _first_ranked(unfinished, rank, K)
        unfinished, chosen = unfinished.topk(K, dim=1)
        stuck = (unfinished[:, 0] == -torch.inf) & (finished.count == 0)
        if stuck.any():  # no token is allowed, not even <eos>: finish with the current hypotheses
            valid = stuck[:, None].expand(-1, beams)
            if constraints.lexical is not None:
                valid = valid & torch.tensor(constraints.lexical.can_end(stuck.tolist()), device=device)
            finished = finished.add(live, _score(live, valid, lengths, config))

        if history:
            scores = _score(candidates, torch.ones_like(ends), lengths, config)
            refused = _refused_tokens(live, logits, log_p, constraints, t, pool)
            steps = _steps(candidates, parent, ends, finishes, chosen, unfinished, scores, refused)
            for row, step in zip(rows.tolist(), steps):
                histories[row].steps.append(step)

        live = candidates.select(chosen, unfinished)
        parent = parent.gather(1, chosen)
        if constraints.lexical is not None:
            constraints = constraints.advance(parent, live.ids[..., -1], unfinished > -torch.inf)
        source_beam = parent + torch.arange(len(rows), device=device)[:, None] * beams
        done = _is_done(live, finished, constraints.last_step, config)
        if done.any():
            done_rows = done.nonzero().squeeze(1)
            best = finished.select_sentences(done_rows)
            if history:
                can_continue = live.log_prob[:, 0] > -torch.inf
                enough = finished.count >= config.enough
                for i in done_rows.tolist():
                    reason = "ended" if not can_continue[i] else "enough" if enough[i] else "bound"
                    histories[int(rows[i])].stopped = reason
            hypotheses = gather_hypotheses(best.ids, best.log_ps, best.lengths, best.log_prob, best.score, special.eos)
            for row, result in zip(rows[done_rows].tolist(), hypotheses):
                results[row] = NBest(result[: config.n_best])
            remaining = (~done).nonzero().squeeze(1)
            rows, source_beam, constraints = (
                rows[remaining],
                source_beam[remaining],
                constraints.select_sentences(remaining),
            )
            live, finished, lengths = (
                live.select_sentences(remaining),
                finished.select_sentences(remaining),
                lengths[remaining],
            )
        if len(rows) > 0:
            state = model.reorder(state, source_beam)
            last = live.ids[..., -1]
        t += 1
    for result, search in zip(results, histories):
        result.history = search
    return results


def _best_candidates(
    live: LiveHypotheses, log_p: Float[Tensor, "B K V"], count: int
) -> tuple[LiveHypotheses, Int[Tensor, "B C"]]:
    """The `count` best continuations, best first, and the index of the beam that each extends; padded with -inf."""
    V = log_p.shape[-1]
    # The best `count` overall are among the best `count` of each beam: two small topk calls replace a large one.
    token_log_p, token = log_p.topk(min(count, V), dim=-1)
    total = (live.log_prob[..., None] + token_log_p).flatten(1)
    best, index = total.topk(min(count, total.shape[1]), dim=1)
    best, index = F.pad(best, (0, count - best.shape[1]), value=-torch.inf), F.pad(index, (0, count - index.shape[1]))
    parent = index // token_log_p.shape[-1]
    outputs = live.extend(parent, token.flatten(1).gather(1, index), token_log_p.flatten(1).gather(1, index), best)
    return outputs, parent


def _allocated_candidates(
    live: LiveHypotheses, log_p: Float[Tensor, "B K V"], count: int, lexical: LexicalTracker, eos: int
) -> tuple[LiveHypotheses, Int[Tensor, "B C"], Int[Tensor, "B C"]]:
    """Like `_best_candidates`, with dynamic beam allocation; also returns the rank of each candidate in its order.

    The candidates of a beam are its best `count` tokens and those that begin or continue a required phrase.
    """
    B, K, V = log_p.shape
    token_log_p, token = log_p.topk(min(count, V), dim=-1)
    next_tokens = lexical.next_tokens()
    width = max(len(tokens) for sentence in next_tokens for tokens in sentence)
    padded = [[tokens + [0] * (width - len(tokens)) for tokens in sentence] for sentence in next_tokens]
    added = torch.tensor(padded, dtype=torch.long, device=log_p.device).view(B, K, width)
    is_padding = torch.tensor([[len(tokens) for tokens in sentence] for sentence in next_tokens], device=log_p.device)
    is_padding = torch.arange(width, device=log_p.device) >= is_padding[..., None]
    is_duplicate = (added[..., None] == token[..., None, :]).any(-1)
    added_log_p = log_p.gather(-1, added).masked_fill(is_padding | is_duplicate, -torch.inf)
    token, token_log_p = torch.cat((token, added), dim=-1), torch.cat((token_log_p, added_log_p), dim=-1)
    total = (live.log_prob[..., None] + token_log_p).flatten(1)
    check_no_nan(total)

    index = torch.zeros((B, count), dtype=torch.long)
    rank = torch.zeros((B, count), dtype=torch.long)
    best = torch.full((B, count), -torch.inf)
    totals = total.cpu()
    for row, tokens in enumerate(token.tolist()):
        missing = np.concatenate([lexical.missing_tokens(row, beam, one, eos) for beam, one in enumerate(tokens)])
        kept = torch.from_numpy(allocate_beam(totals[row].numpy(), missing, count))
        best[row, : len(kept)], order = totals[row][kept].sort(descending=True, stable=True)
        index[row, : len(kept)], rank[row, : len(kept)] = kept[order], order
    index, rank, best = index.to(log_p.device), rank.to(log_p.device), best.to(log_p.device)
    parent = index // token.shape[-1]
    outputs = live.extend(parent, token.flatten(1).gather(1, index), token_log_p.flatten(1).gather(1, index), best)
    return outputs, parent, rank


def _first_ranked(log_prob: Float[Tensor, "B C"], rank: Int[Tensor, "B C"], count: int) -> Float[Tensor, "B C"]:
    """The log-probabilities, except those of candidates that are not among the first `count` in order of rank."""
    rank = rank.masked_fill(log_prob == -torch.inf, rank.shape[1])
    return log_prob.masked_fill(rank > rank.sort(dim=1).values[:, count - 1 : count], -torch.inf)


def _score(
    outputs: LiveHypotheses, valid: Bool[Tensor, "B C"], lengths: Int[Tensor, "B"], config: DecodeConfig
) -> Float[Tensor, "B C"]:
    """The ranking score of finished hypotheses (see `DecodeConfig`); -inf where not valid."""
    score = outputs.log_prob / max(outputs.ids.shape[-1], 1) ** config.length_penalty
    if config.coverage_penalty:
        score = score + config.coverage_penalty * coverage_term(outputs.coverage, lengths)
    return score.masked_fill(~valid, -torch.inf)


def _is_done(
    live: LiveHypotheses, finished: FinishedHypotheses, last_step: Int[Tensor, "B"], config: DecodeConfig
) -> Bool[Tensor, "B"]:
    """True if enough hypotheses have finished, or if no live one can still enter the N best.

    Additional tokens only lower a log-probability, a larger length divisor raises it, and the coverage term is at most
    0. The final score of a live hypothesis is therefore at most its current log-probability divided by the length
    penalty of its maximum length. Without early stopping, that of its current length is used, as an estimate.
    """
    length = last_step + 1 if config.early_stopping else live.ids.shape[-1]
    bound = live.log_prob[:, 0] / length**config.length_penalty
    return (finished.score[:, -1] >= bound) | (finished.count >= config.enough)


def _steps(
    candidates: LiveHypotheses,
    parent: Int[Tensor, "B C"],
    ends: Bool[Tensor, "B C"],
    finishes: Bool[Tensor, "B C"],
    chosen: Int[Tensor, "B K"],
    unfinished: Float[Tensor, "B K"],
    scores: Float[Tensor, "B C"],
    refused: list[list[RefusedToken]],
) -> list[SearchStep]:
    """The record of this step for each sentence; padding is left out."""
    status = finishes.long().scatter_add(1, chosen, 2 * (unfinished > -torch.inf).long())
    names: tuple[CandidateStatus, ...] = ("pruned", "finished", "live")
    columns = (parent, candidates.ids[..., -1], candidates.log_prob, status, scores, ends)
    steps = []
    for sentence, refused_tokens in zip(zip(*(column.tolist() for column in columns)), refused):
        step = SearchStep([], [], [], [], refused=refused_tokens)
        for parent_beam, token, log_prob, status_index, score, ended in zip(*sentence):
            if log_prob > -float("inf"):
                step.parents.append(parent_beam)
                step.tokens.append(token)
                step.logprobs.append(log_prob)
                step.statuses.append(names[status_index])
                step.scores.append(score)
                step.reasons.append("" if status_index else "end" if ended else "beam")
        kept = [log_prob for log_prob, status in zip(step.logprobs, step.statuses) if status == "live"]
        for i, log_prob in enumerate(step.logprobs):  # pruned for a less probable candidate
            if step.reasons[i] == "beam" and log_prob > min(kept, default=log_prob):
                step.reasons[i] = "required"
        steps.append(step)
    return steps


def _refused_tokens(
    live: LiveHypotheses,
    logits: Float[Tensor, "B K V"],
    log_p: Float[Tensor, "B K V"],
    constraints: Constraints,
    t: int,
    count: int,
) -> list[list[RefusedToken]]:
    """Tokens of each sentence that only a constraint keeps out of the best `count` candidates."""
    unconstrained, parent = _best_candidates(live, log_softmax(logits), count)
    token = unconstrained.ids[..., -1]
    allowed = log_p.flatten(1).gather(1, parent * log_p.shape[-1] + token)
    banned = (allowed == -torch.inf) & (unconstrained.log_prob > -torch.inf)
    refused: list[list[RefusedToken]] = [[] for _ in range(len(banned))]
    for row, i in banned.nonzero().tolist():
        token_id, log_prob = int(token[row, i]), float(unconstrained.log_prob[row, i])
        reason = constraints.refusal_reason(row, int(parent[row, i]), t, token_id)
        refused[row].append(RefusedToken(int(parent[row, i]), token_id, log_prob, reason))
    return refused


def _pick(tensor: Tensor, index: Int[Tensor, "B C"]) -> Tensor:
    """Gather along the second axis with one set of indices per sentence."""
    return tensor.gather(1, index[..., None].expand(-1, -1, tensor.shape[-1]))
