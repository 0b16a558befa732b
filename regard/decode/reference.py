"""Greedy search and beam search over Python lists: the definition of what `regard.decode` computes.

One sentence and one hypothesis at a time, for reading and for tests; `decode_all` gives the same results faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from regard.decode.protocol import SPECIAL, Decodable, SpecialTokens, continues_source
from regard.decode.request import DecodeConfig, Hypothesis, NBest
from regard.layers.packed import pack

# From the tokens so far and the log-probabilities (V,) of the next: these, with -inf for tokens that must not follow.
Rule = Callable[[list[int], Tensor], Tensor]


@dataclass(frozen=True)
class Output:
    """The tokens of a hypothesis so far, and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]

    def extend(self, token: int, logprob: float) -> "Output":
        return Output([*self.ids, token], [*self.logprobs, logprob])

    @property
    def logprob(self) -> float:
        return sum(self.logprobs)

    def score(self, length_penalty: float) -> float:
        """The mean log-probability per token at a length penalty of 1, the sum at 0."""
        return self.logprob / max(len(self.logprobs), 1) ** length_penalty


class Sentence:
    """The decoding of one sentence: its limits, and what may come next."""

    def __init__(
        self, model: Decodable, source: Sequence[int], config: DecodeConfig, special: SpecialTokens, rule: Rule | None
    ) -> None:
        self.model, self.config, self.special, self.rule = model, config, special, rule
        self.limit = config.limit(len(source))
        # Translations end with <eos>; a text that continues its prompt ends at the limit without.
        self.last_step = max(self.limit - 1, 0) if continues_source(model) else self.limit
        never = {special.pad, special.sos} | (set() if config.unknown else {special.unk})
        self.never = sorted(never - {special.eos})
        self.state: Any = model.start(pack([source]))

    def step(self, live: list[Output]) -> list[Tensor]:
        """The log-probabilities (V,) of the next token of each hypothesis; -inf for what must not follow."""
        last = [output.ids[-1] if output.ids else self.special.sos for output in live]
        logits, self.state = self.model.step(self.state, torch.tensor([last]))
        return [self.allow(output.ids, row) for output, row in zip(live, logits[0].float().log_softmax(-1))]

    def allow(self, ids: list[int], log_p: Tensor) -> Tensor:
        """The log-probabilities that tokens keep after these ids."""
        eos = self.special.eos
        if len(ids) >= self.limit:
            return torch.full_like(log_p, -inf).index_fill(0, torch.tensor(eos), float(log_p[eos]))
        log_p[self.never] = -inf
        if len(ids) < self.config.min_len:
            log_p[eos] = -inf
        return log_p if self.rule is None else self.rule(ids, log_p)

    def results(self, outputs: list[Output]) -> NBest:
        """The best outputs, best first."""
        penalty, eos = self.config.length_penalty, self.special.eos
        outputs = sorted(outputs, key=lambda output: -output.score(penalty))[: self.config.n_best]
        return NBest(
            Hypothesis([i for i in best.ids if i != eos], best.score(penalty), best.logprob, best.logprobs)
            for best in outputs
        )


@torch.no_grad()
def greedy(
    model: Decodable,
    source: Sequence[int],
    config: DecodeConfig,
    special: SpecialTokens = SPECIAL,
    rule: Rule | None = None,
) -> NBest:
    """The most probable token at every step until `<eos>`."""
    sentence, output = Sentence(model, source, config, special, rule), Output([], [])
    for _ in range(sentence.last_step + 1):
        (log_p,) = sentence.step([output])
        token = int(log_p.argmax())
        output = output.extend(token, float(log_p[token]))
        if token == special.eos:
            break
    return sentence.results([output])


@torch.no_grad()
def beam(
    model: Decodable,
    source: Sequence[int],
    config: DecodeConfig,
    special: SpecialTokens = SPECIAL,
    rule: Rule | None = None,
) -> NBest:
    """Beam search: every step extends the `beam` best unfinished hypotheses by every token.

    The 2K best of these candidates matter, of K = `beam` hypotheses. Those among the first K that end in `<eos>` are
    finished; the K best others are the new beam. At the last step the first K are finished, whatever their tokens.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> first, second = beam(Transformer(sizes).eval(), [4, 5, 3], DecodeConfig(beam=5, n_best=2))
    >>> first.score >= second.score
    True
    """
    sentence, K, penalty = Sentence(model, source, config, special, rule), config.beam, config.length_penalty
    live, finished, count = [Output([], [])], list[Output](), 0
    for t in range(sentence.last_step + 1):
        # Candidates: the log-probability of the sequence, its parent, its last token and the log-probability of that.
        candidates = [
            (live[k].logprob + p, k, token, p)
            for k, log_p in enumerate(sentence.step(live))
            for token, p in enumerate(log_p.tolist())
            if p > -inf
        ]
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * K]
        is_last = t == sentence.last_step
        ended = [live[k].extend(i, p) for _, k, i, p in candidates[:K] if i == special.eos or is_last]
        count += len(ended)
        finished = sorted([*finished, *ended], key=lambda output: -output.score(penalty))[: config.finished]
        kept = [candidate for candidate in candidates if candidate[2] != special.eos and not is_last][:K]
        if not kept:
            break
        live = [live[k].extend(i, p) for _, k, i, p in kept]
        # No token raises a log-probability, so this is the best score that an unfinished hypothesis can still have.
        length = sentence.last_step + 1 if config.early_stopping else t + 1
        bound = live[0].logprob / length**penalty
        is_full = len(finished) == config.finished
        if count >= config.enough or (is_full and finished[-1].score(penalty) >= bound):
            break
        sentence.state = model.reorder(sentence.state, torch.tensor([[k for _, k, _, _ in kept]]))
    return sentence.results(finished or live)
