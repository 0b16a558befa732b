"""Multi-head attention (Vaswani et al. 2017, section 3.2.2), with grouped key/value heads and rotary positions."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import (
    Bias,
    Disentangled,
    Mask,
    ScaledDot,
    Score,
    SoftCap,
    attend,
    causal,
    local,
    make_score,
    padding,
    window,
)
from regard.attention.offsets import Lengths, Offsets
from regard.errors import RegardError
from regard.layers.kv_cache import CrossAttentionCache, KVCache
from regard.layers.norms import DecoderNormKind, make_norm
from regard.layers.positions import RelativePositions, Rotary, RotaryTables, apply_rotary

AttentionKind = Literal["self", "masked", "cross"]
BiasPlacement = Literal["all", "attention", "qkv", "not_qkv", "feedforward", "none"]


class MultiHead(nn.Module):
    """Multi-head attention: over the sequence itself (self, masked) or over another sequence (cross).

    A head has width / heads channels, or `head_width`. With fewer `kv_heads` than `heads`, several query heads share
    one key/value head (grouped-query attention). A `sliding_window` limits masked attention to the last keys, and
    self-attention to keys at this distance in both directions. QK-norm normalizes each head or, with `qk_norm_joint`,
    all heads of a token together. `score_width` replaces the width of a head in the scale of the scaled dot product;
    `score_cap` soft-caps the scores.

    >>> attention = MultiHead(16, heads=4, kind="self")
    >>> attention(torch.randn(5, 16), Offsets.from_starts(torch.tensor([0, 2, 5]))).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kind: AttentionKind,
        score: str = "scaled_dot",
        kv_heads: int | None = None,
        head_width: int | None = None,
        score_width: float = 0.0,
        score_cap: float = 0.0,
        sliding_window: int = 0,
        rotary: Rotary | None = None,
        qk_norm_eps: float | None = None,
        qk_norm_kind: DecoderNormKind = "rms",
        qk_norm_joint: bool = False,
        bias: BiasPlacement = "all",
        max_keys: int = 256,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads and not head_width:
            raise RegardError(
                f"width is {width}; it must be a multiple of heads ({heads}).", "Change model.width or model.heads."
            )
        if heads % kv_heads:
            raise RegardError(f"kv_heads is {kv_heads}; it must divide heads ({heads}).", "Change model.kv_heads.")
        self.kind, self.heads, self.kv_heads, self.head_width = kind, heads, kv_heads, head_width or width // heads
        qkv_bias, out_bias = bias in ("all", "attention", "qkv"), bias in ("all", "attention", "not_qkv")
        self.query = nn.Linear(width, heads * self.head_width, bias=qkv_bias)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_width, bias=qkv_bias)
        self.out = nn.Linear(heads * self.head_width, width, bias=out_bias)
        self.score = make_score(
            score, self.head_width, self.head_width, hidden=self.head_width, max_keys=max_keys, heads=heads
        )
        if score_width and isinstance(self.score, ScaledDot):
            self.score.width = score_width
        if score_cap:
            self.score = SoftCap(self.score, score_cap)
        self.rotary = rotary
        self.qk_norm_joint = qk_norm_joint
        self.query_norm, self.key_norm = (
            make_norm(qk_norm_kind, self.head_width * (count if qk_norm_joint else 1), qk_norm_eps)
            if qk_norm_eps
            else nn.Identity()
            for count in (heads, kv_heads)
        )
        self.sliding_window = sliding_window
        self.mask = None
        if kind == "masked":
            self.mask = window(sliding_window) if sliding_window else causal()
        elif kind == "self" and sliding_window:
            self.mask = local(sliding_window)

    def queries(
        self,
        x: Float[Tensor, "*n E"],
        positions: Int[Tensor, "*n"] | None,
        rotary: RotaryTables | None = None,
        lengths: Int[Tensor, "*n"] | None = None,
    ) -> Float[Tensor, "*n H D"]:
        """Projected, normalized and rotated queries; `lengths` are those of the texts, for dynamic rotary scaling."""
        q = self.query(x).unflatten(-1, (self.heads, self.head_width))
        return self._rotate(self.normalize(q, self.query_norm), positions, rotary, lengths)

    def keys_values(
        self,
        x: Float[Tensor, "*n E"],
        positions: Int[Tensor, "*n"] | None,
        rotary: RotaryTables | None = None,
        lengths: Int[Tensor, "*n"] | None = None,
    ) -> tuple[Float[Tensor, "*n G D"], Float[Tensor, "*n G D"]]:
        """Projected keys, normalized and rotated, and values."""
        k, v = self.key_value(x).unflatten(-1, (2, self.kv_heads, self.head_width)).unbind(-3)
        return self._rotate(self.normalize(k, self.key_norm), positions, rotary, lengths), v

    def normalize(self, x: Float[Tensor, "*n G D"], norm: nn.Module) -> Float[Tensor, "*n G D"]:
        """QK-norm of queries or keys: per head, or over all heads."""
        return norm(x.flatten(-2)).unflatten(-1, x.shape[-2:]) if self.qk_norm_joint else norm(x)

    def _rotate(
        self, x: Tensor, positions: Tensor | None, rotary: RotaryTables | None, lengths: Tensor | None
    ) -> Tensor:
        if rotary is not None:
            return apply_rotary(x, *rotary)
        return self.rotary(x, positions, lengths) if self.rotary is not None else x

    def _text_lengths(
        self, offsets: Offsets | Lengths | None, positions: Tensor | None, is_step: bool
    ) -> Int[Tensor, "*n"] | None:
        """The length of each token's text, if the rotary positions depend on it."""
        if self.rotary is None or not self.rotary.is_dynamic or positions is None:
            return None
        if is_step:
            return positions + 1
        if isinstance(offsets, Offsets):
            return offsets.lengths[offsets.sequences]
        if isinstance(offsets, Lengths) and offsets.lengths is not None:
            return offsets.lengths[:, None].expand_as(positions)
        return torch.full_like(positions, positions.shape[-1])

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        offsets: Offsets | Lengths | None = None,
        *,
        positions: Int[Tensor, "*n"] | None = None,
        memory: Float[Tensor, "*m E"] | None = None,
        memory_offsets: Offsets | Lengths | None = None,
        cache: KVCache | CrossAttentionCache | None = None,
        bias: Bias | RelativePositions | None = None,
        rotary: RotaryTables | None = None,
    ) -> Float[Tensor, "*n E"]:
        """Attention of packed sequences (N, E) or, without offsets, of sequences of one length (B, T, E).

        With a cache and no offsets `x` is one token (B, K, E) per hypothesis. With an empty cache and offsets, packed
        prompts are processed in one call and fill the cache. `rotary` holds the tables of patches in a grid; with
        `memory` they apply to its keys only, since the queries then have no position.
        """
        lengths = self._text_lengths(offsets, positions, is_step=cache is not None and offsets is None)
        q = self.queries(x, positions, rotary if memory is None else None, lengths)
        if isinstance(cache, CrossAttentionCache):
            # All beams of a sentence are queries of one attention call, so its keys and values are stored once.
            attn_output = attend(q.transpose(1, 2), cache.k, cache.v, score=self.score, mask=cache.mask).transpose(1, 2)
        elif cache is not None and offsets is None:
            k, v = (y.flatten(0, 1)[:, :, None] for y in self.keys_values(x, positions, None, lengths))
            k, v = cache.append(k, v)
            queries = q.flatten(0, 1)[:, :, None]  # a batch of B·K sequences with one query each
            mask = cache.step_mask(self.sliding_window)
            score, score_bias = self.add_positions(bias)
            attn_output = attend(queries, k, v, score=score, mask=mask, bias=score_bias).view(q.shape)
        else:
            k, v = self.keys_values(*((x, positions) if memory is None else (memory, None)), rotary, lengths)
            if cache is not None and offsets is not None:
                cache.fill(k, v, offsets)
            k_offsets = offsets if memory is None else memory_offsets
            score, score_bias = self.add_positions(bias)
            if isinstance(offsets, Offsets) and not isinstance(k_offsets, Lengths):
                attn_output = attend(
                    q, k, v, score=score, mask=self.mask, bias=score_bias, q_offsets=offsets, k_offsets=k_offsets
                )
            else:
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
                mask = self._padding_mask(k_offsets)
                attn_output = attend(q, k, v, score=score, mask=mask, bias=score_bias).transpose(1, 2)
        return self.out(attn_output.flatten(-2))

    def add_positions(self, bias: Any) -> tuple[Score, Bias | None]:
        """The score and the bias of a call, from the relative positions that a model passes as `bias`."""
        return self.score, bias

    def _padding_mask(self, keys: Offsets | Lengths | None) -> Mask | None:
        """The mask of padded sequences, combined with the causal mask where there is one."""
        lengths = keys.lengths if isinstance(keys, Lengths) else None
        if lengths is None:
            return self.mask
        return padding(lengths) if self.mask is None else self.mask & padding(lengths)


class DisentangledAttention(MultiHead):
    """Multi-head attention with disentangled scores (DeBERTa).

    Keys and queries of relative positions, which are passed as `bias`, come from the projections of the tokens.

    >>> from regard.layers.positions import RelativeEmbedding
    >>> attention = DisentangledAttention(16, heads=4, kind="self")
    >>> attention(torch.randn(2, 5, 16), bias=RelativeEmbedding(16, buckets=8)()).shape
    torch.Size([2, 5, 16])
    """

    def add_positions(self, bias: RelativePositions | None) -> tuple[Score, None]:
        if bias is None:  # the content alone, with the same scale
            return ScaledDot(3.0 * self.head_width), None
        queries = self.query(bias.embeddings).unflatten(-1, (self.heads, self.head_width))
        keys = self.key_value(bias.embeddings).unflatten(-1, (2, self.kv_heads, self.head_width)).select(-3, 0)
        return Disentangled(keys.transpose(0, 1), queries.transpose(0, 1), bias.index), None
