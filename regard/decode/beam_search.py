"""Beam search: the `beam` best unfinished outputs of each sentence, continued side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.constraints import Constraints, log_softmax, refuse_nan
from regard.decode.coverage import coverage_term, step_and_regard
from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import BeamHistory, BeamStep, Fate, NBest, Refused
from regard.decode.protocol import SPECIAL, Decodable, Source, Special
from regard.decode.sampling import gather_hypotheses


@dataclass(frozen=True)
class Live:
    """The outputs still growing. A beam whose log-probability is -inf is an empty place."""

    ids: Int[Tensor, "B K T"]
    log_ps: Float[Tensor, "B K T"]
    log_prob: Float[Tensor, "B K"]
    coverage: Float[Tensor, "B K S"]
    """What each source position has been regarded with so far; S is 0 where nobody asks."""

    @classmethod
    def empty(cls, B: int, S: int, device: torch.device) -> "Live":
        """One output for each sentence, of no tokens yet."""
        ids = torch.zeros((B, 1, 0), dtype=torch.long, device=device)
        return cls(ids, ids.float(), torch.zeros((B, 1), device=device), torch.zeros((B, 1, S), device=device))

    def grow(
        self, parent: Int[Tensor, "B C"], token: Int[Tensor, "B C"], log_p: Float[Tensor, "B C"], total: Tensor
    ) -> "Live":
        """Each candidate: its parent and one token more."""
        ids = torch.cat((_pick(self.ids, parent), token[..., None]), dim=-1)
        log_ps = torch.cat((_pick(self.log_ps, parent), log_p[..., None]), dim=-1)
        return Live(ids, log_ps, total, _pick(self.coverage, parent))

    def choose(self, index: Int[Tensor, "B K"], total: Float[Tensor, "B K"]) -> "Live":
        """These outputs of each sentence, their log-probabilities given."""
        return Live(_pick(self.ids, index), _pick(self.log_ps, index), total, _pick(self.coverage, index))

    def take(self, rows: Int[Tensor, "B2"]) -> "Live":
        """All outputs of these sentences."""
        return Live(self.ids[rows], self.log_ps[rows], self.log_prob[rows], self.coverage[rows])


@dataclass(frozen=True)
class Finished:
    """The N best finished outputs of each sentence; a place not yet taken has a score of -inf."""

    ids: Int[Tensor, "B N M"]
    log_ps: Float[Tensor, "B N M"]
    lengths: Int[Tensor, "B N"]
    log_prob: Float[Tensor, "B N"]
    score: Float[Tensor, "B N"]
    count: Int[Tensor, "B"]
    """How many have finished, those that were pushed out included."""

    @classmethod
    def none(cls, B: int, N: int, longest: int, device: torch.device) -> "Finished":
        ids = torch.zeros((B, N, longest), dtype=torch.long, device=device)
        score = torch.full((B, N), -torch.inf, device=device)
        return cls(ids, ids.float(), ids.new_zeros(B, N), score, score, ids.new_zeros(B))

    def add(self, outputs: Live, score: Float[Tensor, "B C"]) -> "Finished":
        """With those outputs whose score is above -inf, as far as they are among the N best."""
        room = self.ids.shape[-1] - outputs.ids.shape[-1]
        lengths = torch.full_like(score, outputs.ids.shape[-1], dtype=torch.long)
        best, index = torch.cat((self.score, score), dim=1).topk(self.score.shape[1], dim=1)
        return Finished(
            ids=_pick(torch.cat((self.ids, F.pad(outputs.ids, (0, room))), dim=1), index),
            log_ps=_pick(torch.cat((self.log_ps, F.pad(outputs.log_ps, (0, room))), dim=1), index),
            lengths=torch.cat((self.lengths, lengths), dim=1).gather(1, index),
            log_prob=torch.cat((self.log_prob, outputs.log_prob), dim=1).gather(1, index),
            score=best,
            count=self.count + (score > -torch.inf).sum(1),
        )

    def take(self, rows: Int[Tensor, "B2"]) -> "Finished":
        return Finished(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@torch.no_grad()  # not inference_mode: a model may keep tables that it made here and train with them later
def beam(
    model: Decodable,
    source: Source,
    config: DecodeConfig | None = None,
    *,
    special: Special = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    room: int | None = None,
) -> list[NBest]:
    """The `n_best` best outputs that a beam of `config.beam` finds, for each sentence.

    Each step ranks every continuation of every beam by its log-probability and looks at the best 2K of them. Those
    among the first K that end in `<eos>` are finished; the K best others are the new beam. `history` keeps all of it.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> first, second = beam(model, pack([[4, 5, 3]]), DecodeConfig(beam=5, n_best=2))[0]
    >>> first.score >= second.score
    True
    """
    config = config or DecodeConfig()
    constraints = Constraints.of(source, config, special, prefixes, room)
    B, K, device = len(constraints.limit), config.beam, constraints.limit.device
    if B == 0:
        return []
    results = [NBest() for _ in range(B)]
    trees = [BeamHistory(special.eos) for _ in range(B)] if history else []

    rows = torch.arange(B, device=device)  # the sentences still in the batch
    lengths = source.offsets.lengths
    live = Live.empty(B, source.offsets.max_len if config.coverage_penalty else 0, device)
    finished = Finished.none(B, config.n_best, int(constraints.limit.max()) + 1, device)
    state = model.start(source)
    last = torch.full((B, 1), special.sos, device=device)
    t = 0
    while len(rows) > 0:
        if config.coverage_penalty:
            logits, state, regard = step_and_regard(model, state, last)
            live = replace(live, coverage=live.coverage + regard)
        else:
            logits, state = model.step(state, last)
        beams = logits.shape[1]  # 1 at first, then K
        log_p = constraints.log_probs(logits, t)
        candidates, parent = _best_candidates(live, log_p, 2 * K)
        refuse_nan(candidates.log_prob)

        ends = candidates.ids[..., -1] == special.eos
        ends_well = ends & (torch.arange(2 * K, device=device) < K)
        finished = finished.add(candidates, _score(candidates, ends_well, lengths, config))
        # The K best that go on, in order: at most one candidate of each beam is <eos>, so 2K hold that many.
        going = candidates.log_prob.masked_fill(ends, -torch.inf)
        going, chosen = going.topk(K, dim=1)
        stuck = (going[:, 0] == -torch.inf) & (finished.count == 0)
        if stuck.any():  # nothing may follow, not even <eos>: what there is must do
            finished = finished.add(live, _score(live, stuck[:, None].expand(-1, beams), lengths, config))

        if history:
            scores = _score(candidates, torch.ones_like(ends), lengths, config)
            refused = _refused(live, logits, log_p, constraints, t, 2 * K)
            steps = _steps(candidates, parent, ends, ends_well, chosen, going, scores, refused)
            for row, step in zip(rows.tolist(), steps):
                trees[row].steps.append(step)

        live = candidates.choose(chosen, going)
        source_beam = parent.gather(1, chosen) + torch.arange(len(rows), device=device)[:, None] * beams
        done = _is_done(live, finished, constraints.limit, config)
        if done.any():
            out = done.nonzero().squeeze(1)
            best = finished.take(out)
            if history:
                goes_on, enough = live.log_prob[:, 0] > -torch.inf, finished.count >= config.patience * K
                for i in out.tolist():
                    trees[int(rows[i])].stopped = "ended" if not goes_on[i] else "enough" if enough[i] else "bound"
            ended = gather_hypotheses(best.ids, best.log_ps, best.lengths, best.log_prob, best.score, special.eos)
            for row, result in zip(rows[out].tolist(), ended):
                results[row] = result
            left = (~done).nonzero().squeeze(1)
            rows, source_beam, constraints = rows[left], source_beam[left], constraints.take(left)
            live, finished, lengths = live.take(left), finished.take(left), lengths[left]
        if len(rows) > 0:
            state = model.reorder(state, source_beam)
            last = live.ids[..., -1]
        t += 1
    for result, tree in zip(results, trees):
        result.history = tree
    return results


def _best_candidates(live: Live, log_p: Float[Tensor, "B K V"], count: int) -> tuple[Live, Int[Tensor, "B C"]]:
    """The best continuations, best first, and the beam that each continues. Missing ones have -inf."""
    V = log_p.shape[-1]
    # The best `count` of all are among the best `count` of each beam: two small topk instead of a large one.
    each, token = log_p.topk(min(count, V), dim=-1)
    total = (live.log_prob[..., None] + each).flatten(1)
    best, index = total.topk(min(count, total.shape[1]), dim=1)
    best, index = F.pad(best, (0, count - best.shape[1]), value=-torch.inf), F.pad(index, (0, count - index.shape[1]))
    parent = index // each.shape[-1]
    outputs = live.grow(parent, token.flatten(1).gather(1, index), each.flatten(1).gather(1, index), best)
    return outputs, parent


def _score(
    outputs: Live, valid: Bool[Tensor, "B C"], lengths: Int[Tensor, "B"], config: DecodeConfig
) -> Float[Tensor, "B C"]:
    """What finished outputs are ranked by (see `DecodeConfig`); -inf for those that are not valid."""
    score = outputs.log_prob / max(outputs.ids.shape[-1], 1) ** config.length_penalty
    if config.coverage_penalty:
        score = score + config.coverage_penalty * coverage_term(outputs.coverage, lengths)
    return score.masked_fill(~valid, -torch.inf)


def _is_done(live: Live, finished: Finished, limit: Int[Tensor, "B"], config: DecodeConfig) -> Bool[Tensor, "B"]:
    """Enough have finished, or none of the live ones can enter the N best any more.

    More tokens only lower a log-probability, dividing by a greater length raises it, and the coverage term is never
    above 0: so no live output can end with a score above its present log-probability divided for the greatest length
    it may reach.
    """
    bound = live.log_prob[:, 0] / (limit + 1) ** config.length_penalty
    return (finished.score[:, -1] >= bound) | (finished.count >= config.patience * config.beam)


def _steps(
    candidates: Live,
    parent: Int[Tensor, "B C"],
    ends: Bool[Tensor, "B C"],
    ends_well: Bool[Tensor, "B C"],
    chosen: Int[Tensor, "B K"],
    going: Float[Tensor, "B K"],
    scores: Float[Tensor, "B C"],
    refused: list[list[Refused]],
) -> list[BeamStep]:
    """This step's record, for each sentence; empty places are left out."""
    fate = ends_well.long().scatter_add(1, chosen, 2 * (going > -torch.inf).long())
    names: tuple[Fate, ...] = ("pruned", "finished", "live")
    columns = (parent, candidates.ids[..., -1], candidates.log_prob, fate, scores, ends)
    steps = []
    for sentence, not_allowed in zip(zip(*(column.tolist() for column in columns)), refused):
        step = BeamStep([], [], [], [], refused=not_allowed)
        for beam_of, token, log_prob, number, score, ended in zip(*sentence):
            if log_prob > -float("inf"):
                step.parents.append(beam_of)
                step.tokens.append(token)
                step.logprobs.append(log_prob)
                step.fates.append(names[number])
                step.scores.append(score)
                step.reasons.append("" if number else "end" if ended else "beam")
        steps.append(step)
    return steps


def _refused(
    live: Live,
    logits: Float[Tensor, "B K V"],
    log_p: Float[Tensor, "B K V"],
    constraints: Constraints,
    t: int,
    count: int,
) -> list[list[Refused]]:
    """What would have been among the best `count` candidates if it had been allowed, for each sentence."""
    free, parent = _best_candidates(live, log_softmax(logits), count)
    token = free.ids[..., -1]
    allowed = log_p.flatten(1).gather(1, parent * log_p.shape[-1] + token)
    banned = (allowed == -torch.inf) & (free.log_prob > -torch.inf)
    found: list[list[Refused]] = [[] for _ in range(len(banned))]
    for row, i in banned.nonzero().tolist():
        which, price = int(token[row, i]), float(free.log_prob[row, i])
        found[row].append(Refused(int(parent[row, i]), which, price, constraints.why(row, t, which)))
    return found


def _pick(tensor: Tensor, index: Int[Tensor, "B C"]) -> Tensor:
    """Rows of the second axis, chosen for each sentence."""
    return tensor.gather(1, index[..., None].expand(-1, -1, tensor.shape[-1]))
