"""Toy models that implement the decoding protocol, and exhaustive search."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.decode import DecodeConfig, NBest, Request, SpecialTokens, decode_all
from regard.layers.packed import Packed


def beam(
    model: Any, sources: list[list[int]], config: DecodeConfig | None = None, *, on_token: Any = None, **options: Any
) -> list[NBest]:
    """Decode sentences, by default with beam search."""
    return decode_all(model, Request(sources, config or DecodeConfig(), **options), on_token=on_token)


def greedy(model: Any, sources: list[list[int]], config: DecodeConfig | None = None, **options: Any) -> list[NBest]:
    return beam(model, sources, config or DecodeConfig("greedy"), **options)


def sample(model: Any, sources: list[list[int]], config: DecodeConfig | None = None, **options: Any) -> list[NBest]:
    return beam(model, sources, config or DecodeConfig("sample"), **options)


@dataclass
class ToyState:
    sentence: Tensor  # (B, K) first source id of the sentence
    past: Tensor  # (B, K, t) all tokens so far, including <sos>


class HistoryModel:
    """Next-token logits from a table, indexed by a hash of the first source id and all output tokens so far.

    A hypothesis with the wrong history or the wrong sentence therefore gets different logits, and the test fails.
    """

    def __init__(self, V: int, seed: int = 0, sharpness: float = 2.0, buckets: int = 997) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn((buckets, V), generator=generator) * sharpness
        self.buckets = buckets
        self.step_shapes: list[tuple[int, int]] = []

    def scores(self, sentence: Tensor, past: Tensor) -> Tensor:
        key = sentence * 31 + 7
        for t in range(past.shape[-1]):
            key = (key * 131 + past[..., t] + 1) % self.buckets
        return self.table[key]

    def start(self, source: Packed) -> ToyState:
        first = source.ids[source.offsets.starts[:-1].long()][:, None]
        return ToyState(first, torch.zeros((*first.shape, 0), dtype=torch.long))

    def step(self, state: ToyState, last: Tensor) -> tuple[Tensor, ToyState]:
        assert last.shape == state.sentence.shape
        self.step_shapes.append(tuple(last.shape))
        past = torch.cat((state.past, last[..., None]), dim=-1)
        return self.scores(state.sentence, past), ToyState(state.sentence, past)

    def reorder(self, state: ToyState, indices: Tensor) -> ToyState:
        K = state.sentence.shape[1]
        assert ((indices // K) == (indices[:, :1] // K)).all(), "the beams of a sentence come from one sentence"
        return ToyState(state.sentence.flatten()[indices], state.past.flatten(0, 1)[indices])


class TableModel(HistoryModel):
    """A Markov chain: the logits depend only on the last token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(V=1)
        self.table = logits

    def scores(self, sentence: Tensor, past: Tensor) -> Tensor:
        return self.table[past[..., -1]]


def log_prob(model: HistoryModel, first: int, ids: list[int], special: SpecialTokens, ends: bool = True) -> float:
    """Log-probability of an output including <eos> (unless `ends` is False), computed token by token."""
    past, total = [special.sos], 0.0
    for token in [*ids, special.eos] if ends else ids:
        total += model.scores(torch.tensor(first), torch.tensor(past)).float().log_softmax(-1)[token].item()
        past.append(token)
    return total


def exhaustive_search(
    model: HistoryModel, source: list[int], V: int, config: DecodeConfig, special: SpecialTokens
) -> list[tuple[float, list[int]]]:
    """Every output within the length limits with its score, best first."""
    words = [token for token in range(V) if token not in (special.pad, special.sos, special.eos)]
    outputs = []
    for n in range(config.min_len, config.limit(len(source)) + 1):
        for ids in itertools.product(words, repeat=n):
            score = log_prob(model, source[0], list(ids), special) / (n + 1) ** config.length_penalty
            if score > -math.inf:
                outputs.append((score, list(ids)))
    return sorted(outputs, key=lambda pair: -pair[0])
