"""Transformer decoders with key/value caches of a fixed capacity, for the decoding engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention import Dot, ScaledDot, attend, causal, padding
from regard.layers.multihead import MultiHead
from regard.layers.packed import Packed, pack
from regard.models.gpt import GPT
from regard.models.transformer import Transformer

# Longer prompts are processed in chunks of this many tokens, which limits the memory of their activations.
PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class StepPositions:
    """Where the slots are: known on the host, so that no step waits for the device."""

    positions: Int[Tensor, "B"]
    """cache position of the last token of each slot"""
    longest: int
    """number of cache positions in use, the maximum over the slots"""
    shared: int | None
    """the position, if it is the same in all slots"""


@dataclass(frozen=True)
class TreeMask:
    """Which cached keys belong to a hypothesis: position s of hypothesis k is in column ancestors[b, k, s]."""

    bias: Float[Tensor, "B 1 K S"] | None
    """0 for the keys of a hypothesis, -inf for others, over the flattened positions and columns; None: all belong"""
    ancestors: Int[Tensor, "B K S"] | None
    positions: StepPositions


class CachedAttention:
    """Masked self-attention of one layer over a cache (B, G, S, K, D): G key/value heads, S positions, K columns."""

    def __init__(self, attention: MultiHead, shape: tuple[int, int, int], bias: Tensor | None) -> None:
        slots, capacity, columns = shape
        self.attention = attention
        parameter = attention.out.bias if attention.out.bias is not None else attention.out.weight
        dtype = torch.float32 if not parameter.is_floating_point() else parameter.dtype
        size = (slots, attention.kv_heads, capacity, columns, attention.head_width)
        # Zeros: masked keys and values take part in matrix products, where 0 * NaN would be NaN.
        self.k = torch.zeros(size, dtype=dtype, device=parameter.device)
        self.v = torch.zeros_like(self.k)
        self.distance_bias = bias
        self.is_dot = type(attention.score) in (Dot, ScaledDot)
        self.scale = attention.head_width**-0.5 if type(attention.score) is ScaledDot else 1.0

    def __call__(self, x: Float[Tensor, "B K E"], mask: TreeMask) -> Float[Tensor, "B K E"]:
        attention, at = self.attention, mask.positions
        positions = at.positions[:, None].expand(x.shape[:2])
        q = attention.queries(x, positions)
        k, v = attention.keys_values(x, positions)
        self._append(k, v, at)
        return attention.out(self._attend(q, mask).flatten(-2))

    def prefill(
        self,
        x: Float[Tensor, "N E"],
        tokens: Packed,
        slots: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        start: int,
    ) -> Float[Tensor, "N E"]:
        """Self-attention of packed prompts, whose keys and values enter column 0 of their slots.

        With `start` > 0 it is one prompt, whose first tokens are in the cache already.
        """
        attention = self.attention
        q = attention.queries(x, positions)
        k, v = attention.keys_values(x, positions)
        self.k[slots, :, positions, 0], self.v[slots, :, positions, 0] = k, v
        if start:
            end = start + len(x)
            keys, values = (cache[slots[:1], :, :end, 0] for cache in (self.k, self.v))
            out = attend(q.transpose(0, 1)[None], keys, values, score=attention.score, mask=causal())
            return attention.out(out[0].transpose(0, 1).flatten(-2))
        offsets = tokens.offsets
        out = attend(q, k, v, score=attention.score, mask=causal(), q_offsets=offsets, k_offsets=offsets)
        return attention.out(out.flatten(-2))

    def _append(self, k: Float[Tensor, "B K G D"], v: Float[Tensor, "B K G D"], at: StepPositions) -> None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if at.shared is not None:
            self.k[:, :, at.shared], self.v[:, :, at.shared] = k, v
        else:
            slots = torch.arange(len(k), device=k.device)
            self.k[slots, :, at.positions], self.v[slots, :, at.positions] = k, v

    def _attend(self, q: Float[Tensor, "B K H D"], mask: TreeMask) -> Float[Tensor, "B K H D"]:
        B, K, H, D = q.shape
        G, S = self.k.shape[1], mask.positions.longest
        if not self.is_dot:
            return self._attend_gathered(q, mask)
        # All beams of a slot are queries of the flattened keys of all beams: nothing is copied or gathered.
        queries = q.view(B, K, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B * G, H // G * K, D)
        keys, values = (x[:, :, :S].reshape(B * G, S * K, D) for x in (self.k, self.v))
        scores = torch.bmm(queries * self.scale if self.scale != 1.0 else queries, keys.mT)
        scores = scores.view(B, H, K, S * K)
        if self.distance_bias is not None:
            distance = mask.positions.positions[:, None] - torch.arange(S, device=q.device)
            bias = self.distance_bias[:, distance.clamp(min=0)].transpose(0, 1)[:, :, None]  # (B, H, 1, S)
            scores = scores + bias.repeat_interleave(K, dim=-1)
        if mask.bias is not None:
            scores += mask.bias
        weights = scores.softmax(-1).view(B * G, H // G * K, S * K)
        out = torch.bmm(weights, values)
        return out.view(B, G, H // G, K, D).permute(0, 3, 1, 2, 4).reshape(B, K, H, D)

    def _attend_gathered(self, q: Float[Tensor, "B K H D"], mask: TreeMask) -> Float[Tensor, "B K H D"]:
        """Any score: the keys and values of each hypothesis are gathered from the columns of its ancestors."""
        B, K, H, D = q.shape
        S = mask.positions.longest
        k, v = self.k[:, :, :S], self.v[:, :, :S]
        if mask.ancestors is not None:
            columns = mask.ancestors[..., :S].long().mT[:, None, :, :, None].expand(k.shape)
            k, v = k.gather(3, columns), v.gather(3, columns)
        k, v = (x.permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (k, v))
        lengths = (mask.positions.positions + 1).repeat_interleave(K)
        allowed = None if mask.positions.shared is not None else padding(lengths)
        return attend(q.reshape(B * K, H, 1, D), k, v, score=self.attention.score, mask=allowed).view(B, K, H, D)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        self.k, self.v = self.k[slots], self.v[slots]


class StaticCrossAttention:
    """Cross-attention of one layer; the keys and values of the source exist once per slot."""

    def __init__(self, attention: MultiHead, slots: int, capacity: int, like: Tensor) -> None:
        self.attention = attention
        size = (slots, attention.kv_heads, capacity, attention.head_width)
        self.k = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.v = torch.zeros_like(self.k)
        self.is_dot = type(attention.score) in (Dot, ScaledDot)
        self.scale = attention.head_width**-0.5 if type(attention.score) is ScaledDot else 1.0

    def load(self, slots: Int[Tensor, "n"], memory: Float[Tensor, "M E"], source: Packed) -> None:
        """Compute the keys and values of new sentences."""
        for cache, new in zip((self.k, self.v), self.attention.keys_values(memory, None)):
            cache[slots, :, : source.max_len] = new[source.offsets.rows].transpose(1, 2)

    def __call__(
        self,
        x: Float[Tensor, "B K E"],
        lengths: Int[Tensor, "B"],
        longest: int,
        bias: Float[Tensor, "B 1 1 S"] | None,
    ) -> Float[Tensor, "B K E"]:
        q = self.attention.queries(x, None)
        B, K, H, D = q.shape
        k, v = self.k[:, :, :longest], self.v[:, :, :longest]
        if not self.is_dot:
            mask = None if bias is None else padding(lengths)
            out = attend(q.transpose(1, 2), k, v, score=self.attention.score, mask=mask).transpose(1, 2)
            return self.attention.out(out.flatten(-2))
        G = k.shape[1]
        queries = q.view(B, K, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B * G, H // G * K, D)
        if self.scale != 1.0:
            queries = queries * self.scale
        scores = torch.bmm(queries, k.reshape(B * G, longest, D).mT)
        if bias is not None:
            scores = scores.view(B, H, K, longest).add_(bias).view(B * G, -1, longest)
        out = torch.bmm(scores.softmax(-1), v.reshape(B * G, longest, D))
        out = out.view(B, G, H // G, K, D).permute(0, 3, 1, 2, 4).reshape(B, K, H * D)
        return self.attention.out(out)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        self.k, self.v = self.k[slots], self.v[slots]


class StaticDecoder:
    """A Transformer or GPT with caches for B slots of K hypotheses, `capacity` positions and `source_capacity` tokens.

    `load` puts new sentences into slots, `step` processes the last token of every hypothesis.
    """

    def __init__(
        self, model: Transformer | GPT, slots: int, hypotheses: int, capacity: int, source_capacity: int = 0
    ) -> None:
        self.model, self.hypotheses, self.capacity = model, hypotheses, capacity
        self.is_encoder_decoder = isinstance(model, Transformer)
        blocks: Sequence[Any] = model.decoder if isinstance(model, Transformer) else model.blocks
        self.blocks = list(blocks)
        self.embedding = model.target_embedding if isinstance(model, Transformer) else model.embedding
        if self.embedding.positions is not None:
            self.embedding.positions.reserve(capacity)
        weight = self.embedding.tokens.weight
        self.device = weight.device
        bias = None
        if isinstance(model, Transformer) and model.decoder_bias is not None:
            distances = torch.arange(capacity, device=self.device)
            bias = model.decoder_bias(torch.tensor([capacity - 1], device=self.device), distances)[:, 0].flip(-1)
        shape = (slots, capacity, hypotheses)
        self.self_attention = [CachedAttention(block.attention, shape, bias) for block in self.blocks]
        self.cross_attention: list[StaticCrossAttention] = []
        self.source_lengths = torch.ones(slots, dtype=torch.long, device=self.device)
        self.host_lengths = [1] * slots
        if self.is_encoder_decoder:
            like = self.self_attention[0].k
            self.cross_attention = [
                StaticCrossAttention(block.cross, slots, source_capacity, like) for block in self.blocks
            ]

    def load(self, slots: list[int], sources: list[list[int]], pack_sources: Callable[..., Packed]) -> None:
        """Encode new source sentences, or process all but the last token of new prompts."""
        rows = torch.tensor(slots, device=self.device)
        if not isinstance(self.model, Transformer):
            self._prefill(slots, [prompt[:-1] for prompt in sources])
            return
        source = pack_sources(sources)
        memory = self.model.encode(source)
        for attention in self.cross_attention:
            attention.load(rows, memory, source)
        self.source_lengths[rows] = source.offsets.lengths.long()
        for slot, ids in zip(slots, sources):
            self.host_lengths[slot] = len(ids)

    def _prefill(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Fill the caches with the keys and values of prompts: short ones together, long ones in chunks."""
        group: list[tuple[int, list[int]]] = []
        for slot, prompt in zip(slots, prompts):
            if group and sum(len(ids) for _, ids in group) + len(prompt) > PREFILL_CHUNK:
                self._prefill_chunk(group, 0)
                group = []
            for start in range(0, len(prompt) - PREFILL_CHUNK, PREFILL_CHUNK):
                self._prefill_chunk([(slot, prompt[start : start + PREFILL_CHUNK])], start)
            rest = len(prompt) - (len(prompt) - 1) % PREFILL_CHUNK - 1 if prompt else 0
            if rest:
                self._prefill_chunk([(slot, prompt[rest:])], rest)
            elif prompt:
                group.append((slot, prompt))
        if group:
            self._prefill_chunk(group, 0)

    def _prefill_chunk(self, group: list[tuple[int, list[int]]], start: int) -> None:
        """Process parts of prompts that begin at position `start`."""
        tokens = pack([ids for _, ids in group]).to(self.device)
        positions = tokens.positions + start
        slots = torch.tensor([slot for slot, _ in group], device=self.device)[tokens.offsets.sequences]
        x = self.embedding(tokens.ids, positions, start + tokens.max_len)
        for block, attention in zip(self.blocks, self.self_attention):
            x = block.sublayers(x, lambda h, attention=attention: attention.prefill(h, tokens, slots, positions, start))

    def step(self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None) -> Tensor:
        """The logits (B, K, V) of the token after the last token of each hypothesis, which enters the caches."""
        mask = self._tree_mask(at, ancestors)
        x = self.embedding(last, at.positions[:, None].expand_as(last), self.capacity)
        longest = max(self.host_lengths)
        source_bias = None
        if self.is_encoder_decoder and min(self.host_lengths) < longest:
            is_padding = torch.arange(longest, device=self.device) >= self.source_lengths[:, None, None, None]
            source_bias = torch.zeros(is_padding.shape, dtype=x.dtype, device=x.device)
            source_bias.masked_fill_(is_padding, -torch.inf)
        for i, block in enumerate(self.blocks):
            attend_self = partial(self.self_attention[i], mask=mask)
            if self.cross_attention:
                cross = partial(self.cross_attention[i], lengths=self.source_lengths, longest=longest, bias=source_bias)
                x = block.sublayers(x, attend_self, cross)
            else:
                x = block.sublayers(x, attend_self)
        model = self.model
        x = model.final_norm(x) if isinstance(model, Transformer) else model.norm(x)
        return model.output(x)

    def _tree_mask(self, at: StepPositions, ancestors: Int[Tensor, "B K S"] | None) -> TreeMask:
        K, S = self.hypotheses, at.longest
        if K == 1 and at.shared is not None:
            return TreeMask(None, None, at)
        positions = torch.arange(S, device=self.device)
        is_past = positions <= at.positions[:, None, None]  # (B, 1, S)
        if K == 1 or ancestors is None:
            allowed = is_past[:, :, None]
        else:
            columns = torch.arange(K, device=self.device)
            allowed = (ancestors[:, :, :S, None] == columns) & is_past[..., None]
            allowed = allowed.flatten(2)[:, None]  # (B, 1, K, S * K)
        dtype = self.self_attention[0].k.dtype
        bias = torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill_(~allowed, -torch.inf)
        return TreeMask(bias, ancestors if K > 1 else None, at)

    def reorder(self, parents: Int[Tensor, "B K"]) -> None:
        """Nothing to do: `ancestors` refers to the caches of the parents."""

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        for attention in (*self.self_attention, *self.cross_attention):
            attention.select_slots(slots)
        self.source_lengths = self.source_lengths[slots]
        self.host_lengths = [self.host_lengths[slot] for slot in slots.tolist()]
