"""Search over B slots: beam search, greedy decoding and sampling in tensors of fixed shapes, whatever the slots do.

`reference.py` defines the results. A slot has a sentence, or is done; sentences are at different steps. A step takes
the logits of the next tokens: `advance(logits, positions)` extends the hypotheses and returns the parents of the new
ones. `constraints` say what may come next; `coverage` and `recorder` are further parts, if asked for. Without them, a
step is also one kernel: `kernels/cpu/decode_choice.py` and `kernels/triton/search_update.py`.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.coverage import Coverage
from regard.decode.history import BeamRecorder, StepwiseRecorder
from regard.decode.request import DecodeConfig, Hypothesis, NBest
from regard.decode.rules import Constraints, best_tokens
from regard.errors import RegardError


class Search:
    """What both searches have: the tokens of K hypotheses per slot, and where their keys and values are cached."""

    recorder: Any = None
    """records the search history, if asked for"""
    coverage: Coverage | None = None
    """the cross-attention of the hypotheses, with a coverage penalty"""

    def __init__(
        self, slots: int, capacity: int, config: DecodeConfig, constraints: Constraints, device: torch.device
    ) -> None:
        self.config, self.constraints = config, constraints
        self.hypotheses = K = constraints.hypotheses
        self.last = torch.zeros((slots, K), dtype=torch.long, device=device)
        self.step = torch.zeros(slots, dtype=torch.long, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.tokens = torch.zeros((slots, capacity, K), dtype=torch.long, device=device)
        self.token_log_p = torch.zeros((slots, capacity, K), device=device)
        # The keys and values of a token stay in the cache column of the hypothesis that computed them.
        self.ancestors = torch.zeros((slots, K, capacity), dtype=torch.int32, device=device)
        self.slot_index = torch.arange(slots, device=device)

    def tensors(self) -> list[str]:
        """Names of the tensors whose first axis is the slots."""
        return [name for name, value in vars(self).items() if isinstance(value, Tensor) and name != "slot_index"]

    def start(self, slots: Int[Tensor, "n"], first_tokens: Int[Tensor, "n"], offsets: Int[Tensor, "n"]) -> None:
        """Empty hypotheses in these slots; `offsets` are the cache positions of the first tokens."""
        # index_fill_: assigning a number to self.x[slots] would copy it from the host.
        self.last[slots] = first_tokens[:, None].expand(-1, self.hypotheses)
        self.step.index_fill_(0, slots, 0)
        self.done.index_fill_(0, slots, False)

    def select_slots(self, slots: Int[Tensor, "B2"], used: int) -> None:
        """Keep only these slots, of which the first ones are used."""
        for name in self.tensors():
            setattr(self, name, getattr(self, name)[slots])
        self.stop(slice(used, None))
        self.slot_index = torch.arange(len(slots), device=slots.device)
        for part in (self.constraints, self.coverage, self.recorder):
            if part is not None:
                part.select_slots(slots)
        self.constraints.release(range(used, len(slots)))

    def stop(self, slots: slice) -> None:
        """End the search in these slots."""
        self.done[slots] = True

    def _unify_ends(self, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The tokens, with `<eos>` for every other token that ends an output."""
        special = self.constraints.special
        return torch.where(self.constraints.is_end(tokens), special.eos, tokens) if special.other_eos else tokens


class BeamSearch(Search):
    """Beam search. Hypotheses are back-pointers: `tokens[b, t, k]` extends beam `parents[b, t, k]` of step t - 1.

    The candidates of a step are the best continuations of all beams: as many as K and all their possible ends. Those
    among the first K that end in `<eos>` are finished, and the K best others are the new beam. With required phrases
    the candidates are those of dynamic beam allocation (`allocate_beam`), and "the first K" are the first in its order.
    """

    def __init__(
        self, slots: int, capacity: int, config: DecodeConfig, constraints: Constraints, device: torch.device
    ) -> None:
        super().__init__(slots, capacity, config, constraints, device)
        N, self.pool = config.finished, (1 + len(constraints.special.ends)) * config.beam
        self.log_prob = torch.full((slots, config.beam), -torch.inf, device=device)
        self.parents = torch.zeros_like(self.tokens)
        # The N best finished hypotheses; unused entries have a score of -inf.
        self.finished_score = torch.full((slots, N), -torch.inf, device=device)
        self.finished_log_prob = torch.zeros((slots, N), device=device)
        self.finished_step = torch.zeros((slots, N), dtype=torch.long, device=device)
        self.finished_parent = torch.zeros((slots, N), dtype=torch.long, device=device)
        self.end_token = torch.zeros((slots, N), dtype=torch.long, device=device)
        self.end_log_p = torch.zeros((slots, N), device=device)
        self.finished_count = torch.zeros(slots, dtype=torch.long, device=device)

    def start(self, slots: Int[Tensor, "n"], first_tokens: Int[Tensor, "n"], offsets: Int[Tensor, "n"]) -> None:
        super().start(slots, first_tokens, offsets)
        self.log_prob.index_fill_(0, slots, -torch.inf)
        self.log_prob[:, 0].index_fill_(0, slots, 0.0)
        # A prompt is stored in column 0; the beams diverge at the first generated token.
        self.ancestors.index_fill_(0, slots, 0)
        beams = torch.arange(self.hypotheses, dtype=torch.int32, device=slots.device)
        self.ancestors[slots, :, offsets] = beams
        self.finished_score.index_fill_(0, slots, -torch.inf)
        self.finished_count.index_fill_(0, slots, 0)

    def advance(self, logits: Float[Tensor, "B K V"], positions: Int[Tensor, "B"]) -> Int[Tensor, "B K"]:
        """Choose the next tokens; returns the parent of each new beam. `positions` are those of the last tokens."""
        constraints, recorded = self.constraints, None if self.recorder is None else logits.clone()
        if not constraints.has_rules:
            top, ids = best_tokens(logits, self.pool, constraints, self.step)
        else:
            log_p = constraints.log_probs(logits, self.step)
            top, columns = log_p.topk(min(self.pool, log_p.shape[-1]), dim=-1)
            ids = constraints.tokens(columns)
            if constraints.phrases is not None:
                top, ids = constraints.add_required_tokens(log_p, top, ids)
        return self.keep_best(top, ids, positions, recorded)

    def keep_best(
        self,
        top: Float[Tensor, "B K C"],
        ids: Int[Tensor, "B K C"],
        positions: Int[Tensor, "B"],
        recorded: Float[Tensor, "B K V"] | None = None,
    ) -> Int[Tensor, "B K"]:
        """The step from the best tokens of each beam, among which are the best candidates of all. Finish the candidates
        that end among the first K, and continue the K best others.
        """
        K, config, step, constraints = self.hypotheses, self.config, self.step, self.constraints
        total, rank = (self.log_prob[..., None] + top).flatten(1), None
        if constraints.phrases is None:
            best, index = total.topk(min(self.pool, total.shape[1]), dim=1)
        else:
            best, index, rank = constraints.allocate_beam(total, ids, self.pool)
        parent = index.div(top.shape[-1], rounding_mode="floor")
        token = self._unify_ends(ids.flatten(1).gather(1, index))
        log_p = top.flatten(1).gather(1, index)
        active = ~self.done

        ends = token == constraints.special.eos
        is_last = step >= constraints.last_step
        finishes = (ends | is_last[:, None]) & active[:, None]
        if rank is None:
            finishes[:, K:] = False
        else:
            finishes &= rank < K
        scores = best / ((step + 1).float() ** config.length_penalty)[:, None]
        if self.coverage is not None:
            scores = scores + config.coverage_penalty * self.coverage.terms(parent)
        score = scores.masked_fill(~finishes, -torch.inf)
        kept, order = torch.cat((self.finished_score, score), dim=1).topk(config.finished, dim=1)
        self.finished_score.copy_(kept)
        for stored, new in (
            (self.finished_log_prob, best),
            (self.finished_step, step[:, None].expand_as(parent)),
            (self.finished_parent, parent),
            (self.end_token, token),
            (self.end_log_p, log_p),
        ):
            stored.copy_(torch.cat((stored, new), dim=1).gather(1, order))
        self.finished_count.add_((score > -torch.inf).sum(1))

        unfinished = best.masked_fill(ends, -torch.inf)
        if rank is not None:
            # The first K in the order of dynamic beam allocation.
            order = rank.masked_fill(unfinished == -torch.inf, rank.shape[1])
            unfinished = unfinished.masked_fill(order > order.sort(dim=1).values[:, K - 1 : K], -torch.inf)
        continuing, chosen = unfinished.topk(K, dim=1)
        new_parent = parent.gather(1, chosen)
        if self.recorder is not None:
            is_live = (continuing > -torch.inf) & ~is_last[:, None]
            self.recorder.add_step(self, recorded, (parent, token, best, scores), ends, finishes, chosen, is_live)
        self.last.copy_(torch.where(active[:, None], token.gather(1, chosen), self.last))
        self.log_prob.copy_(continuing)
        at = step.clamp(max=self.tokens.shape[1] - 1)
        self.tokens[self.slot_index, at] = self.last
        self.parents[self.slot_index, at] = new_parent
        self.token_log_p[self.slot_index, at] = log_p.gather(1, chosen)
        # The last tokens were written to the cache at `positions`, each in the column of its beam.
        self.ancestors.copy_(self.ancestors.gather(1, new_parent[..., None].expand_as(self.ancestors)))
        after = (positions + 1).clamp(max=self.ancestors.shape[2] - 1)
        beams = torch.arange(K, dtype=torch.int32, device=after.device)
        self.ancestors[self.slot_index, :, after] = beams

        # More tokens only lower a log-probability, a larger length divisor raises it, and the coverage term is at most
        # 0. So this bounds the final score of unfinished hypotheses; without early stopping it is an estimate.
        final_length = (constraints.last_step if config.early_stopping else step) + 1
        bound = continuing[:, 0] / final_length**config.length_penalty
        enough = self.finished_count >= config.enough
        self.done.logical_or_((self.finished_score[:, -1] >= bound) | enough | is_last)
        self.step.add_(active)
        if constraints.has_rules or self.coverage is not None:
            live = continuing > -torch.inf
            constraints.update(new_parent, self.last, live)
            if self.coverage is not None:
                self.coverage.select(torch.where(live, new_parent, torch.arange(K, device=live.device)))
        if self.recorder is not None:
            self.recorder.note_end(active & self.done, is_live[:, 0], enough)
        return new_parent

    def results(self, slots: list[int]) -> list[NBest | RegardError]:
        """The finished hypotheses of these slots, best first."""
        rows = torch.tensor(slots, device=self.step.device)
        steps = int(self.step[rows].max())
        history = (self.tokens, self.parents, self.token_log_p)
        tokens, parents, log_ps = (column[rows, :steps].cpu().numpy() for column in history)
        finished = (self.finished_score, self.finished_log_prob, self.finished_step, self.finished_parent)
        score, log_prob, length, beam = (column[rows].cpu().numpy() for column in finished)
        end_token, end_log_p = self.end_token[rows].cpu().numpy(), self.end_log_p[rows].cpu().numpy()
        # Follow the back-pointers of all hypotheses at once.
        slot = np.arange(len(slots))[:, None]
        ids = np.zeros((*score.shape, steps + 1), np.int64)
        token_log_ps = np.zeros((*score.shape, steps + 1), np.float32)
        for t in range(steps - 1, -1, -1):
            is_token = t < length
            ids[..., t] = tokens[slot, t, beam]
            token_log_ps[..., t] = log_ps[slot, t, beam]
            beam = np.where(is_token, parents[slot, t, beam], beam)
        np.put_along_axis(ids, length[..., None], end_token[..., None], axis=-1)
        np.put_along_axis(token_log_ps, length[..., None], end_log_p[..., None], axis=-1)
        sizes = length + (end_token != self.constraints.special.eos)
        # Lists are sliced faster than arrays.
        count = self.config.n_best
        columns = (column[:, :count] for column in (ids, token_log_ps, sizes, length + 1, score, log_prob))
        results = [
            NBest(
                Hypothesis(tokens[:size], rank_score, total, log_p[:count])
                for tokens, log_p, size, count, rank_score, total in zip(*sentence)
                if rank_score != -np.inf
            )
            for sentence in zip(*(column.tolist() for column in columns))
        ]
        return [result or self._unfinished(slot) for slot, result in zip(slots, results)]

    def _unfinished(self, slot: int) -> NBest | RegardError:
        """The hypotheses of a slot before a step at which no token was allowed, not even `<eos>`."""
        steps, K, phrases = int(self.step[slot]) - 1, self.hypotheses, self.constraints.phrases
        can_end = [True] * K if phrases is None else phrases.can_end(slot)
        history = (self.tokens, self.parents, self.token_log_p)
        tokens, parents, log_ps = (column[slot, :steps].tolist() for column in history)
        terms = [0.0] * K
        if self.coverage is not None:
            beams = torch.arange(K).expand(len(self.step), K)
            terms = (self.config.coverage_penalty * self.coverage.terms(beams)[slot]).tolist()
        result = NBest()
        for k in range(K):
            ids, token_log_ps, beam = list[int](), list[float](), k
            for t in reversed(range(steps)):
                ids.insert(0, tokens[t][beam])
                token_log_ps.insert(0, log_ps[t][beam])
                beam = parents[t][beam]
            total = sum(token_log_ps)
            if beam == 0 and total > -torch.inf and can_end[k]:  # others are unused, or must not end here
                score = total / max(steps, 1) ** self.config.length_penalty + terms[k]
                result.append(Hypothesis(ids, score, total, token_log_ps))
        if not result and phrases is not None and phrases.phrases[slot] is not None:
            return phrases.error(slot)
        result.sort(key=lambda hypothesis: -hypothesis.score)
        return NBest(result[: self.config.n_best])


class StepwiseSearch(Search):
    """Greedy decoding and sampling: K independent hypotheses per slot, 1 or `n_best`."""

    def __init__(
        self, slots: int, capacity: int, config: DecodeConfig, constraints: Constraints, device: torch.device
    ) -> None:
        super().__init__(slots, capacity, config, constraints, device)
        self.live = torch.zeros((slots, self.hypotheses), dtype=torch.bool, device=device)
        self.lengths = torch.zeros((slots, self.hypotheses), dtype=torch.long, device=device)
        is_sampling = config.method == "sample"
        self.draws = torch.zeros((slots, capacity, self.hypotheses), device=device) if is_sampling else None

    def start(self, slots: Int[Tensor, "n"], first_tokens: Int[Tensor, "n"], offsets: Int[Tensor, "n"]) -> None:
        super().start(slots, first_tokens, offsets)
        self.live.index_fill_(0, slots, True)
        self.lengths.index_fill_(0, slots, 0)
        if self.hypotheses > 1:  # a prompt is in column 0, the tokens of a hypothesis in its own column
            is_prompt = torch.arange(self.ancestors.shape[2], device=slots.device) < offsets[:, None, None]
            beams = torch.arange(self.hypotheses, dtype=torch.int32, device=slots.device)[:, None]
            self.ancestors[slots] = torch.where(is_prompt, 0, beams)

    def stop(self, slots: slice) -> None:
        super().stop(slots)
        self.live[slots] = False

    def set_draws(self, slots: Int[Tensor, "n"], keys: list[tuple[int, int]]) -> None:
        """The random numbers of new sentences. They depend only on a seed and an index, not on how sentences are
        batched.
        """
        if self.draws is not None:
            shape = tuple(self.draws.shape[1:])  # steps first, so that the first draws do not depend on the capacity
            uniform = [np.random.default_rng(key).random(shape) for key in keys]
            self.draws[slots] = torch.from_numpy(np.stack(uniform)).float().to(slots.device)

    def advance(self, logits: Float[Tensor, "B K V"], positions: Int[Tensor, "B"] | None = None) -> None:
        """Choose the next token of every hypothesis."""
        constraints, config = self.constraints, self.config
        recorded = None if self.recorder is None else logits.clone()
        if self.draws is None and not constraints.has_rules:
            log_p, token = (x.squeeze(-1) for x in best_tokens(logits, 1, constraints, self.step))
        else:
            all_log_p = constraints.log_probs(logits, self.step)
            if self.draws is None:
                column = all_log_p.argmax(-1)
            else:
                u = self.draws[self.slot_index, self._at]
                column = draw(all_log_p, u, config.temperature, config.top_k, config.top_p)
            log_p = all_log_p.gather(-1, column[..., None]).squeeze(-1)
            token = constraints.tokens(column)
        if self.recorder is not None:
            self.recorder.add_step(self, recorded, token)
        token = self._unify_ends(token)
        self.append(token, log_p)
        if constraints.has_rules:
            constraints.update(None, token, self.live)

    @property
    def _at(self) -> Int[Tensor, "B"]:
        """Where the next tokens are stored."""
        return self.step.clamp(max=self.tokens.shape[1] - 1)

    def append(self, token: Int[Tensor, "B K"], log_p: Float[Tensor, "B K"]) -> None:
        """Append a token to every hypothesis."""
        at = self._at
        self.live.logical_and_(log_p != -torch.inf)  # -inf: no token is allowed, and the output ends without <eos>
        self.tokens[self.slot_index, at] = token
        self.token_log_p[self.slot_index, at] = log_p
        self.lengths.add_(self.live)
        self.live.logical_and_(token != self.constraints.special.eos)
        self.last.copy_(token)
        self.step.add_(~self.done)
        self.done.copy_(~self.live.any(1))

    def results(self, slots: list[int]) -> list[NBest | RegardError]:
        """The outputs of these slots, best first."""
        rows = torch.tensor(slots, device=self.step.device)
        steps = int(self.step[rows].max())
        eos, penalty = self.constraints.special.eos, self.config.length_penalty
        history = self.tokens[rows, :steps], self.token_log_p[rows, :steps]
        tokens, log_ps = (column.cpu().numpy().swapaxes(1, 2) for column in history)
        lengths = self.lengths[rows].cpu().numpy()
        if self.constraints.ends_at_limit:  # without the <eos> that is forced there
            lengths = np.minimum(lengths, self.constraints.limit[rows, None].clamp(min=1).cpu().numpy())
        is_token = np.arange(steps) < lengths[..., None]
        totals = np.where(is_token, log_ps, 0.0).sum(-1, dtype=np.float64)
        scores = totals / np.maximum(lengths, 1) ** penalty
        ends = np.take_along_axis(tokens, np.maximum(lengths - 1, 0)[..., None], -1)[..., 0] == eos
        # Lists are sliced faster than arrays.
        columns = (tokens, log_ps, lengths, lengths - (ends & (lengths > 0)), scores, totals)
        results: list[NBest | RegardError] = []
        for sentence in zip(*(column.tolist() for column in columns)):
            n_best = NBest(
                Hypothesis(ids[:count], score, total, log_p[:length])
                for ids, log_p, length, count, score, total in zip(*sentence)
            )
            n_best.sort(key=lambda hypothesis: -hypothesis.score)
            results.append(n_best)
        return results


def make_search(
    slots: int,
    capacity: int,
    config: DecodeConfig,
    constraints: Constraints,
    device: torch.device,
    *,
    history: bool = False,
    source_capacity: int = 0,
) -> BeamSearch | StepwiseSearch:
    """The search of a config, which records its history if asked for."""
    if config.method != "beam":
        stepwise = StepwiseSearch(slots, capacity, config, constraints, device)
        stepwise.recorder = StepwiseRecorder(config, constraints.special, slots) if history else None
        return stepwise
    search = BeamSearch(slots, capacity, config, constraints, device)
    search.recorder = BeamRecorder(config, constraints.special, slots) if history else None
    if config.coverage_penalty:
        search.coverage = Coverage(slots, config.beam, source_capacity, device)
    return search


def draw(
    log_p: Float[Tensor, "B K V"],
    u: Float[Tensor, "B K"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, "B K"]:
    """Inverse transform sampling: the first token whose cumulative probability exceeds u, uniform in [0, 1).

    >>> draw(torch.tensor([[[0.5, 0.2, 0.3]]]).log(), torch.tensor([[0.6]])).item()
    1
    """
    order = None
    if top_k > 0:
        log_p, order = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    elif top_p < 1:
        log_p, order = log_p.sort(dim=-1, descending=True)
    # Unnormalized probabilities relative to the largest; a row of only -inf becomes zeros.
    largest = log_p.amax(-1, keepdim=True).clamp(min=torch.finfo(log_p.dtype).min)
    p = ((log_p - largest) / temperature).exp()
    total = p.cumsum(-1)
    if top_p < 1:
        p = p * (total - p < top_p * total[..., -1:])  # keep a token while the total before it is below top_p
        total = p.cumsum(-1)
    # u is kept below 1 by a few rounding errors, so that a last token of probability 0 is never drawn.
    threshold = u.clamp(max=1 - 2**-22)[..., None] * total[..., -1:]
    index = torch.searchsorted(total, threshold, right=True).clamp(max=total.shape[-1] - 1)
    return (index if order is None else order.gather(-1, index)).squeeze(-1)
