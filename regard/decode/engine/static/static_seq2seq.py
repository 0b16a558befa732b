"""Recurrent decoders with states for a fixed number of slots, for the decoding engine."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.decode.engine.static.projections import activation_dtype, make_projection
from regard.decode.engine.static.static_attention import StepPositions
from regard.layers.kv_cache import CrossAttentionCache
from regard.layers.packed import pack
from regard.models.seq2seq import Seq2Seq


class StaticSeq2Seq:
    """A recurrent encoder-decoder with states for B slots of K hypotheses and sources of `source_capacity` tokens."""

    def __init__(self, model: Seq2Seq, slots: int, hypotheses: int, source_capacity: int) -> None:
        self.model, self.hypotheses = model, hypotheses
        decoder, config = model.decoder, model.config
        self.device = decoder.combine.weight.device
        options: Any = {"dtype": activation_dtype(decoder.combine), "device": self.device}
        parts = decoder.layers[0].parts
        self.cells = torch.zeros(slots, hypotheses, config.layers, parts, config.width, **options)
        self.output = make_projection(model.output)
        self.lengths = torch.ones(slots, dtype=torch.long, device=self.device)
        self.memory: Tensor | None = None
        if decoder.variant != "none":
            self.memory = torch.zeros(slots, 1, source_capacity, config.width, **options)

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None:
        """Compute the logits of these tokens only."""
        self.output = make_projection(self.model.output, tokens)

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        """Encode new source sentences."""
        source = pack(sources).to(self.device)
        rows = torch.tensor(slots, device=self.device)
        encoded, cells = self.model.encode(source)
        self.cells[rows] = cells[:, None].to(self.cells.dtype)
        self.lengths[rows] = source.offsets.lengths.long()
        cache = self.model.decoder.make_cache(encoded, source)
        if self.memory is not None and cache is not None:
            self.memory[rows, :, : source.max_len] = cache.k

    def step(self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None) -> Tensor:
        """The logits (B, K, V) of the token after the last token of each hypothesis."""
        memory = None
        if self.memory is not None:
            memory = CrossAttentionCache(self.memory, self.memory, self.lengths)
        y = self.model.target_embedding(last, torch.zeros_like(last))
        features, cells = self.model.decoder.step(y, self.cells, memory)
        self.cells.copy_(cells)
        return self.output(features.flatten(0, 1)).view(*last.shape, -1)

    def reorder(self, parents: Int[Tensor, "B K"]) -> None:
        """Copy the states of the parents: each is one vector per layer."""
        index = parents.view(*parents.shape, 1, 1, 1).expand_as(self.cells)
        self.cells.copy_(self.cells.gather(1, index))

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.cells, self.lengths = self.cells[slots], self.lengths[slots]
        if self.memory is not None:
            self.memory = self.memory[slots]
