"""Greedy decoding and sampling over static tensors: every step has the same shapes."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.engine.best_tokens import best_tokens, log_sum_exp
from regard.decode.engine.slot_constraints import SlotConstraints
from regard.decode.hypotheses import Hypothesis, NBest
from regard.decode.sampling import draw


class StepwiseState:
    """The outputs of B slots with K independent hypotheses each: K = 1 in greedy decoding, `n_best` in sampling."""

    def __init__(
        self, slots: int, capacity: int, config: DecodeConfig, constraints: SlotConstraints, device: torch.device
    ) -> None:
        K = config.n_best
        self.config, self.constraints, self.hypotheses = config, constraints, K
        self.last = torch.zeros((slots, K), dtype=torch.long, device=device)
        self.step = torch.zeros(slots, dtype=torch.long, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.live = torch.zeros((slots, K), dtype=torch.bool, device=device)
        self.tokens = torch.zeros((slots, capacity, K), dtype=torch.long, device=device)
        self.token_log_p = torch.zeros((slots, capacity, K), device=device)
        self.lengths = torch.zeros((slots, K), dtype=torch.long, device=device)
        # Cache columns of a hypothesis: its prompt is in column 0, its own tokens in its own column.
        self.ancestors = torch.zeros((slots, K, capacity), dtype=torch.int32, device=device)
        self.slot_index = torch.arange(slots, device=device)
        is_sampling = config.method == "sample"
        self.draws = torch.zeros((slots, capacity, K), device=device) if is_sampling else None

    def tensors(self) -> list[str]:
        """Names of the tensors whose first axis is the slots."""
        return [name for name, value in vars(self).items() if isinstance(value, Tensor) and name != "slot_index"]

    def start(self, slots: Int[Tensor, "n"], first_tokens: Int[Tensor, "n"], offsets: Int[Tensor, "n"]) -> None:
        """Empty outputs in these slots; `offsets` are the cache positions of the first tokens."""
        # index_fill_: assigning a number to self.x[slots] would copy it from the host.
        self.last[slots] = first_tokens[:, None].expand(-1, self.hypotheses)
        self.step.index_fill_(0, slots, 0)
        self.done.index_fill_(0, slots, False)
        self.live.index_fill_(0, slots, True)
        self.lengths.index_fill_(0, slots, 0)
        if self.hypotheses > 1:
            is_prompt = torch.arange(self.ancestors.shape[2], device=slots.device) < offsets[:, None, None]
            beams = torch.arange(self.hypotheses, dtype=torch.int32, device=slots.device)[:, None]
            self.ancestors[slots] = torch.where(is_prompt, 0, beams)

    def set_draws(self, slots: Int[Tensor, "n"], keys: list[tuple[int, int]]) -> None:
        """The random numbers of new sentences, by seed and index: see `regard.decode.sample`."""
        if self.draws is not None:
            shape = tuple(self.draws.shape[1:])  # steps first, so that the first draws do not depend on the capacity
            uniform = [np.random.default_rng(key).random(shape) for key in keys]
            self.draws[slots] = torch.from_numpy(np.stack(uniform)).float().to(slots.device)

    def update(self, logits: Float[Tensor, "B K V"], positions: Int[Tensor, "B"]) -> None:
        """Choose the next token of every hypothesis."""
        at = self.step.clamp(max=self.tokens.shape[1] - 1)
        if self.draws is None:
            log_p, token = (x.squeeze(-1) for x in best_tokens(logits, 1, self.constraints, self.step))
        else:
            all_log_p = self._constrained_log_probs(logits)
            config = self.config
            u = self.draws[self.slot_index, at]
            column = draw(all_log_p, u, config.temperature, config.top_k, config.top_p)
            log_p = all_log_p.gather(-1, column[..., None]).squeeze(-1)
            token = self.constraints.tokens(column)
        self._advance(token, log_p, at)

    def _advance(self, token: Int[Tensor, "B K"], log_p: Float[Tensor, "B K"], at: Int[Tensor, "B"]) -> None:
        self.live.logical_and_(log_p != -torch.inf)  # -inf: no token is allowed, and the output ends without <eos>
        self.tokens[self.slot_index, at] = token
        self.token_log_p[self.slot_index, at] = log_p
        self.lengths.add_(self.live)
        self.live.logical_and_(token != self.constraints.special.eos)
        self.last.copy_(token)
        self.step.add_(~self.done)
        self.done.copy_(~self.live.any(1))

    def _constrained_log_probs(self, logits: Float[Tensor, "B K V"]) -> Float[Tensor, "B K V"]:
        """The log-probability of the token of every column; -inf for disallowed ones."""
        constraints = self.constraints
        logits = logits.float() if constraints.shortlist is None else constraints.shortlist.restrict(logits.float())
        log_p = logits - log_sum_exp(logits)
        forced = constraints.forced_tokens(self.step)[:, None, None]
        columns = torch.arange(log_p.shape[-1], device=log_p.device)
        is_forced = (columns == constraints.columns(forced.clamp(min=0))) & (forced >= 0)
        allowed = is_forced | (forced < 0)
        for column in constraints.banned_columns:
            allowed[..., column] = is_forced[..., column]
        bans_eos = constraints.bans_eos(self.step)
        if bans_eos is not None:
            eos = constraints.eos_column
            allowed[..., eos] &= ~bans_eos[:, None] | is_forced[..., eos]
        return log_p.masked_fill(~allowed, -torch.inf)

    def results(self, slots: list[int]) -> list[NBest]:
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
        columns = (tokens, log_ps, lengths, lengths - ends, scores, totals)
        results = []
        for sentence in zip(*(column.tolist() for column in columns)):
            n_best = NBest(
                Hypothesis(ids[:count], score, total, log_p[:length])
                for ids, log_p, length, count, score, total in zip(*sentence)
            )
            n_best.sort(key=lambda hypothesis: -hypothesis.score)
            results.append(n_best)
        return results
