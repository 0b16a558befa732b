"""Key/value caches for incremental decoding: `update` adds new keys and values, and returns all of them with a mask."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention import Mask, padding
from regard.attention.masks import MaskParts
from regard.attention.offsets import Lengths, Offsets


class Cached(NamedTuple):
    """Keys and values that queries attend to, and their mask; packed ones are (N, H, D)."""

    k: Float[Tensor, "R S H D"]
    v: Float[Tensor, "R S H D"]
    mask: Mask | None


def mask_padding(mask: Mask | None, keys: Offsets | Lengths | None) -> Mask | None:
    """A mask that also hides the padding of padded keys."""
    lengths = keys.lengths if isinstance(keys, Lengths) else None
    if lengths is None:
        return mask
    return padding(lengths) if mask is None else mask & padding(lengths)


class KVCache:
    """Self-attention keys and values of the tokens so far, one row for each of the R = B·K hypotheses.

    An update adds one token per hypothesis, with keys (B, K, H, D). If the cache is made with the offsets of prompts,
    the first update has all their tokens instead, and rows may differ in length. `mask` is that of the attention:
    causal, or a sliding window. The capacity doubles when the cache is full.

    >>> cache = KVCache()
    >>> cache.update(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)).k.shape
    torch.Size([2, 1, 4, 8])
    """

    def __init__(self, mask: Mask | None = None, prompts: Offsets | Lengths | None = None) -> None:
        self.mask, self.prompts = mask, prompts
        self.length = 0  # length of the longest row
        self._lengths: Tensor | None = None  # length of each row, if they differ
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def update(self, k: Float[Tensor, "*n H D"], v: Float[Tensor, "*n H D"]) -> Cached:
        """Add keys and values; returns those of all tokens, and the mask of the new queries."""
        if self.prompts is not None:
            prompts, self.prompts = self.prompts, None
            self._fill(k, v, prompts)
            return Cached(k, v, mask_padding(self.mask, prompts))
        self._append(*(y.flatten(0, 1)[:, :, None] for y in (k, v)))
        assert self._k is not None
        assert self._v is not None
        k, v = (y[:, :, : self.length].transpose(1, 2) for y in (self._k, self._v))
        return Cached(k, v, self._step_mask())

    def _step_mask(self) -> Mask | None:
        """The mask of the newest token, which hides the unused end of shorter rows and keys before its window.

        Nothing else is hidden: all keys are earlier.
        """
        window = MaskParts.from_mask(self.mask).window
        if self._lengths is None:
            return self.mask if window else None
        mask = padding(self._lengths)
        return mask & ~padding(self._lengths - window) if window else mask

    def _fill(self, k: Float[Tensor, "*n H D"], v: Float[Tensor, "*n H D"], prompts: Offsets | Lengths) -> None:
        """Store packed sequences, one per row."""
        assert isinstance(prompts, Offsets)
        self._k, self._v = (y[prompts.rows].transpose(1, 2).contiguous() for y in (k, v))
        self.length = prompts.max_len
        self._lengths = None if prompts.is_rectangular else prompts.lengths.long()

    def _append(self, k: Float[Tensor, "R H 1 D"], v: Float[Tensor, "R H 1 D"]) -> None:
        if self._k is None or self._v is None:
            shape = (*k.shape[:2], 16, k.shape[-1])
            self._k, self._v = k.new_zeros(shape), v.new_zeros(shape)
        elif self.length == self._k.shape[2]:
            self._k = torch.cat((self._k, torch.zeros_like(self._k)), dim=2)
            self._v = torch.cat((self._v, torch.zeros_like(self._v)), dim=2)
        if self._lengths is None:
            self._k[:, :, self.length : self.length + 1] = k
            self._v[:, :, self.length : self.length + 1] = v
        else:
            rows = torch.arange(len(k), device=k.device)
            self._k[rows, :, self._lengths] = k[:, :, 0]
            self._v[rows, :, self._lengths] = v[:, :, 0]
            self._lengths = self._lengths + 1
        self.length += 1

    def reorder(self, rows: Int[Tensor, "R2"]) -> "KVCache":
        """A new cache with the hypotheses at the indices `rows`."""
        selected = KVCache(self.mask, self.prompts)
        if self._k is not None and self._v is not None:
            selected.length = self.length
            selected._k, selected._v = self._k[rows], self._v[rows]
            if self._lengths is not None:
                selected._lengths = self._lengths[rows]
                selected.length = int(selected._lengths.max())  # the longest row may be gone
        return selected


class FunctionalKVCache(KVCache):
    """`KVCache` without in-place writes, for export: it concatenates tensors.

    Rows have one length or, with `lengths`, several; positions at or beyond a row's length are unused.

    >>> cache = FunctionalKVCache(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8))
    >>> cache.update(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8)).k.shape
    torch.Size([2, 4, 4, 8])
    """

    def __init__(
        self,
        k: Float[Tensor, "R H S D"] | None = None,
        v: Float[Tensor, "R H S D"] | None = None,
        lengths: Int[Tensor, "R"] | None = None,
        mask: Mask | None = None,
        prompts: Lengths | None = None,
    ) -> None:
        super().__init__(mask, prompts)
        self._k, self._v, self._lengths = k, v, lengths
        self.length = 0 if k is None else k.shape[2]

    @property
    def tensors(self) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S D"]]:
        assert self._k is not None
        assert self._v is not None
        return self._k, self._v

    def _fill(self, k: Float[Tensor, "*n H D"], v: Float[Tensor, "*n H D"], prompts: Offsets | Lengths) -> None:
        """Store padded sequences (B, S)."""
        assert isinstance(prompts, Lengths)
        self._k, self._v, self._lengths = k.transpose(1, 2), v.transpose(1, 2), prompts.lengths

    def _append(self, k: Float[Tensor, "R H 1 D"], v: Float[Tensor, "R H 1 D"]) -> None:
        self._k, self._v = (torch.cat(pair, dim=2) for pair in zip(self.tensors, (k, v)))
        if self._lengths is not None:
            is_new = torch.arange(self.length + 1, device=k.device)[:, None] == self._lengths[:, None, None, None]
            self._k, self._v = torch.where(is_new, k, self._k), torch.where(is_new, v, self._v)
            self._lengths = self._lengths + 1
        self.length += 1


class CrossAttentionCache:
    """Cross-attention keys and values of the source: stored once per sentence, shared by its hypotheses.

    Without `lengths` all sentences have the same length.
    """

    def __init__(
        self, k: Float[Tensor, "B H S D"], v: Float[Tensor, "B H S D"], lengths: Int[Tensor, "B"] | None = None
    ) -> None:
        self.k, self.v, self.lengths = k, v, lengths
        # Attention kernels are faster without a mask.
        self.mask = None if lengths is None else padding(lengths)

    def update(self, k: None = None, v: None = None) -> Cached:
        """The stored keys and values; there are no new ones."""
        return Cached(self.k.transpose(1, 2), self.v.transpose(1, 2), self.mask)

    @staticmethod
    def from_sequences(
        k: Float[Tensor, "*n H D"], v: Float[Tensor, "*n H D"], offsets: Offsets | Lengths
    ) -> "CrossAttentionCache":
        """A cache from packed or padded keys and values."""
        if isinstance(offsets, Lengths):
            return CrossAttentionCache(k.transpose(1, 2), v.transpose(1, 2), offsets.lengths)
        k, v = (x[offsets.rows].transpose(1, 2).contiguous() for x in (k, v))
        return CrossAttentionCache(k, v, None if offsets.is_rectangular else offsets.lengths)

    def reorder(self, sentences: Int[Tensor, "B2"]) -> "CrossAttentionCache":
        lengths = None if self.lengths is None else self.lengths[sentences]
        return CrossAttentionCache(self.k[sentences], self.v[sentences], lengths)
