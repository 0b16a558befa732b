"""Steppers with caches of a fixed capacity: decoder stacks and recurrent decoders for B slots of K hypotheses.

A step processes one new token per hypothesis, without the overhead of calling modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.attention import Dot, ScaledDot, attend, padding, weights
from regard.attention.reference import reference
from regard.decode.coverage import no_cross_attention, with_attention
from regard.decode.protocol import StepPositions
from regard.kernels.cpu.int8_linear import int8_linear
from regard.layers.attention import MultiHeadAttention
from regard.layers.blocks import PostNormBlock, PreNormBlock
from regard.layers.feedforward import FeedForward, activate
from regard.layers.kv_cache import CrossAttentionCache
from regard.layers.norms import RMSNorm
from regard.layers.packed import Packed, pack
from regard.layers.quantized import Float8Linear, Int8Linear
from regard.models.decoder import Decoder
from regard.models.seq2seq import Seq2Seq

# Longer prompts are processed in chunks of this many tokens, which limits the memory of their activations.
PREFILL_CHUNK = 2048


Projection = Callable[[Float[Tensor, "R I"]], Float[Tensor, "R O"]]


@dataclass(frozen=True)
class TreeMask:
    """The cached keys of each hypothesis: position s of hypothesis k is in column ancestors[b, k, s]."""

    bias: Float[Tensor, "B 1 K S"] | None
    """0 for the keys of a hypothesis, -inf for others, over flattened positions and columns; None: all belong to it"""
    ancestors: Int[Tensor, "B K S"] | None
    """None: one hypothesis per slot"""
    at: StepPositions


class _HeadAttention:
    """Attention of K queries per slot over flat keys and values of each key/value head."""

    keeps_weights = False
    """whether the weights of a step are kept, averaged over heads"""
    weights: Float[Tensor, "B K S"]

    def __init__(self, attention: MultiHeadAttention) -> None:
        self.attention = attention
        self.heads, self.kv_heads, self.head_width = attention.heads, attention.kv_heads, attention.head_width
        self.is_dot = type(attention.score) in (Dot, ScaledDot)
        score = attention.score
        self.scale = score.scale(attention.head_width) if isinstance(score, ScaledDot) else 1.0
        self.transforms_queries = attention.rotary is not None or attention.query_norm is not None
        # Scores of the first batch of products are never read (beta=0): an uninitialized tensor that broadcasts.
        self.unused = torch.empty((1, 1, 1), dtype=self.dtype, device=attention.out.weight.device)

    @cached_property
    def out(self) -> Callable[[Tensor], Tensor]:
        """The output layer."""
        return make_projection(self.attention.out)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return activation_dtype(self.attention.out)

    def attend_flat(
        self,
        q: Float[Tensor, "B K H D"],
        k: Float[Tensor, "BG S D"],
        v: Float[Tensor, "BG S D"],
        bias: Callable[[Tensor], Tensor] | None,
    ) -> Float[Tensor, "R J"]:
        """softmax(scale q k + bias) v, then the output layer."""
        B, K, H, D = q.shape
        G, S = self.kv_heads, k.shape[1]
        if K == 1:
            queries = q.reshape(B * G, H // G, D)
        else:
            queries = q.view(B, K, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B * G, H // G * K, D)
        scores = torch.baddbmm(self.unused, queries, k.mT, beta=0, alpha=self.scale)
        if bias is not None:
            scores = bias(scores.view(B, H, K, S)).view(B * G, -1, S)
        weights = scores.softmax(-1)
        if self.keeps_weights:
            self.weights = weights.view(B, H, K, S).mean(1).float()
        out = torch.bmm(weights, v)
        if K > 1:
            out = out.view(B, G, H // G, K, D).permute(0, 3, 1, 2, 4)
        return self.out(out.reshape(B * K, H * D))


class CachedAttention(_HeadAttention):
    """Masked self-attention of one layer over a cache (2, B, G, S, K, D): keys and values of G heads, S positions and
    K columns per slot.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        slots: int,
        capacity: int,
        columns: int,
        distance_bias: Float[Tensor, "H S"] | None = None,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        super().__init__(attention)
        size = (2, slots, attention.kv_heads, capacity, columns, attention.head_width)
        # Zeros: masked keys and values take part in matrix products, where 0 * NaN would be NaN.
        self.cache = allocate(size, dtype=self.dtype, device=attention.out.weight.device)
        self.distance_bias, self.window = distance_bias, attention.window

    @cached_property
    def qkv(self) -> Callable[[Tensor], Any]:
        """The joint layer of queries, keys and values."""
        return make_joint_projection([self.attention.query, self.attention.key_value])

    def __call__(self, x: Float[Tensor, "R E"], mask: TreeMask) -> Float[Tensor, "R E"]:
        """Attention of the last token of each hypothesis, whose key and value enter the cache."""
        at = mask.at
        B, K = self.cache.shape[1], self.cache.shape[4]
        q, kv = self.qkv(x)
        q, kv = q.view(B, K, self.heads, -1), kv.view(B, K, 2, self.kv_heads, -1)
        if self.transforms_queries:
            positions = at.positions[:, None].expand(B, K)
            q, kv = self._transform(q, kv, positions)
        kv = kv.permute(2, 0, 3, 1, 4)
        if at.shared is not None:
            self.cache[:, :, :, at.shared] = kv
        else:
            slots = torch.arange(B, device=x.device)
            self.cache[:, slots, :, at.positions] = kv.transpose(0, 1)
        return self._attend(q, mask)

    def _transform(self, q: Tensor, kv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Norms and rotation of queries and keys."""
        attention, k = self.attention, kv.select(-3, 0)
        if attention.query_norm is not None and attention.key_norm is not None:
            q, k = attention.query_norm(q), attention.key_norm(k)
        if attention.rotary is not None:
            q, k = (attention.rotary(x, positions) for x in (q, k))
        return q, torch.stack((k, kv.select(-3, 1)), dim=-3)

    def _attend(self, q: Float[Tensor, "B K H D"], mask: TreeMask) -> Float[Tensor, "R E"]:
        B, K = q.shape[:2]
        S, D = mask.at.longest, self.head_width
        if not self.is_dot:
            return self._attend_gathered(q, mask)
        # All beams of a slot are queries of the flattened keys of all beams: nothing is copied or gathered.
        k, v = self.cache[:, :, :, :S].reshape(2, B * self.kv_heads, S * K, D)
        needs_bias = mask.bias is not None or self.distance_bias is not None or self._hides_keys(S)
        return self.attend_flat(q, k, v, (lambda scores: self._add_bias(scores, mask)) if needs_bias else None)

    def _add_bias(self, scores: Float[Tensor, "B H K S"], mask: TreeMask) -> Float[Tensor, "B H K S"]:
        if self.distance_bias is not None:
            scores += self._row_bias(mask).repeat_interleave(self.cache.shape[4], dim=-1)
        if mask.bias is not None:
            scores += mask.bias
        if self._hides_keys(mask.at.longest):
            positions = torch.arange(mask.at.longest, device=scores.device)
            is_hidden = positions <= mask.at.positions[:, None] - self.window
            is_hidden = is_hidden.repeat_interleave(self.cache.shape[4], dim=-1)
            scores.masked_fill_(is_hidden[:, None, None], -torch.inf)
        return scores

    def _row_bias(self, mask: TreeMask) -> Float[Tensor, "B H 1 S"]:
        """The bias of the last token of each slot."""
        assert self.distance_bias is not None
        distance = mask.at.positions[:, None] - torch.arange(mask.at.longest, device=self.distance_bias.device)
        return self.distance_bias[:, distance.clamp(min=0)].transpose(0, 1)[:, :, None]

    def _hides_keys(self, keys: int) -> bool:
        """Whether some of the keys are before the sliding window."""
        return 0 < self.window < keys

    def _attend_gathered(self, q: Float[Tensor, "B K H D"], mask: TreeMask) -> Float[Tensor, "R E"]:
        """Any score: the keys and values of each hypothesis are gathered from the columns of its ancestors."""
        B, K, H, D = q.shape
        S = mask.at.longest
        cache = self.cache[:, :, :, :S]
        if mask.ancestors is not None:
            columns = mask.ancestors[..., :S].long().mT[None, :, None, :, :, None]
            cache = cache.gather(4, columns.expand(cache.shape))
        k, v = cache.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
        queries = q.reshape(B * K, H, 1, D)
        lengths = (mask.at.positions + 1).repeat_interleave(K)
        allowed = None if mask.at.shared is not None else padding(lengths)
        if self._hides_keys(S):
            allowed = padding(lengths) & ~padding(lengths - self.window)
        if self.distance_bias is None:
            out = attend(queries, k, v, score=self.attention.score, mask=allowed)
        else:
            rows = self._row_bias(mask).repeat_interleave(K, dim=0)
            bias: Any = lambda p, s: rows  # noqa: E731
            out = reference(queries, k, v, self.attention.score, allowed, bias)
        return self.out(out.view(B * K, H * D))

    def prefill(
        self,
        x: Float[Tensor, "N E"],
        tokens: Packed,
        slots: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        start: int,
        lengths: Int[Tensor, "N"] | None = None,
    ) -> Float[Tensor, "N E"]:
        """Self-attention of packed prompts, whose keys and values enter column 0 of their slots.

        With `start` > 0 it is one prompt, whose first tokens are in the cache already. `lengths` are those of the
        prompts, for dynamic rotary scaling.
        """
        attention = self.attention
        q = attention.queries(x, positions, lengths)
        k, v = attention.keys_values(x, positions, lengths)
        self.cache[:, slots, :, positions, 0] = torch.stack((k, v), dim=1)
        if start:
            keys, values = self.cache[:, slots[:1], :, : start + len(x), 0]
            out = attend(q.transpose(0, 1)[None], keys, values, score=attention.score, mask=attention.mask)
            return attention.out(out[0].transpose(0, 1).flatten(-2))
        offsets = tokens.offsets
        out = attend(q, k, v, score=attention.score, mask=attention.mask, q_offsets=offsets, k_offsets=offsets)
        return attention.out(out.flatten(-2))

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        self.cache = self.cache[:, slots]


class StaticCrossAttention(_HeadAttention):
    """Cross-attention of one layer; the keys and values of the source exist once per slot."""

    def __init__(
        self, attention: MultiHeadAttention, slots: int, capacity: int, allocate: Callable[..., Tensor] = torch.zeros
    ) -> None:
        super().__init__(attention)
        size = (2, slots, attention.kv_heads, capacity, attention.head_width)
        self.cache = allocate(size, dtype=self.dtype, device=attention.out.weight.device)

    @cached_property
    def query(self) -> Callable[[Tensor], Tensor]:
        """The layer of the queries."""
        return make_projection(self.attention.query)

    def load(self, slots: Int[Tensor, "n"], memory: Float[Tensor, "M E"], source: Packed) -> None:
        """Compute the keys and values of new sentences."""
        for cache, new in zip(self.cache, self.attention.keys_values(memory)):
            cache[slots, :, : source.max_len] = new[source.offsets.rows[: len(slots)]].transpose(1, 2)

    def __call__(
        self,
        x: Float[Tensor, "R E"],
        lengths: Int[Tensor, "B"],
        longest: int,
        bias: Float[Tensor, "B 1 1 S"] | None,
    ) -> Float[Tensor, "R E"]:
        B, K = self.cache.shape[1], len(x) // self.cache.shape[1]
        q = self.query(x).view(B, K, self.heads, -1)
        if self.attention.query_norm is not None:
            q = self.attention.query_norm(q)
        k, v = self.cache[:, :, :, :longest]
        if not self.is_dot:
            mask = None if bias is None else padding(lengths)
            if self.keeps_weights:
                self.weights = weights(q.transpose(1, 2), k, score=self.attention.score, mask=mask).mean(1).float()
            out = attend(q.transpose(1, 2), k, v, score=self.attention.score, mask=mask).transpose(1, 2)
            return self.out(out.reshape(B * K, -1))
        k, v = (y.reshape(B * self.kv_heads, longest, self.head_width) for y in (k, v))
        return self.attend_flat(q, k, v, None if bias is None else lambda scores: scores.add_(bias))

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        self.cache = self.cache[:, slots]


class StaticDecoder:
    """A decoder stack with caches for B slots of K hypotheses, `capacity` positions and `source_capacity` tokens.

    `load` puts new sentences into slots; `step` processes the last token of every hypothesis.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        hypotheses: int,
        capacity: int,
        source_capacity: int = 0,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        self.model, self.hypotheses, self.capacity = model, hypotheses, capacity
        self.stack: Decoder = model.stack
        self.blocks, self.embedding = list(self.stack.blocks), self.stack.embedding
        self.device = self.embedding.tokens.weight.device
        if self.embedding.positions is not None:
            self.embedding.positions.reserve(capacity - 1)
        bias = None
        if self.stack.bias is not None:
            last, positions = torch.tensor([capacity - 1]), torch.arange(capacity)
            bias = self.stack.bias(last.to(self.device), positions.to(self.device))[:, 0].flip(-1)
        self.self_attention = [
            CachedAttention(block.attention, slots, capacity, hypotheses, bias, allocate) for block in self.blocks
        ]
        self.cross_attention: list[StaticCrossAttention] = []
        if self.stack.has_cross:
            self.cross_attention = [
                StaticCrossAttention(block.cross, slots, source_capacity, allocate) for block in self.blocks
            ]
        self.prepare_layers()
        self.source_lengths = torch.ones(slots, dtype=torch.long, device=self.device)
        self.host_lengths = [1] * slots

    @property
    def attention(self) -> list[Float[Tensor, "B K S"]]:
        """The cross-attention of the last step, if it was asked for."""
        return [attention.weights for attention in self.cross_attention]

    def keep_attention(self) -> None:
        """Keep the cross-attention of every step."""
        if not self.cross_attention:
            raise no_cross_attention()
        for attention in self.cross_attention:
            attention.keeps_weights = True

    def prepare_layers(self) -> None:
        """Make the functions of the layers. Weights are copied, which must not happen in a captured step."""
        stack = self.stack
        for attention in self.self_attention:
            _ = attention.qkv, attention.out
        for cross in self.cross_attention:
            _ = cross.query, cross.out
        self.layers = [self._make_layer(i) for i in range(len(self.blocks))]
        final_norm, factor = make_norm_function(stack.norm), stack.output_factor
        self.final_norm = final_norm if factor == 1.0 else lambda x: final_norm(x) * factor
        self.output = make_projection(stack.output)

    def _make_layer(self, i: int) -> list[tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
        """The sublayers of a block, each with its norm."""
        block = self.blocks[i]
        layer: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
            (make_norm_function(block.attention_norm), self.self_attention[i])
        ]
        if self.cross_attention:
            layer.append((make_norm_function(block.cross_norm), self.cross_attention[i]))
        return [*layer, (make_norm_function(block.feedforward_norm), make_feedforward_function(block.feedforward))]

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None:
        """Compute the logits of these tokens only."""
        self.output = make_projection(self.stack.output, tokens)

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        """Encode new source sentences, or process all but the last token of new prompts."""
        if not self.stack.has_cross:
            self._prefill(slots, [prompt[:-1] for prompt in sources])
            return
        self.load_source(torch.tensor(slots, device=self.device), pack(sources).to(self.device))
        for slot, ids in zip(slots, sources):
            self.host_lengths[slot] = len(ids)

    def load_source(self, slots: Int[Tensor, "n"], source: Packed) -> None:
        """Encode source sentences into these slots; `source` may have further sequences, which are padding."""
        memory = self.model.encode(source)
        for attention in self.cross_attention:
            attention.load(slots, memory, source)
        self.source_lengths[slots] = source.offsets.lengths[: len(slots)].long()

    def _prefill(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Fill the caches with the keys and values of prompts: short ones together, long ones in chunks."""
        group: list[tuple[int, list[int]]] = []
        for slot, prompt in zip(slots, prompts):
            starts = range(0, len(prompt), PREFILL_CHUNK)
            if len(starts) > 1:
                for start in starts:
                    self._prefill_chunk([(slot, prompt[start : start + PREFILL_CHUNK])], start, len(prompt))
            elif prompt:
                if sum(len(ids) for _, ids in group) + len(prompt) > PREFILL_CHUNK:
                    self._prefill_chunk(group)
                    group = []
                group.append((slot, prompt))
        if group:
            self._prefill_chunk(group)

    def _prefill_chunk(self, group: list[tuple[int, list[int]]], start: int = 0, length: int = 0) -> None:
        """Process prompts, or the part of a prompt of this length that begins at position `start`."""
        tokens = pack([ids for _, ids in group]).to(self.device)
        positions = tokens.positions + start
        slots, lengths = (
            torch.tensor(column, device=self.device)[tokens.offsets.sequences]
            for column in zip(*((slot, 1 + (length or len(ids))) for slot, ids in group))
        )
        self.prefill_tokens(tokens, slots, positions, start, lengths)

    def prefill_tokens(
        self,
        tokens: Packed,
        slots: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        start: int,
        lengths: Int[Tensor, "N"] | None = None,
    ) -> None:
        """Compute the keys and values of packed prompts; `slots`, `positions` and `lengths` are those of each token.

        `lengths` are those of the prompts with their last tokens, which `step` processes.
        """
        x = self.embedding(tokens.ids, positions, start + tokens.max_len)
        for block, attention in zip(self.blocks, self.self_attention):
            prefill = partial(
                attention.prefill, tokens=tokens, slots=slots, positions=positions, start=start, lengths=lengths
            )
            x = block.sublayers(x, prefill)

    def step(
        self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None
    ) -> Float[Tensor, "B K V"]:
        """The logits of the token after the last token of each hypothesis, which enters the caches."""
        mask = self._tree_mask(at, ancestors)
        x = self.embedding(last, at.positions[:, None].expand_as(last), self.capacity - 1).flatten(0, 1)
        longest = max(self.host_lengths)
        source: dict[str, Any] = {"lengths": self.source_lengths, "longest": longest, "bias": None}
        if self.cross_attention and min(self.host_lengths) < longest:
            is_padding = torch.arange(longest, device=self.device) >= self.source_lengths[:, None, None, None]
            source["bias"] = torch.zeros(is_padding.shape, dtype=x.dtype, device=x.device)
            source["bias"].masked_fill_(is_padding, -torch.inf)
        norm_first = self.blocks[0].norm_first
        for block, layer in zip(self.blocks, self.layers):
            if not isinstance(block, PreNormBlock | PostNormBlock):
                x = block.sublayers(x, lambda h, attention=layer[0][1]: attention(h, mask))
                continue
            for norm, sublayer in layer:
                h = norm(x) if norm_first else x
                if isinstance(sublayer, CachedAttention):
                    update = sublayer(h, mask)
                elif isinstance(sublayer, StaticCrossAttention):
                    update = sublayer(h, **source)
                else:
                    update = sublayer(h)
                x = update.add_(x)
                if not norm_first:
                    x = norm(x)
        logits, cap = self.output(self.final_norm(x)).view(*last.shape, -1), self.stack.logit_cap
        return (logits / cap).tanh() * cap if cap else logits

    def _tree_mask(self, at: StepPositions, ancestors: Int[Tensor, "B K S"] | None) -> TreeMask:
        K, S = self.hypotheses, at.longest
        if K == 1 and at.shared is not None:
            return TreeMask(None, None, at)
        is_past = torch.arange(S, device=self.device) <= at.positions[:, None, None]  # (B, 1, S)
        if K == 1 or ancestors is None:
            allowed = is_past[:, :, None]
        else:
            columns = torch.arange(K, device=self.device)
            allowed = (ancestors[:, :, :S, None] == columns) & is_past[..., None]
            allowed = allowed.flatten(2)[:, None]  # (B, 1, K, S * K)
        dtype = self.self_attention[0].dtype
        bias = torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill_(~allowed, -torch.inf)
        return TreeMask(bias, ancestors if K > 1 else None, at)

    def reorder(self, parents: Int[Tensor, "B K"]) -> None:
        """Nothing to do: `ancestors` refers to the caches of the parents."""

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        attentions: list[Any] = [*self.self_attention, *self.cross_attention]
        for attention in attentions:
            attention.select_slots(slots)
        self.source_lengths = self.source_lengths[slots]
        self.host_lengths = [self.host_lengths[slot] for slot in slots.tolist()]


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

        self.attention: list[Float[Tensor, "B K S"]] = []
        self.keeps_attention = False

    def keep_attention(self) -> None:
        """Keep the cross-attention of every step."""
        if self.memory is None:
            raise no_cross_attention()
        self.keeps_attention = True

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
        step = partial(self.model.decoder.step, y, self.cells, memory)
        (features, cells), self.attention = with_attention(self.model, step) if self.keeps_attention else (step(), [])
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


def kernels_support(model: Any) -> bool:
    """Whether the specialized kernels can run the blocks of a model; otherwise torch code does.

    They have no norms of outputs, parallel sublayers, sliding windows, soft-capping, layers of different kinds,
    rotation of some channels only, or rotation that depends on the length of the text.
    """
    stack: Decoder = model.stack
    attentions = [block.attention for block in stack.blocks]
    are_alike = len({attention.rotary is None for attention in attentions}) == 1
    return are_alike and not stack.logit_cap and all(map(_kernels_support_block, stack.blocks))


def _kernels_support_block(block: Any) -> bool:
    attention = block.attention
    is_simple = isinstance(block, PreNormBlock | PostNormBlock) and not attention.window
    has_norms = isinstance(block.attention_norm, nn.LayerNorm | RMSNorm)
    has_head_norms = type(attention.query_norm) in (type(None), nn.LayerNorm, RMSNorm)
    rotary = attention.rotary
    rotates_all = rotary is None or (rotary.width == attention.head_width and not rotary.is_dynamic)
    return is_simple and has_norms and has_head_norms and rotates_all


def make_projection(module: Any, channels: Int[Tensor, "U"] | None = None) -> Projection:
    """The function of a linear layer, or of some of its output channels, without the overhead of calling a module.

    >>> make_projection(nn.Linear(8, 3))(torch.randn(5, 8)).shape
    torch.Size([5, 3])
    >>> make_projection(nn.Linear(8, 3), torch.tensor([0, 2]))(torch.randn(5, 8)).shape
    torch.Size([5, 2])
    """
    weight = module.dequantize() if isinstance(module, Float8Linear) else module.weight
    bias, scale = module.bias, module.scale if isinstance(module, Int8Linear) else None
    if channels is not None:
        weight, bias, scale = (None if x is None else x[channels] for x in (weight, bias, scale))
    if scale is not None:
        return lambda x: int8_linear(x, weight, scale, bias)
    return lambda x: linear(x, weight, bias)


def make_joint_projection(modules: Sequence[Any]) -> Callable[[Float[Tensor, "R I"]], tuple[Tensor, ...]]:
    """The function of several linear layers with the same input; int8 weights are concatenated, others stay shared.

    >>> q, kv = make_joint_projection([nn.Linear(8, 3), nn.Linear(8, 6)])(torch.randn(5, 8))
    >>> q.shape, kv.shape
    (torch.Size([5, 3]), torch.Size([5, 6]))
    """
    if not all(isinstance(module, Int8Linear) for module in modules):
        projections = [make_projection(module) for module in modules]
        return lambda x: tuple(projection(x) for projection in projections)
    biases = [module.bias for module in modules]
    joint = Int8Linear(
        torch.cat([module.weight for module in modules]),
        torch.cat([module.scale for module in modules]),
        None if biases[0] is None else torch.cat(biases),
    )
    projection, sizes = make_projection(joint), [len(module.weight) for module in modules]
    return lambda x: projection(x).split(sizes, dim=1)


def activation_dtype(module: Any) -> torch.dtype:
    """The dtype of the inputs and outputs of a linear layer, quantized or not.

    >>> activation_dtype(Int8Linear.from_linear(nn.Linear(8, 3)))
    torch.float32
    """
    return module.dtype if isinstance(module, Int8Linear | Float8Linear) else module.weight.dtype


def make_norm_function(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function of a norm, without the overhead of calling a module."""
    if isinstance(norm, nn.LayerNorm):
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return norm


def make_feedforward_function(feedforward: FeedForward) -> Callable[[Tensor], Tensor]:
    """The function of a feed-forward network, without the overhead of calling modules."""
    if feedforward.is_gated:
        return feedforward
    fc1, fc2, name = make_projection(feedforward.fc1), make_projection(feedforward.fc2), feedforward.activation
    if name == "relu":
        return lambda x: fc2(fc1(x).relu_())
    return lambda x: fc2(activate(name, fc1(x)))
