"""Families of models that only tests know: one entry in the registry, and no line elsewhere.

One has its own state and is decoded by its methods; the other holds a decoder stack, which engines read.
"""

from dataclasses import dataclass

import torch
from torch import nn

from regard.attention import causal
from regard.layers.blocks import BlockConfig
from regard.layers.embeddings import Embedding
from regard.layers.packed import Packed
from regard.models import register_family
from regard.models.decoder import Decoder, DecoderState


@dataclass(frozen=True)
class ToyConfig:
    width: int = 24
    max_len: int = 64
    source_vocab: int = 0
    target_vocab: int = 0

    def check(self) -> None:
        """Every combination is valid."""


@dataclass(frozen=True)
class ToyStackConfig(ToyConfig):
    layers: int = 2


class Toy(nn.Module):
    """The next token from the mean of the source embeddings and a running mean of those of the output."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.source = nn.Embedding(config.source_vocab, config.width)
        self.target = nn.Embedding(config.target_vocab, config.width)
        self.output = nn.Linear(config.width, config.target_vocab)

    def start(self, source):
        means = [self.source(ids).mean(0) for ids in source.ids.split(source.offsets.lengths.tolist())]
        return torch.stack(means)[:, None]

    def step(self, state, last):
        state = 0.5 * state + self.target(last)
        return self.output(state.tanh()), state

    def reorder(self, state, indices):
        return state.flatten(0, 1)[indices]


class ToyStack(nn.Module):
    """A decoder stack over the embeddings of the source."""

    def __init__(self, config: ToyStackConfig) -> None:
        super().__init__()
        self.config = config
        block = BlockConfig(config.width, heads=2, feedforward=32)
        self.source = Embedding(config.source_vocab, config.width, "none", config.max_len)
        self.target = Embedding(config.target_vocab, config.width, "sinusoidal", config.max_len)
        self.blocks = nn.ModuleList(
            block.make_block("scaled_dot", causal(), "scaled_dot") for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.target_vocab)

    @property
    def stack(self) -> Decoder:
        return Decoder(self.target, self.blocks, self.norm, self.output)

    def encode(self, source: Packed):
        return self.source(source.ids, source.positions, source.max_len)

    def start(self, source: Packed) -> DecoderState:
        return self.stack.start_from(self.encode(source), source.offsets)

    def step(self, state, last):
        return self.stack.step(state, last)

    def reorder(self, state, indices):
        return self.stack.reorder(state, indices)


def register() -> None:
    """The entries of the families."""
    register_family("toy", ToyConfig, Toy, pipeline="translator")
    register_family("toy_stack", ToyStackConfig, ToyStack, pipeline="translator")
