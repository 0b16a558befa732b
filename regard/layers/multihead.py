"""Multi-head attention: many projections side by side, each attends on its own, one linear map after (A5, A6)."""

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Bias, Mask, attend, causal, make_score, padding
from regard.attention.offsets import Lengths, Offsets
from regard.errors import RegardError
from regard.layers.cache import GrowingCache, MemoryCache, PlainCache
from regard.layers.norms import NormKind, make_norm
from regard.layers.positions import Rotary, Turns, turn

AttentionKind = Literal["self", "masked", "cross"]
BiasPlace = Literal["all", "attention", "qkv", "not_qkv", "feedforward", "none"]


class MultiHead(nn.Module):
    """Queries from one sequence, keys and values from the same (self, masked) or from another (cross).

    Each head is width / heads wide (or `head_width`), and the score is scaled by the root of that. `kv_heads` below
    `heads` lets several heads of queries share keys and values.

    >>> attention = MultiHead(16, heads=4, kind="self")
    >>> attention(torch.randn(5, 16), Offsets.of(torch.tensor([0, 2, 5]))).shape
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
        rotary_base: float | None = None,
        rotary_factor: float = 1.0,
        rotary_context: int = 0,
        qk_norm_eps: float | None = None,
        qk_norm_kind: NormKind = "rms",
        bias: BiasPlace = "all",
        max_keys: int = 256,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads and not head_width:
            raise RegardError(f"A width of {width} does not divide into {heads} heads.", "Change model.width or heads.")
        if heads % kv_heads:
            raise RegardError(
                f"{heads} heads cannot share {kv_heads} key/value heads evenly.", "Change model.kv_heads."
            )
        self.kind, self.heads, self.kv_heads, self.head_width = kind, heads, kv_heads, head_width or width // heads
        into, out = bias in ("all", "attention", "qkv"), bias in ("all", "attention", "not_qkv")
        self.query = nn.Linear(width, heads * self.head_width, bias=into)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_width, bias=into)
        self.out = nn.Linear(heads * self.head_width, width, bias=out)
        self.score = make_score(
            score, self.head_width, self.head_width, hidden=self.head_width, max_keys=max_keys, heads=heads
        )
        self.rotary = None
        if rotary_base:
            self.rotary = Rotary(self.head_width, rotary_base, rotary_factor, rotary_context)
        self.query_norm, self.key_norm = (
            make_norm(qk_norm_kind, self.head_width, qk_norm_eps) if qk_norm_eps else nn.Identity() for _ in range(2)
        )
        self.mask = causal() if kind == "masked" else None

    def queries(
        self, x: Float[Tensor, "*n E"], positions: Int[Tensor, "*n"] | None, turns: Turns | None = None
    ) -> Float[Tensor, "*n H D"]:
        q = self.query_norm(self.query(x).unflatten(-1, (self.heads, self.head_width)))
        return self._turned(q, positions, turns)

    def keys_values(
        self, x: Float[Tensor, "*n E"], positions: Int[Tensor, "*n"] | None, turns: Turns | None = None
    ) -> tuple[Float[Tensor, "*n G D"], Float[Tensor, "*n G D"]]:
        k, v = self.key_value(x).unflatten(-1, (2, self.kv_heads, self.head_width)).unbind(-3)
        return self._turned(self.key_norm(k), positions, turns), v

    def _turned(self, x: Tensor, positions: Tensor | None, turns: Turns | None) -> Tensor:
        if turns is not None:
            return turn(x, *turns)
        return self.rotary(x, positions) if self.rotary is not None else x

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        offsets: Offsets | Lengths | None = None,
        *,
        positions: Int[Tensor, "*n"] | None = None,
        memory: Float[Tensor, "*m E"] | None = None,
        memory_offsets: Offsets | Lengths | None = None,
        cache: GrowingCache | MemoryCache | None = None,
        bias: Bias | None = None,
        turns: Turns | None = None,
    ) -> Float[Tensor, "*n E"]:
        """Whole sequences, packed (N, E); or, with a cache, one token for each of the (B, K) hypotheses.

        A growing cache takes up whole sequences too, if it is new: the beginning of a text is read at once. Without
        offsets and cache the sequences are all of one length, (B, T, E). `turns` are of tokens that stand in a grid;
        queries to a memory stand nowhere, and only its keys are turned.
        """
        q = self.queries(x, positions, turns if memory is None else None)
        if isinstance(offsets, Lengths) or (cache is None and offsets is None):
            k, v = self.keys_values(*((x, positions) if memory is None else (memory, None)), turns)
            if isinstance(cache, PlainCache) and isinstance(offsets, Lengths):
                cache.fill(k, v, offsets)
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            mask = self._padding_mask(offsets if memory is None else memory_offsets)
            regarded = attend(q, k, v, score=self.score, mask=mask, bias=bias).transpose(1, 2)
        elif isinstance(cache, MemoryCache):
            # The beams of a sentence are the queries of one attention, so its keys and values exist once.
            regarded = attend(q.transpose(1, 2), cache.k, cache.v, score=self.score, mask=cache.mask).transpose(1, 2)
        elif isinstance(cache, GrowingCache) and offsets is None:
            k, v = (y.flatten(0, 1)[:, :, None] for y in self.keys_values(x, positions))
            k, v = cache.append(k, v)
            q_R = q.flatten(0, 1)[:, :, None]
            regarded = attend(q_R, k, v, score=self.score, mask=cache.mask, bias=bias).view(q.shape)
        else:
            k, v = self.keys_values(*((x, positions) if memory is None else (memory, None)), turns)
            memory_offsets = memory_offsets if memory is not None else offsets
            assert not isinstance(memory_offsets, Lengths)
            if isinstance(cache, GrowingCache) and offsets is not None:
                cache.fill(k, v, offsets)
            regarded = attend(
                q, k, v, score=self.score, mask=self.mask, bias=bias, q_offsets=offsets, k_offsets=memory_offsets
            )
        return self.out(regarded.flatten(-2))

    def _padding_mask(self, keys: Offsets | Lengths | None) -> Mask | None:
        """The mask of a rectangle whose rows may end early."""
        lengths = keys.lengths if isinstance(keys, Lengths) else None
        if lengths is None:
            return self.mask
        return padding(lengths) if self.mask is None else self.mask & padding(lengths)
