"""Attention of one new token per hypothesis over caches of a fixed capacity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Dot, ScaledDot, attend, padding
from regard.decode.engine.static.projections import activation_dtype, make_joint_projection, make_projection
from regard.layers.multihead import MultiHead
from regard.layers.packed import Packed
from regard.models.gpt import GPT


def kernels_support(model: Any) -> bool:
    """Whether the specialized kernels can run the blocks of a model; otherwise torch code does.

    They have no norms of outputs, parallel sublayers, sliding windows, soft-capping, layers of different kinds, or
    rotation of some channels only.
    """
    if not isinstance(model, GPT):
        return True
    config = model.config
    differs = any(config.sliding_windows) or config.unrotated_layers or config.rotary_share < 1
    is_capped = config.score_cap or config.logit_cap
    has_norms = config.norm == "pre" and config.norm_kind != "rms_zero_centered" and not config.qk_norm_joint
    return has_norms and not (config.parallel or differs or is_capped)


@dataclass(frozen=True)
class StepPositions:
    """Positions of the slots; the host knows their range, so that no step waits for the device."""

    positions: Int[Tensor, "B"]
    """cache position of the last token of each slot"""
    longest: int
    """number of cache positions in use, the maximum over the slots"""
    shared: int | None
    """the position, if it is the same in all slots"""
    in_use: Sequence[bool] = ()
    """which slots have a sentence"""


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

    def __init__(self, attention: MultiHead) -> None:
        self.attention = attention
        self.heads, self.kv_heads, self.head_width = attention.heads, attention.kv_heads, attention.head_width
        self.is_dot = type(attention.score) in (Dot, ScaledDot)
        score = attention.score
        self.scale = score.scale(attention.head_width) if isinstance(score, ScaledDot) else 1.0
        self.transforms_queries = attention.rotary is not None or not isinstance(attention.query_norm, nn.Identity)
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
        out = torch.bmm(scores.softmax(-1), v)
        if K > 1:
            out = out.view(B, G, H // G, K, D).permute(0, 3, 1, 2, 4)
        return self.out(out.reshape(B * K, H * D))


class CachedAttention(_HeadAttention):
    """Masked self-attention of one layer over a cache (2, B, G, S, K, D): keys and values of G heads, S positions and
    K columns per slot.
    """

    def __init__(
        self,
        attention: MultiHead,
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
        self.distance_bias = distance_bias

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
        attention = self.attention
        q = attention.normalize(q, attention.query_norm)
        k = attention.normalize(kv.select(-3, 0), attention.key_norm)
        if attention.rotary is not None:
            q, k = (attention.rotary(x, positions, positions + 1) for x in (q, k))
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
            columns = self.cache.shape[4]
            distance = mask.at.positions[:, None] - torch.arange(mask.at.longest, device=scores.device)
            bias = self.distance_bias[:, distance.clamp(min=0)].transpose(0, 1)[:, :, None]  # (B, H, 1, S)
            scores += bias.repeat_interleave(columns, dim=-1)
        if mask.bias is not None:
            scores += mask.bias
        if self._hides_keys(mask.at.longest):
            positions = torch.arange(mask.at.longest, device=scores.device)
            is_hidden = positions <= mask.at.positions[:, None] - self.attention.sliding_window
            is_hidden = is_hidden.repeat_interleave(self.cache.shape[4], dim=-1)
            scores.masked_fill_(is_hidden[:, None, None], -torch.inf)
        return scores

    def _hides_keys(self, keys: int) -> bool:
        """Whether some of the keys are before the sliding window."""
        return 0 < self.attention.sliding_window < keys

    def _attend_gathered(self, q: Float[Tensor, "B K H D"], mask: TreeMask) -> Float[Tensor, "R E"]:
        """Any score: the keys and values of each hypothesis are gathered from the columns of its ancestors."""
        B, K, H, D = q.shape
        S = mask.at.longest
        cache = self.cache[:, :, :, :S]
        if mask.ancestors is not None:
            columns = mask.ancestors[..., :S].long().mT[None, :, None, :, :, None]
            cache = cache.gather(4, columns.expand(cache.shape))
        k, v = cache.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
        lengths = (mask.at.positions + 1).repeat_interleave(K)
        allowed = None if mask.at.shared is not None else padding(lengths)
        if self._hides_keys(S):
            allowed = padding(lengths) & ~padding(lengths - self.attention.sliding_window)
        out = attend(q.reshape(B * K, H, 1, D), k, v, score=self.attention.score, mask=allowed)
        return self.out(out.view(B * K, H * D))

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
        self, attention: MultiHead, slots: int, capacity: int, allocate: Callable[..., Tensor] = torch.zeros
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
        for cache, new in zip(self.cache, self.attention.keys_values(memory, None)):
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
        if self.transforms_queries:
            q = self.attention.query_norm(q)
        k, v = self.cache[:, :, :, :longest]
        if not self.is_dot:
            mask = None if bias is None else padding(lengths)
            out = attend(q.transpose(1, 2), k, v, score=self.attention.score, mask=mask).transpose(1, 2)
            return self.out(out.reshape(B * K, -1))
        k, v = (y.reshape(B * self.kv_heads, longest, self.head_width) for y in (k, v))
        return self.attend_flat(q, k, v, None if bias is None else lambda scores: scores.add_(bias))

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        self.cache = self.cache[:, slots]
