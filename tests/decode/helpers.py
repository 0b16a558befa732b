"""Small models that speak the decoding protocol, and the search that tries everything."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.decode import DecodeConfig, Special


@dataclass
class Source:
    """Sentences given as ids, end to end: what a Packed is to a real model."""

    ids: Tensor
    offsets: Offsets


def pack(sentences: list[list[int]]) -> Source:
    starts = torch.tensor([0, *itertools.accumulate(map(len, sentences))], dtype=torch.int32)
    longest = max(map(len, sentences), default=0)
    ids = torch.tensor([token for sentence in sentences for token in sentence], dtype=torch.long)
    return Source(ids, Offsets(starts, int(starts[-1]), longest))


@dataclass
class State:
    sentence: Tensor  # (B, K) the sentence's first source id
    past: Tensor  # (B, K, t) every token so far, <sos> included


class HistoryModel:
    """Next-token scores from a table, looked up by the source's first id and a hash of the whole output so far.

    So a hypothesis given the wrong past, or the wrong sentence, gets other scores and is found out.
    """

    def __init__(self, V: int, seed: int = 0, sharpness: float = 2.0, buckets: int = 997) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn((buckets, V), generator=generator) * sharpness
        self.buckets = buckets
        self.rows_seen: list[tuple[int, int]] = []

    def scores(self, sentence: Tensor, past: Tensor) -> Tensor:
        key = sentence * 31 + 7
        for t in range(past.shape[-1]):
            key = (key * 131 + past[..., t] + 1) % self.buckets
        return self.table[key]

    def start(self, source: Source) -> State:
        first = source.ids[source.offsets.starts[:-1].long()][:, None]
        return State(first, torch.zeros((*first.shape, 0), dtype=torch.long))

    def step(self, state: State, last: Tensor) -> tuple[Tensor, State]:
        assert last.shape == state.sentence.shape
        self.rows_seen.append(tuple(last.shape))
        past = torch.cat((state.past, last[..., None]), dim=-1)
        return self.scores(state.sentence, past), State(state.sentence, past)

    def reorder(self, state: State, indices: Tensor) -> State:
        K = state.sentence.shape[1]
        assert ((indices // K) == (indices[:, :1] // K)).all(), "the beams of a sentence come from one sentence"
        return State(state.sentence.flatten()[indices], state.past.flatten(0, 1)[indices])


class TableModel(HistoryModel):
    """A Markov chain: the next token's scores depend on the last token alone."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(V=1)
        self.table = logits

    def scores(self, sentence: Tensor, past: Tensor) -> Tensor:
        return self.table[past[..., -1]]


def log_prob(model: HistoryModel, first: int, ids: list[int], special: Special, ends: bool = True) -> float:
    """Of a whole output, <eos> included, token by token."""
    past, total = [special.sos], 0.0
    for token in [*ids, special.eos] if ends else ids:
        total += model.scores(torch.tensor(first), torch.tensor(past)).float().log_softmax(-1)[token].item()
        past.append(token)
    return total


def try_everything(
    model: HistoryModel, source: list[int], V: int, config: DecodeConfig, special: Special
) -> list[tuple[float, list[int]]]:
    """Every output within the limits with its score, best first."""
    words = [token for token in range(V) if token not in (special.pad, special.sos, special.eos)]
    found = []
    for n in range(config.min_len, config.limit(len(source)) + 1):
        for ids in itertools.product(words, repeat=n):
            score = log_prob(model, source[0], list(ids), special) / (n + 1) ** config.length_penalty
            if score > -math.inf:
                found.append((score, list(ids)))
    return sorted(found, key=lambda pair: -pair[0])
