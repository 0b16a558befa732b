"""The decoder stack that GPT and Transformer hold: embedding, blocks, final norm and output layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.layers.blocks import TransformerBlock
from regard.layers.embeddings import Embedding
from regard.layers.kv_cache import CrossAttentionCache, KVCache
from regard.layers.packed import Tokens
from regard.layers.positions import RelativeBias


@dataclass
class DecoderState:
    """Decoding state between steps: rows are (B, K) hypotheses."""

    positions: Int[Tensor, "B K"]
    """of the next token"""
    caches: list[KVCache]
    memory: list[CrossAttentionCache] = field(default_factory=list)
    """keys and values of the source for the cross-attention of each block, if there is one"""
    prompt_logits: Float[Tensor, "B K V"] | None = None
    """logits of the token after a prompt, until the first step returns them"""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A stack of decoder blocks, as a view of a model, whose modules it names: what `model.stack` returns.

    A Transformer has cross-attention in its blocks; a GPT continues its prompt. Engines, exporters and the viewer read
    the stack instead of the model's family, so a new family that has a stack needs no code of its own there.
    """

    embedding: Embedding
    blocks: Sequence[TransformerBlock]
    norm: nn.Module
    output: nn.Linear
    bias: RelativeBias | None = None
    """relative positions of the self-attention, which all blocks share"""
    output_factor: float = 1.0
    """multiplies the input of the output layer"""
    logit_cap: float = 0.0
    """soft-capping of the logits, cap · tanh(logit / cap); 0: none"""

    @property
    def has_cross(self) -> bool:
        """Whether the blocks have cross-attention over the output of an encoder."""
        return bool(self.blocks) and self.blocks[0].cross is not None

    def features(
        self,
        tokens: Tokens,
        memory: Float[Tensor, "M E"] | None = None,
        memory_offsets: Offsets | Lengths | None = None,
        caches: Sequence[KVCache] = (),
    ) -> Float[Tensor, "N E"]:
        """The input of the output layer, one row per token; `memory` is the output of the encoder.

        Caches that were made for these tokens are filled with their keys and values.
        """
        x = self.embedding(tokens.ids, tokens.positions, tokens.max_len)
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches else None
            x = block(x, tokens.offsets, tokens.positions, self.bias, cache, memory, memory_offsets)
        return self.final_norm(x)

    def final_norm(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        """The norm before the output layer, with the factor."""
        x = self.norm(x)
        return x * self.output_factor if self.output_factor != 1.0 else x

    def logits(self, features: Float[Tensor, "*n E"]) -> Float[Tensor, "*n V"]:
        """The output layer, soft-capped if there is a cap."""
        logits, cap = self.output(features), self.logit_cap
        return (logits / cap).tanh() * cap if cap else logits

    def start(self, source: Any) -> DecoderState:
        """The state after prompts, which are processed in one call; none may be empty."""
        caches = [KVCache(block.attention.mask, source.offsets) for block in self.blocks]
        last = source.offsets.starts[1:].long() - 1
        prompt_logits = self.logits(self.features(source, caches=caches)[last])[:, None]
        return DecoderState(source.offsets.lengths.long()[:, None], caches, prompt_logits=prompt_logits)

    def start_from(self, memory: Float[Tensor, "M E"], offsets: Offsets | Lengths) -> DecoderState:
        """The state before the first target token, from the output of the encoder."""
        keys_values = [block.cross.keys_values(memory) for block in self.blocks if block.cross is not None]
        stored = [CrossAttentionCache.from_sequences(k, v, offsets) for k, v in keys_values]
        # Not len(…), which would fix the batch size of exported graphs.
        positions = torch.zeros((stored[0].k.shape[0], 1), dtype=torch.long, device=memory.device)
        return DecoderState(positions, [KVCache(block.attention.mask) for block in self.blocks], stored)

    def step(self, state: DecoderState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], DecoderState]:
        """Append the last token of each hypothesis. The first step after a prompt has its logits already."""
        if state.prompt_logits is not None:
            return state.prompt_logits, DecoderState(state.positions, state.caches, state.memory)
        # The longest row of the cache bounds all positions.
        x = self.embedding(last, state.positions, state.caches[0].length + 1)
        for i, (block, cache) in enumerate(zip(self.blocks, state.caches)):
            memory_cache = state.memory[i] if state.memory else None
            x = block(x, None, state.positions, self.bias, cache, memory_cache=memory_cache)
        logits = self.logits(self.final_norm(x))
        return logits, DecoderState(state.positions + 1, state.caches, state.memory)

    def reorder(self, state: DecoderState, indices: Int[Tensor, "B2 K2"]) -> DecoderState:
        """Select hypotheses; those of a new sentence come from one old sentence."""
        rows, sentences = indices.flatten(), indices[:, 0] // state.positions.shape[1]
        memory, logits = state.memory, state.prompt_logits
        if memory and not torch.equal(sentences, torch.arange(len(memory[0].k), device=sentences.device)):
            memory = [cache.reorder(sentences) for cache in memory]
        logits = None if logits is None else logits.flatten(0, 1)[rows].unflatten(0, indices.shape)
        positions = state.positions.flatten()[rows].view(indices.shape)
        return DecoderState(positions, [cache.reorder(rows) for cache in state.caches], memory, logits)


class StackModel(nn.Module):
    """Base class of the models that hold a decoder stack, which runs their decoding steps."""

    @property
    def stack(self) -> Decoder:
        """The decoder stack, as a view of the model."""
        raise NotImplementedError

    def unembed(self, stream: Float[Tensor, "*n E"], inputs: Any) -> Float[Tensor, "rows V"]:
        """The output from the residual stream after any block: final norm, head and output layer."""
        return self.stack.logits(self.stack.final_norm(stream))

    def step(self, state: DecoderState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], DecoderState]:
        return self.stack.step(state, last)

    def reorder(self, state: DecoderState, indices: Int[Tensor, "B2 K2"]) -> DecoderState:
        return self.stack.reorder(state, indices)
