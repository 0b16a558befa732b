"""Blocks of imported models, assembled from the parts of the plain blocks and from parts that only such models have.

Sliding windows, soft-capped and rescaled scores, scaled and partial rotary positions, norms of sublayer outputs, joint
QK-norm, parallel sublayers, disentangled attention.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import Disentangled, ScaledDot, Score, SoftCap, causal, local, window
from regard.layers.attention import MultiHeadAttention
from regard.layers.blocks import BlockConfig, ParallelBlock, PreNormBlock, SandwichBlock, TransformerBlock
from regard.layers.norms import DecoderNormKind, RMSNorm, ZeroCenteredRMSNorm
from regard.layers.positions import RelativePositions, Rotary


def make_decoder_block(config: Any, layer: int) -> TransformerBlock:
    """The block of a layer of a GPT, from its config.

    >>> from regard.models.gpt import GPTConfig
    >>> type(make_decoder_block(GPTConfig(norm="sandwich"), 0)).__name__
    'SandwichBlock'
    """
    plain: BlockConfig = config.block_config()
    width = config.sliding_window(layer)
    attention = plain.make_attention(config.score, window(width) if width else causal())
    if attention.rotary is not None:
        attention.rotary = _make_rotary(config, layer, attention.head_width)
    if config.score_width and isinstance(attention.score, ScaledDot):
        attention.score.width = config.score_width
    if config.score_cap:
        attention.score = SoftCap(attention.score, config.score_cap)
    if config.qk_norm_joint and plain.qk_norm_eps:
        attention.query_norm, attention.key_norm = (
            make_joint_norm(plain.qk_norm_kind, heads * attention.head_width, plain.qk_norm_eps)
            for heads in (attention.heads, attention.kv_heads)
        )
    parts = attention, plain.make_feedforward(), plain.make_norm, plain.make_residual
    if config.norm in ("sandwich", "output"):
        return SandwichBlock(*parts, normalizes_inputs=config.norm == "sandwich")
    return (ParallelBlock if config.parallel else PreNormBlock)(*parts)


def _make_rotary(config: Any, layer: int, head_width: int) -> Rotary | None:
    """The rotary positions of a layer of a GPT."""
    if layer in config.unrotated_layers:
        return None
    context, share = config.rotary_context, config.rotary_share
    if config.window_rotary_base and config.sliding_window(layer):
        return Rotary(head_width, config.window_rotary_base, context=context, share=share)
    scaling = config.rotary_factor, context, config.rotary_scaling
    return Rotary(head_width, config.rotary_base, *scaling, share)


def make_encoder_block(config: Any, layer: int) -> TransformerBlock:
    """The block of a layer of an encoder-only model, from its config."""
    plain: BlockConfig = config.block_config()
    width = config.sliding_window(layer)
    attention_class = DisentangledAttention if config.relative == "disentangled" else MultiHeadAttention
    attention = plain.make_attention(config.score, local(width) if width else None, attention_class)
    if width and config.window_rotary_base and attention.rotary is not None:
        attention.rotary = Rotary(attention.head_width, config.window_rotary_base)
    return plain.assemble(attention)


class DisentangledAttention(MultiHeadAttention):
    """Multi-head attention with disentangled scores (DeBERTa).

    Keys and queries of relative positions, which are passed as `bias`, come from the projections of the tokens.

    >>> import torch
    >>> from regard.layers.positions import RelativeEmbedding
    >>> attention = DisentangledAttention(16, heads=4)
    >>> attention(torch.randn(2, 5, 16), bias=RelativeEmbedding(16, buckets=8)()).shape
    torch.Size([2, 5, 16])
    """

    def add_positions(self, bias: RelativePositions | None) -> tuple[Score, None]:
        if bias is None:  # the content alone, with the same scale
            return ScaledDot(3.0 * self.head_width), None
        queries = self.query(bias.embeddings).unflatten(-1, (self.heads, self.head_width))
        keys = self.key_value(bias.embeddings).unflatten(-1, (2, self.kv_heads, self.head_width)).select(-3, 0)
        return Disentangled(keys.transpose(0, 1), queries.transpose(0, 1), bias.index), None


class _OverHeads:
    """A norm of all heads of a token together (OLMo 2), of inputs (…, heads, channels)."""

    def forward(self, x: Float[Tensor, "*n H D"]) -> Float[Tensor, "*n H D"]:
        return super().forward(x.flatten(-2)).unflatten(-1, x.shape[-2:])  # type: ignore[misc]


class JointRMSNorm(_OverHeads, RMSNorm):
    """RMSNorm of all heads of a token together."""


class JointZeroCenteredRMSNorm(_OverHeads, ZeroCenteredRMSNorm):
    """ZeroCenteredRMSNorm of all heads of a token together."""


def make_joint_norm(kind: DecoderNormKind, width: int, eps: float) -> nn.Module:
    """Make a norm over all heads of a token, whose channels are `width` together.

    >>> import torch
    >>> make_joint_norm("rms", 8, 1e-5)(torch.randn(3, 2, 4)).shape
    torch.Size([3, 2, 4])
    """
    return (JointZeroCenteredRMSNorm if kind == "rms_zero_centered" else JointRMSNorm)(width, eps=eps)
