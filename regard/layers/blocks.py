"""Blocks of encoders and decoders: attention, cross-attention and feed-forward, each with a residual connection.

A class per placement of the norms; `BlockConfig` builds the parts of a block, and the block from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Bias, Mask, Offsets, make_score
from regard.attention.offsets import Lengths
from regard.layers.attention import CrossAttention, MultiHeadAttention
from regard.layers.dropout import Dropout, DropPath
from regard.layers.feedforward import EncoderActivation, FeedForward, VisionActivation
from regard.layers.kv_cache import CrossAttentionCache, KVCache
from regard.layers.norms import DecoderNormKind, EncoderNormKind, make_norm
from regard.layers.positions import RelativePositions, Rotary, RotaryTables

NormPlacement = Literal["pre", "post"]
BiasPlacement = Literal["all", "attention", "qkv", "not_qkv", "feedforward", "none"]
Attend = Callable[[Float[Tensor, "*n E"]], Float[Tensor, "*n E"]]


class Residual(nn.Module):
    """What happens to the output of a sublayer before it is added to the input of the sublayer: dropout.

    With `layer_scale` it is also multiplied by a learned factor per channel, which starts at this value (LayerScale,
    Touvron et al. 2021). With `drop_path` it is dropped for entire sequences at this rate (stochastic depth).

    >>> Residual(8, dropout=0.0, layer_scale=0.5)(torch.ones(3, 8)).sum().item()
    12.0
    """

    def __init__(self, width: int, dropout: float, layer_scale: float = 0.0, drop_path: float | None = None) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.layer_scale = nn.Parameter(torch.empty(width)) if layer_scale else None
        if self.layer_scale is not None:
            nn.init.constant_(self.layer_scale, layer_scale)
        self.drop_path = DropPath(drop_path) if drop_path is not None else None

    def forward(self, update: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None = None) -> Float[Tensor, "*n E"]:
        update = self.dropout(update)
        if self.layer_scale is not None:
            update = update * self.layer_scale.to(update.dtype)
        return update if self.drop_path is None else self.drop_path(update, offsets)


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if it is given, and a feed-forward network; subclasses place the norms."""

    norm_first = True
    """whether the attention gets normalized inputs"""

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: FeedForward,
        make_norm: Callable[[], nn.Module],
        make_residual: Callable[[], Residual],
        cross: MultiHeadAttention | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.feedforward = attention, cross, feedforward
        self.attention_residual, self.attention_norm = make_residual(), make_norm()
        if cross is not None:
            self.cross_residual, self.cross_norm = make_residual(), make_norm()
        self.feedforward_residual, self.feedforward_norm = make_residual(), make_norm()

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        offsets: Offsets | Lengths | None = None,
        positions: Int[Tensor, "*n"] | None = None,
        bias: Bias | RelativePositions | None = None,
        cache: KVCache | None = None,
        memory: Float[Tensor, "*m E"] | None = None,
        memory_offsets: Offsets | Lengths | None = None,
        memory_cache: CrossAttentionCache | None = None,
        rotary: RotaryTables | None = None,
    ) -> Float[Tensor, "*n E"]:
        """Full sequences: packed (N, E), or (B, T, E) of one length without offsets; `memory` is for cross-attention.

        With caches and no offsets: one token (B, K, E) per hypothesis.
        """
        own: Any = dict(offsets=offsets, positions=positions, bias=bias, cache=cache, rotary=rotary)
        source: Any = dict(offsets=offsets, memory=memory, memory_offsets=memory_offsets, cache=memory_cache)
        cross = None if self.cross is None else partial(self.cross, **source)
        return self.sublayers(x, partial(self.attention, **own), cross, offsets)

    def sublayers(
        self,
        x: Float[Tensor, "*n E"],
        attention: Attend,
        cross: Attend | None = None,
        offsets: Offsets | Lengths | None = None,
    ) -> Float[Tensor, "*n E"]:
        """The formula of the block, with any functions as its attention and its cross-attention."""
        raise NotImplementedError

    def forward_first(
        self, x: Float[Tensor, "*n E"], offsets: Offsets | None, count: int, rotary: RotaryTables | None = None
    ) -> Float[Tensor, "B K E"]:
        """The output of `forward` for the first `count` tokens per sequence (class tokens), which have no position.

        The other tokens serve as keys and values only. As the last block, this costs a fraction of `forward`.
        """
        first_offsets = None
        if offsets is not None:
            starts = torch.arange(len(offsets.starts), device=x.device, dtype=torch.int32) * count
            first_offsets = Offsets(starts, count * (len(starts) - 1), count)
        memory: Any = dict(memory=self.attention_norm(x) if self.norm_first else x, memory_offsets=offsets)
        attention = partial(self.attention, offsets=first_offsets, rotary=rotary, **memory)
        x = self.sublayers(first_tokens(x, offsets, count), attention, None, first_offsets)
        return x if offsets is None else x.unflatten(0, (-1, count))


class PreNormBlock(TransformerBlock):
    """x + attention(norm(x)), then x + cross(norm(x)), then x + feedforward(norm(x)).

    >>> block = BlockConfig(16, heads=4, feedforward=32).make_block("scaled_dot")
    >>> block(torch.randn(5, 16), Offsets.from_starts(torch.tensor([0, 2, 5]))).shape
    torch.Size([5, 16])
    """

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        x = x + self.attention_residual(attention(self.attention_norm(x)), offsets)
        if cross is not None:
            x = x + self.cross_residual(cross(self.cross_norm(x)), offsets)
        return x + self.feedforward_residual(self.feedforward(self.feedforward_norm(x)), offsets)


class PostNormBlock(TransformerBlock):
    """norm(x + attention(x)), then norm(x + cross(x)), then norm(x + feedforward(x)), as published in 2017.

    Under autocast LayerNorm returns float32; a low-precision residual stream keeps its dtype.
    """

    norm_first = False

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        x = self.attention_norm(x + self.attention_residual(attention(x), offsets)).to(x.dtype)
        if cross is not None:
            x = self.cross_norm(x + self.cross_residual(cross(x), offsets)).to(x.dtype)
        return self.feedforward_norm(x + self.feedforward_residual(self.feedforward(x), offsets)).to(x.dtype)


class SandwichBlock(TransformerBlock):
    """x + norm(attention(norm(x))), then x + norm(feedforward(norm(x))) (Gemma 2).

    `normalizes_inputs` false: x + norm(attention(x)), then x + norm(feedforward(x)) (OLMo 2).
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: FeedForward,
        make_norm: Callable[[], nn.Module],
        make_residual: Callable[[], Residual],
        normalizes_inputs: bool = True,
    ) -> None:
        super().__init__(attention, feedforward, make_norm if normalizes_inputs else nn.Identity, make_residual)
        self.attention_output_norm, self.feedforward_output_norm = make_norm(), make_norm()

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        update = self.attention_output_norm(attention(self.attention_norm(x)))
        x = x + self.attention_residual(update, offsets)
        update = self.feedforward_output_norm(self.feedforward(self.feedforward_norm(x)))
        return x + self.feedforward_residual(update, offsets)


class ParallelBlock(TransformerBlock):
    """x + attention(norm(x)) + feedforward(norm(x)) (GPT-NeoX)."""

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        update = self.attention_residual(attention(self.attention_norm(x)), offsets)
        return x + update + self.feedforward_residual(self.feedforward(self.feedforward_norm(x)), offsets)


def first_tokens(x: Float[Tensor, "*n E"], offsets: Offsets | None, count: int) -> Float[Tensor, "*m E"]:
    """The first `count` tokens of each sequence: (B, count, E) from (B, T, E), (B * count, E) from packed sequences.

    >>> first_tokens(torch.arange(5.0)[:, None], Offsets.from_starts(torch.tensor([0, 3, 5])), 2)[:, 0]
    tensor([0., 1., 3., 4.])
    """
    if offsets is None:
        return x[:, :count]
    rows = offsets.starts[:-1, None] + torch.arange(count, device=x.device)
    return x.index_select(0, rows.flatten())


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and choices of encoder and decoder blocks; builds their parts."""

    width: int
    heads: int
    feedforward: int
    kv_heads: int | None = None
    head_width: int | None = None
    dropout: float = 0.1
    norm: NormPlacement = "pre"
    norm_kind: EncoderNormKind | DecoderNormKind = "layer"
    norm_eps: float = 1e-5
    activation: VisionActivation | EncoderActivation = "relu"
    rotary_base: float | None = None
    qk_norm_eps: float | None = None
    qk_norm_kind: DecoderNormKind = "rms"
    bias: BiasPlacement = "all"
    max_len: int = 256
    drop_path: float | None = None
    """None: no stochastic depth. A rate of 0 runs the same code as other rates, so that layers share compiled code"""
    layer_scale: float = 0.0

    def make_attention(
        self, score: str, mask: Mask | None = None, attention_class: type[MultiHeadAttention] = MultiHeadAttention
    ) -> MultiHeadAttention:
        """Attention of these blocks; cross-attention has no rotary positions."""
        width = self.head_width or self.width // self.heads
        rotary = None
        if self.rotary_base is not None and attention_class is not CrossAttention:
            rotary = Rotary(width, self.rotary_base)
        query_norm, key_norm = (
            make_norm(self.qk_norm_kind, width, self.qk_norm_eps) if self.qk_norm_eps else None for _ in range(2)
        )
        attention = attention_class(
            self.width,
            self.heads,
            mask=mask,
            rotary=rotary,
            query_norm=query_norm,
            key_norm=key_norm,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            qkv_bias=self.bias in ("all", "attention", "qkv"),
            out_bias=self.bias in ("all", "attention", "not_qkv"),
        )
        # Its parameters are drawn after those of the projections.
        attention.score = make_score(score, width, width, hidden=width, max_keys=self.max_len, heads=self.heads)
        return attention

    def make_feedforward(self) -> FeedForward:
        return FeedForward(
            self.width, self.feedforward, self.activation, self.bias in ("all", "not_qkv", "feedforward")
        )

    def make_norm(self) -> nn.Module:
        """The norm of a sublayer's input or, post-norm, of the residual sum."""
        return make_norm(self.norm_kind, self.width, self.norm_eps)

    def make_residual(self) -> Residual:
        return Residual(self.width, self.dropout, self.layer_scale, self.drop_path)

    def make_block(self, score: str, mask: Mask | None = None, cross_score: str | None = None) -> TransformerBlock:
        """A block of an encoder or, with a causal mask, of a decoder; with a score for it, it has cross-attention."""
        cross = None if cross_score is None else self.make_attention(cross_score, attention_class=CrossAttention)
        return self.assemble(self.make_attention(score, mask), cross)

    def assemble(self, attention: MultiHeadAttention, cross: MultiHeadAttention | None = None) -> TransformerBlock:
        """A block with these attentions."""
        block = PreNormBlock if self.norm == "pre" else PostNormBlock
        return block(attention, self.make_feedforward(), self.make_norm, self.make_residual, cross)
