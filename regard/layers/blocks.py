"""Encoder and decoder blocks: attention and feed-forward, each with its residual connection and norm.

Pre-norm computes x + sublayer(norm(x)); post-norm, as published in 2017, norm(x + sublayer(x)). Two others normalize
the sublayer's output: x + norm(sublayer(x)) (output) and x + norm(sublayer(norm(x))) (sandwich).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Bias, Offsets, ScaledDot, Score, SoftCap, causal, local, make_score, window
from regard.attention.offsets import Lengths
from regard.layers.attention import CrossAttention, DisentangledAttention, MultiHeadAttention
from regard.layers.feedforward import EncoderActivation, FeedForward, VisionActivation
from regard.layers.kv_cache import CrossAttentionCache, KVCache
from regard.layers.norms import DecoderNormKind, EncoderNormKind, make_joint_norm, make_norm
from regard.layers.positions import RelativePositions, Rotary, RotaryScaling, RotaryTables
from regard.layers.residual import FusedResidual, Residual

NormPlacement = Literal["pre", "post"]
BiasPlacement = Literal["all", "attention", "qkv", "not_qkv", "feedforward", "none"]


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and choices of encoder and decoder blocks; builds their parts."""

    width: int
    heads: int
    feedforward: int
    kv_heads: int | None = None
    head_width: int | None = None
    dropout: float = 0.1
    norm: NormPlacement | Literal["sandwich", "output"] = "pre"
    norm_kind: EncoderNormKind | DecoderNormKind = "layer"
    norm_eps: float = 1e-5
    activation: VisionActivation | EncoderActivation = "relu"
    rotary_base: float | None = None
    rotary_factor: float = 1.0
    rotary_context: int = 0
    rotary_scaling: RotaryScaling = "interpolate"
    rotary_share: float = 1.0
    score_width: float = 0.0
    score_cap: float = 0.0
    sliding_window: int = 0
    disentangled: bool = False
    """attention with keys and queries of relative positions, which blocks get as `bias` (DeBERTa)"""
    qk_norm_eps: float | None = None
    qk_norm_kind: DecoderNormKind = "rms"
    qk_norm_joint: bool = False
    parallel: bool = False
    """attention and feed-forward of a block have the same input: x + attention(norm(x)) + feedforward(norm(x))"""
    bias: BiasPlacement = "all"
    max_len: int = 256
    drop_path: float | None = None
    """None: no stochastic depth. A rate of 0 runs the same code as other rates, so that layers share compiled code"""
    layer_scale: float = 0.0

    def make_attention(self, kind: Literal["self", "masked", "cross"], score: str) -> MultiHeadAttention:
        """Attention of these blocks over the sequence itself, over its earlier tokens, or over another sequence."""
        mask = causal() if kind == "masked" else None
        if self.sliding_window and kind != "cross":
            mask = window(self.sliding_window) if kind == "masked" else local(self.sliding_window)
        classes = {"cross": CrossAttention, "self": DisentangledAttention if self.disentangled else MultiHeadAttention}
        attention = classes.get(kind, MultiHeadAttention)(
            self.width,
            self.heads,
            mask=mask,
            rotary=self._make_rotary() if kind != "cross" else None,
            query_norm=self._make_qk_norm(self.heads),
            key_norm=self._make_qk_norm(self.kv_heads or self.heads),
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            qkv_bias=self.bias in ("all", "attention", "qkv"),
            out_bias=self.bias in ("all", "attention", "not_qkv"),
        )
        attention.score = self._make_score(score)  # its parameters are drawn after those of the projections
        return attention

    @property
    def _head_width(self) -> int:
        return self.head_width or self.width // self.heads

    def _make_score(self, name: str) -> Score:
        width = self._head_width
        score = make_score(name, width, width, hidden=width, max_keys=self.max_len, heads=self.heads)
        if self.score_width and isinstance(score, ScaledDot):
            score.width = self.score_width
        return SoftCap(score, self.score_cap) if self.score_cap else score

    def _make_qk_norm(self, heads: int) -> nn.Module | None:
        """The norm of queries or keys, per head or of all heads together."""
        if not self.qk_norm_eps:
            return None
        if self.qk_norm_joint:
            return make_joint_norm(self.qk_norm_kind, heads * self._head_width, self.qk_norm_eps)
        return make_norm(self.qk_norm_kind, self._head_width, self.qk_norm_eps)

    def _make_rotary(self) -> Rotary | None:
        if self.rotary_base is None:
            return None
        scaling = self.rotary_factor, self.rotary_context, self.rotary_scaling
        return Rotary(self._head_width, self.rotary_base, *scaling, self.rotary_share)

    def make_feedforward(self) -> FeedForward:
        return FeedForward(
            self.width, self.feedforward, self.activation, self.bias in ("all", "not_qkv", "feedforward")
        )

    def make_norm(self) -> nn.Module:
        """The norm of a sublayer's input or, post-norm, of the residual sum."""
        return nn.Identity() if self.norm == "output" else make_norm(self.norm_kind, self.width, self.norm_eps)

    def make_output_norm(self) -> nn.Module:
        """The norm of a sublayer's output."""
        has_norm = self.norm in ("sandwich", "output")
        return make_norm(self.norm_kind, self.width, self.norm_eps) if has_norm else nn.Identity()

    def make_residual(self) -> Residual:
        if self.layer_scale or self.drop_path is not None:
            return Residual(self.width, self.dropout, self.layer_scale, self.drop_path)
        return FusedResidual(self.width, self.dropout, norm_first=self.norm != "post")


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward: a block of an encoder or, masked, of a decoder-only model.

    >>> block = EncoderBlock(BlockConfig(16, heads=4, feedforward=32), score="scaled_dot")
    >>> block(torch.randn(5, 16), Offsets.from_starts(torch.tensor([0, 2, 5]))).shape
    torch.Size([5, 16])
    """

    def __init__(self, config: BlockConfig, score: str, kind: Literal["self", "masked"] = "self") -> None:
        super().__init__()
        self.norm_first, self.parallel = config.norm != "post", config.parallel
        self.attention = config.make_attention(kind, score)
        self.feedforward = config.make_feedforward()
        self.attention_residual, self.attention_norm = config.make_residual(), config.make_norm()
        self.feedforward_residual, self.feedforward_norm = config.make_residual(), config.make_norm()
        self.attention_output_norm, self.feedforward_output_norm = (config.make_output_norm() for _ in range(2))

    @property
    def is_plain(self) -> bool:
        """Whether outputs of sublayers are not normalized, and the sublayers run one after another."""
        return isinstance(self.attention_output_norm, nn.Identity) and not self.parallel

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        offsets: Offsets | Lengths | None,
        positions: Int[Tensor, "*n"] | None = None,
        bias: Bias | RelativePositions | None = None,
        cache: KVCache | None = None,
        rotary: RotaryTables | None = None,
    ) -> Float[Tensor, "*n E"]:
        """Full sequences: packed (N, E), or (B, T, E) of one length without offsets.

        With a cache and no offsets: one token (B, K, E) per hypothesis.
        """
        attention = partial(self.attention, offsets=offsets, positions=positions, bias=bias, cache=cache, rotary=rotary)
        return self.sublayers(x, attention, offsets)

    def sublayers(
        self,
        x: Float[Tensor, "*n E"],
        attention: Callable[[Tensor], Tensor],
        offsets: Offsets | Lengths | None = None,
    ) -> Float[Tensor, "*n E"]:
        """The block with any function as its attention."""
        if self.norm_first:
            # x = x + attention(norm(x));  x = x + feedforward(norm(x))
            update = self.attention_output_norm(attention(self.attention_norm(x)))
            if self.parallel:
                h = self.feedforward_norm(x)
                x = self.attention_residual(x, update, offsets)
            else:
                x, h = self.attention_residual.add_norm(x, update, self.feedforward_norm, offsets)
            return self.feedforward_residual(x, self.feedforward_output_norm(self.feedforward(h)), offsets)
        # x = norm(x + attention(x));  x = norm(x + feedforward(x))
        _, x = self.attention_residual.add_norm(x, attention(x), self.attention_norm, offsets)
        _, x = self.feedforward_residual.add_norm(x, self.feedforward(x), self.feedforward_norm, offsets)
        return x

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
        assert self.is_plain
        h = self.attention_norm(x) if self.norm_first else x
        queries = first_tokens(h, offsets, count)
        update = self.attention(queries, first_offsets, memory=h, memory_offsets=offsets, rotary=rotary)
        x = first_tokens(x, offsets, count)
        if self.norm_first:
            x = self.attention_residual(x, update, first_offsets)
            x = self.feedforward_residual(x, self.feedforward(self.feedforward_norm(x)), first_offsets)
        else:
            _, x = self.attention_residual.add_norm(x, update, self.attention_norm, first_offsets)
            _, x = self.feedforward_residual.add_norm(x, self.feedforward(x), self.feedforward_norm, first_offsets)
        return x if offsets is None else x.unflatten(0, (-1, count))


def first_tokens(x: Float[Tensor, "*n E"], offsets: Offsets | None, count: int) -> Float[Tensor, "*m E"]:
    """The first `count` tokens of each sequence: (B, count, E) from (B, T, E), (B * count, E) from packed sequences.

    >>> first_tokens(torch.arange(5.0)[:, None], Offsets.from_starts(torch.tensor([0, 3, 5])), 2)[:, 0]
    tensor([0., 1., 3., 4.])
    """
    if offsets is None:
        return x[:, :count]
    rows = offsets.starts[:-1, None] + torch.arange(count, device=x.device)
    return x.index_select(0, rows.flatten())


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention over the encoder's output, then feed-forward."""

    def __init__(self, config: BlockConfig, score: str, cross_score: str) -> None:
        super().__init__()
        self.norm_first = config.norm == "pre"
        self.attention = config.make_attention("masked", score)
        self.cross = config.make_attention("cross", cross_score)
        self.feedforward = config.make_feedforward()
        self.attention_residual, self.attention_norm = config.make_residual(), config.make_norm()
        self.cross_residual, self.cross_norm = config.make_residual(), config.make_norm()
        self.feedforward_residual, self.feedforward_norm = config.make_residual(), config.make_norm()

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        offsets: Offsets | Lengths | None,
        positions: Int[Tensor, "*n"] | None = None,
        bias: Bias | None = None,
        cache: KVCache | None = None,
        memory: Float[Tensor, "*m E"] | None = None,
        memory_offsets: Offsets | Lengths | None = None,
        memory_cache: CrossAttentionCache | None = None,
    ) -> Float[Tensor, "*n E"]:
        """Full packed target sequences (teacher forcing), over `memory`, the output of the encoder.

        With caches and no offsets: one token (B, K, E) per hypothesis.
        """
        attention = partial(self.attention, offsets=offsets, positions=positions, bias=bias, cache=cache)
        options: Any = dict(offsets=offsets, memory=memory, memory_offsets=memory_offsets, cache=memory_cache)
        return self.sublayers(x, attention, partial(self.cross, **options))

    def sublayers(
        self, x: Float[Tensor, "*n E"], attention: Callable[[Tensor], Tensor], cross: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*n E"]:
        """The block with any functions as its masked attention and its cross-attention."""
        if self.norm_first:
            # x = x + attention(norm(x));  x = x + cross(norm(x));  x = x + feedforward(norm(x))
            x, h = self.attention_residual.add_norm(x, attention(self.attention_norm(x)), self.cross_norm)
            x, h = self.cross_residual.add_norm(x, cross(h), self.feedforward_norm)
            return self.feedforward_residual(x, self.feedforward(h))
        # x = norm(x + attention(x));  x = norm(x + cross(x));  x = norm(x + feedforward(x))
        _, x = self.attention_residual.add_norm(x, attention(x), self.attention_norm)
        _, x = self.cross_residual.add_norm(x, cross(x), self.cross_norm)
        _, x = self.feedforward_residual.add_norm(x, self.feedforward(x), self.feedforward_norm)
        return x
