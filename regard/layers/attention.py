"""Multi-head attention (Vaswani et al. 2017, section 3.2.2), with grouped key/value heads and rotary positions."""

from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Bias, Mask, ScaledDot, Score, attend
from regard.attention.masks import MaskParts
from regard.attention.offsets import Lengths, Offsets
from regard.errors import RegardError
from regard.layers.kv_cache import CrossAttentionCache, KVCache, mask_padding
from regard.layers.positions import RelativePositions, Rotary, RotaryTables, Texts, apply_rotary


class MultiHeadAttention(nn.Module):
    """Multi-head attention of a sequence over itself or, with `memory`, over another sequence.

    A head has width / heads channels, or `head_width`. With fewer `kv_heads` than `heads`, several query heads share
    one key/value head (grouped-query attention). Norms of queries and keys (QK-norm) get tensors (…, heads, channels).

    >>> attention = MultiHeadAttention(16, heads=4)
    >>> attention(torch.randn(5, 16), Offsets.from_starts(torch.tensor([0, 2, 5]))).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        score: Score | None = None,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        kv_heads: int | None = None,
        head_width: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads and not head_width:
            raise RegardError(
                f"width is {width}; it must be a multiple of heads ({heads}).", "Change model.width or model.heads."
            )
        if heads % kv_heads:
            raise RegardError(f"kv_heads is {kv_heads}; it must divide heads ({heads}).", "Change model.kv_heads.")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width or width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=qkv_bias)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_width, bias=qkv_bias)
        self.out = nn.Linear(heads * self.head_width, width, bias=out_bias)
        self.score = score if score is not None else ScaledDot()
        self.mask, self.rotary = mask, rotary
        self.query_norm, self.key_norm = query_norm, key_norm

    @property
    def kind(self) -> Literal["self", "masked", "cross"]:
        """Masked attention does not see later keys."""
        parts = MaskParts.from_mask(self.mask)
        return "masked" if parts.causal or parts.window else "self"

    @property
    def window(self) -> int:
        """The number of keys of a sliding window; 0: all."""
        return MaskParts.from_mask(self.mask).window or 0

    def queries(
        self,
        x: Float[Tensor, "*n E"],
        positions: Int[Tensor, "*n"] | None = None,
        texts: Texts = None,
        rotary: RotaryTables | None = None,
    ) -> Float[Tensor, "*n H D"]:
        """Projected, normalized and rotated queries."""
        q = self.query(x).unflatten(-1, (self.heads, self.head_width))
        return self._rotate(q if self.query_norm is None else self.query_norm(q), positions, texts, rotary)

    def keys_values(
        self,
        x: Float[Tensor, "*n E"],
        positions: Int[Tensor, "*n"] | None = None,
        texts: Texts = None,
        rotary: RotaryTables | None = None,
    ) -> tuple[Float[Tensor, "*n G D"], Float[Tensor, "*n G D"]]:
        """Projected keys, normalized and rotated, and values."""
        k, v = self.key_value(x).unflatten(-1, (2, self.kv_heads, self.head_width)).unbind(-3)
        return self._rotate(k if self.key_norm is None else self.key_norm(k), positions, texts, rotary), v

    def _rotate(self, x: Tensor, positions: Tensor | None, texts: Texts, rotary: RotaryTables | None) -> Tensor:
        if rotary is not None:
            return apply_rotary(x, *rotary)
        return x if self.rotary is None or positions is None else self.rotary(x, positions, texts)

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

        With a cache and no offsets `x` is one token (B, K, E) per hypothesis. `rotary` holds the tables of patches in a
        grid; with `memory` they apply to its keys only, since the queries then have no position.
        """
        q = self.queries(x, positions, offsets, rotary if memory is None else None)
        source = (x, positions, offsets) if memory is None else (memory, None, memory_offsets)
        # A cache of cross-attention has the keys and values already.
        new: Any = (None, None) if isinstance(cache, CrossAttentionCache) else self.keys_values(*source, rotary)
        k, v, mask = (*new, mask_padding(self.mask, source[-1])) if cache is None else cache.update(*new)
        score, score_bias = self.add_positions(bias)
        if isinstance(offsets, Offsets):
            options: Any = {"q_offsets": offsets, "k_offsets": source[-1]}
            out = attend(q, k, v, score=score, mask=mask, bias=score_bias, **options)
        else:
            is_step = isinstance(cache, KVCache) and offsets is None
            q = q.flatten(0, 1)[:, None] if is_step else q  # hypotheses are sequences of one query
            out = attend(*(y.transpose(1, 2) for y in (q, k, v)), score=score, mask=mask, bias=score_bias)
            out = out.view(*x.shape[:-1], *out.shape[1::2]) if is_step else out.transpose(1, 2)
        return self.out(out.flatten(-2))

    def add_positions(self, bias: Any) -> tuple[Score, Bias | None]:
        """The score and the bias of a call, from the relative positions that a model passes as `bias`."""
        return self.score, bias


class CrossAttention(MultiHeadAttention):
    """Multi-head attention over another sequence."""

    kind = "cross"  # type: ignore[assignment]
