"""Beam search over static tensors: every step has the same shapes, whatever the sentences of the slots do."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.engine.best_tokens import best_tokens
from regard.decode.engine.slot_constraints import SlotConstraints
from regard.decode.hypotheses import Hypothesis, NBest


class BeamState:
    """The beams of B slots; the same search as `regard.decode.beam`.

    Hypotheses are stored as back-pointers: `tokens[b, t, k]` extends beam `parents[b, t, k]` of step t - 1. The keys
    and values of a hypothesis stay in the cache column of the beam that computed them; `ancestors` lists these columns.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        config: DecodeConfig,
        constraints: SlotConstraints,
        device: torch.device,
    ) -> None:
        K, N = config.beam, config.finished
        self.config, self.constraints, self.hypotheses = config, constraints, K
        self.last = torch.zeros((slots, K), dtype=torch.long, device=device)
        self.step = torch.zeros(slots, dtype=torch.long, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.log_prob = torch.full((slots, K), -torch.inf, device=device)
        self.ancestors = torch.zeros((slots, K, capacity), dtype=torch.int32, device=device)
        self.tokens = torch.zeros((slots, capacity, K), dtype=torch.long, device=device)
        self.parents = torch.zeros_like(self.tokens)
        self.token_log_p = torch.zeros((slots, capacity, K), device=device)
        # The N best finished hypotheses; unused entries have a score of -inf.
        self.finished_score = torch.full((slots, N), -torch.inf, device=device)
        self.finished_log_prob = torch.zeros((slots, N), device=device)
        self.finished_step = torch.zeros((slots, N), dtype=torch.long, device=device)
        self.finished_parent = torch.zeros((slots, N), dtype=torch.long, device=device)
        self.end_token = torch.zeros((slots, N), dtype=torch.long, device=device)
        self.end_log_p = torch.zeros((slots, N), device=device)
        self.finished_count = torch.zeros(slots, dtype=torch.long, device=device)
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
        self.log_prob.index_fill_(0, slots, -torch.inf)
        self.log_prob[:, 0].index_fill_(0, slots, 0.0)
        # A prompt is stored in column 0; the beams diverge at the first generated token.
        self.ancestors.index_fill_(0, slots, 0)
        beams = torch.arange(self.hypotheses, dtype=torch.int32, device=slots.device)
        self.ancestors[slots, :, offsets] = beams
        self.finished_score.index_fill_(0, slots, -torch.inf)
        self.finished_count.index_fill_(0, slots, 0)

    def update(self, logits: Float[Tensor, "B K V"], positions: Int[Tensor, "B"]) -> Int[Tensor, "B K"]:
        """Choose the next tokens; returns the parent of each new beam. `positions` are those of the last tokens."""
        K, step = self.hypotheses, self.step
        top, ids = best_tokens(logits, 2 * K, self.constraints, step)
        return self._advance(top, ids, positions)

    def _advance(
        self, top: Float[Tensor, "B K C"], ids: Int[Tensor, "B K C"], positions: Int[Tensor, "B"]
    ) -> Int[Tensor, "B K"]:
        """Keep the best 2K candidates: finish those that end among the first K, and continue the K best others."""
        K, config, step = self.hypotheses, self.config, self.step
        C = top.shape[-1]
        total = (self.log_prob[..., None] + top).flatten(1)
        best, index = total.topk(min(2 * K, K * C), dim=1)
        parent, token = index.div(C, rounding_mode="floor"), ids.flatten(1).gather(1, index)
        log_p = top.flatten(1).gather(1, index)
        active = ~self.done

        ends = token == self.constraints.special.eos
        is_last = step >= self.constraints.last_step
        finishes = (ends | is_last[:, None]) & active[:, None]
        finishes[:, K:] = False
        length = (step + 1).float() ** config.length_penalty
        score = (best / length[:, None]).masked_fill(~finishes, -torch.inf)
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

        continuing, chosen = best.masked_fill(ends, -torch.inf).topk(K, dim=1)
        new_parent = parent.gather(1, chosen)
        self.last.copy_(torch.where(active[:, None], token.gather(1, chosen), self.last))
        self.log_prob.copy_(continuing)
        at = step.clamp(max=self.tokens.shape[1] - 1)
        self.tokens[self.slot_index, at] = self.last
        self.parents[self.slot_index, at] = new_parent
        self.token_log_p[self.slot_index, at] = log_p.gather(1, chosen)
        # The last tokens were written to the cache at `positions`, each in the column of its beam.
        ancestors = self.ancestors.gather(1, new_parent[..., None].expand_as(self.ancestors))
        self.ancestors.copy_(ancestors)
        after = (positions + 1).clamp(max=self.ancestors.shape[2] - 1)
        beams = torch.arange(K, dtype=torch.int32, device=after.device)
        self.ancestors[self.slot_index, :, after] = beams

        final_length = (self.constraints.last_step if config.early_stopping else step) + 1
        bound = continuing[:, 0] / final_length**config.length_penalty
        enough = self.finished_count >= config.enough
        self.done.logical_or_((self.finished_score[:, -1] >= bound) | enough | is_last)
        self.step.add_(active)
        return new_parent

    def results(self, slots: list[int]) -> list[NBest]:
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
        return [
            NBest(
                Hypothesis(tokens[:size], rank_score, total, log_p[:count])
                for tokens, log_p, size, count, rank_score, total in zip(*sentence)
                if rank_score != -np.inf
            )
            for sentence in zip(*(column.tolist() for column in columns))
        ]
