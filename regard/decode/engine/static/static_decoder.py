"""Transformer decoders with key/value caches of a fixed capacity, for the decoding engine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.decode.engine.static.projections import make_projection
from regard.decode.engine.static.static_attention import CachedAttention, StaticCrossAttention, StepPositions, TreeMask
from regard.layers.feedforward import FeedForward, activate
from regard.layers.packed import Packed, pack
from regard.models.gpt import GPT
from regard.models.transformer import Transformer

# Longer prompts are processed in chunks of this many tokens, which limits the memory of their activations.
PREFILL_CHUNK = 2048


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
    inner, outer, name = make_projection(feedforward.inner), make_projection(feedforward.outer), feedforward.activation
    if name == "relu":
        return lambda x: outer(inner(x).relu_())
    return lambda x: outer(activate(name, inner(x)))


class StaticDecoder:
    """A Transformer or GPT with caches for B slots of K hypotheses, `capacity` positions and `source_capacity` tokens.

    `load` puts new sentences into slots; `step` processes the last token of every hypothesis.
    """

    def __init__(
        self,
        model: Transformer | GPT,
        slots: int,
        hypotheses: int,
        capacity: int,
        source_capacity: int = 0,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        self.model, self.hypotheses, self.capacity = model, hypotheses, capacity
        self.blocks: Sequence[Any] = list(model.decoder if isinstance(model, Transformer) else model.blocks)
        self.embedding = model.target_embedding if isinstance(model, Transformer) else model.embedding
        self.device = self.embedding.tokens.weight.device
        if self.embedding.positions is not None:
            self.embedding.positions.reserve(capacity - 1)
        bias = None
        if isinstance(model, Transformer) and model.decoder_bias is not None:
            last, positions = torch.tensor([capacity - 1]), torch.arange(capacity)
            bias = model.decoder_bias(last.to(self.device), positions.to(self.device))[:, 0].flip(-1)
        self.self_attention = [
            CachedAttention(block.attention, slots, capacity, hypotheses, bias, allocate) for block in self.blocks
        ]
        self.cross_attention: list[StaticCrossAttention] = []
        if isinstance(model, Transformer):
            self.cross_attention = [
                StaticCrossAttention(block.cross, slots, source_capacity, allocate) for block in self.blocks
            ]
        self.prepare_layers()
        self.source_lengths = torch.ones(slots, dtype=torch.long, device=self.device)
        self.host_lengths = [1] * slots

    def prepare_layers(self) -> None:
        """Make the functions of the layers. Weights are copied, which must not happen in a captured step."""
        model = self.model
        for attention in self.self_attention:
            _ = attention.qkv, attention.out
        for cross in self.cross_attention:
            _ = cross.query, cross.out
        self.layers = [self._make_layer(i) for i in range(len(self.blocks))]
        final_norm = make_norm_function(model.decoder_norm if isinstance(model, Transformer) else model.norm)
        factor = model.output_factor if isinstance(model, Transformer) else 1.0
        self.final_norm = final_norm if factor == 1.0 else lambda x: final_norm(x) * factor
        self.output = make_projection(model.output)
        self.logit_cap = model.config.logit_cap if isinstance(model, GPT) else 0.0

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
        self.output = make_projection(self.model.output, tokens)

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        """Encode new source sentences, or process all but the last token of new prompts."""
        if not isinstance(self.model, Transformer):
            self._prefill(slots, [prompt[:-1] for prompt in sources])
            return
        self.load_source(torch.tensor(slots, device=self.device), pack(sources).to(self.device))
        for slot, ids in zip(slots, sources):
            self.host_lengths[slot] = len(ids)

    def load_source(self, slots: Int[Tensor, "n"], source: Packed) -> None:
        """Encode source sentences into these slots; `source` may have further sequences, which are padding."""
        assert isinstance(self.model, Transformer)
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
                    self._prefill_chunk([(slot, prompt[start : start + PREFILL_CHUNK])], start)
            elif prompt:
                if sum(len(ids) for _, ids in group) + len(prompt) > PREFILL_CHUNK:
                    self._prefill_chunk(group, 0)
                    group = []
                group.append((slot, prompt))
        if group:
            self._prefill_chunk(group, 0)

    def _prefill_chunk(self, group: list[tuple[int, list[int]]], start: int) -> None:
        """Process parts of prompts that begin at position `start`."""
        tokens = pack([ids for _, ids in group]).to(self.device)
        positions = tokens.positions + start
        slots = torch.tensor([slot for slot, _ in group], device=self.device)[tokens.offsets.sequences]
        self.prefill_tokens(tokens, slots, positions, start)

    def prefill_tokens(self, tokens: Packed, slots: Int[Tensor, "N"], positions: Int[Tensor, "N"], start: int) -> None:
        """Compute the keys and values of packed prompts; `slots` and `positions` are those of each token."""
        x = self.embedding(tokens.ids, positions, start + tokens.max_len)
        for block, attention in zip(self.blocks, self.self_attention):
            x = block.sublayers(x, lambda h, attention=attention: attention.prefill(h, tokens, slots, positions, start))

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
            if not getattr(block, "is_plain", True):
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
        logits = self.output(self.final_norm(x)).view(*last.shape, -1)
        return (logits / self.logit_cap).tanh() * self.logit_cap if self.logit_cap else logits

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
