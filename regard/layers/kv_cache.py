"""Key/value caches for incremental decoding."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention import Mask, padding, window
from regard.attention.offsets import Lengths, Offsets


class KVCache:
    """Self-attention keys and values of the tokens so far, one row for each of the R = B·K hypotheses.

    The capacity doubles when the cache is full. Rows have one length, unless `fill` gave them different ones.

    >>> cache = KVCache()
    >>> k, v = cache.append(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    >>> k.shape
    torch.Size([2, 4, 1, 8])
    """

    def __init__(self) -> None:
        self.length = 0  # length of the longest row
        self._lengths: Tensor | None = None  # length of each row, if they differ
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def step_mask(self, sliding_window: int = 0) -> Mask | None:
        """Mask of the newest query: without unused positions at the end of shorter rows, and keys before its window."""
        if self._lengths is None:
            return window(sliding_window) if sliding_window else None
        mask = padding(self._lengths)
        return mask & ~padding(self._lengths - sliding_window) if sliding_window else mask

    def fill(self, k: Float[Tensor, "*n H D"], v: Float[Tensor, "*n H D"], offsets: Offsets | Lengths) -> None:
        """Fill an empty cache with packed sequences, one per row."""
        assert isinstance(offsets, Offsets)
        self._k, self._v = (y[offsets.rows].transpose(1, 2).contiguous() for y in (k, v))
        self.length = offsets.max_len
        self._lengths = None if offsets.is_rectangular else offsets.lengths.long()

    def append(
        self, k: Float[Tensor, "R H 1 D"], v: Float[Tensor, "R H 1 D"]
    ) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S D"]]:
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
        return self._k[:, :, : self.length], self._v[:, :, : self.length]

    def reorder(self, rows: Int[Tensor, "R2"]) -> "KVCache":
        """A new cache with the hypotheses at the indices `rows`."""
        selected = KVCache()
        if self._k is not None and self._v is not None:
            selected.length = self.length
            selected._k, selected._v = self._k[rows], self._v[rows]
            if self._lengths is not None:
                selected._lengths = self._lengths[rows]
                selected.length = int(selected._lengths.max())  # the longest row may be gone
        return selected


class FunctionalKVCache(KVCache):
    """`KVCache` without in-place writes, for export: `append` concatenates tensors.

    Rows have one length or, with `lengths`, several; positions at or beyond a row's length are unused.

    >>> cache = FunctionalKVCache(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8))
    >>> cache.append(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8))[0].shape
    torch.Size([2, 4, 4, 8])
    """

    def __init__(
        self,
        k: Float[Tensor, "R H S D"] | None = None,
        v: Float[Tensor, "R H S D"] | None = None,
        lengths: Int[Tensor, "R"] | None = None,
    ) -> None:
        self._k, self._v, self._lengths = k, v, lengths
        self.length = 0 if k is None else k.shape[2]

    @property
    def tensors(self) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S D"]]:
        assert self._k is not None
        assert self._v is not None
        return self._k, self._v

    def fill(self, k: Float[Tensor, "*n H D"], v: Float[Tensor, "*n H D"], offsets: Offsets | Lengths) -> None:
        """Fill an empty cache with padded sequences (B, S)."""
        assert isinstance(offsets, Lengths)
        self._k, self._v, self._lengths = k.transpose(1, 2), v.transpose(1, 2), offsets.lengths

    def append(
        self, k: Float[Tensor, "R H 1 D"], v: Float[Tensor, "R H 1 D"]
    ) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S D"]]:
        self._k, self._v = (torch.cat(pair, dim=2) for pair in zip(self.tensors, (k, v)))
        if self._lengths is not None:
            is_new = torch.arange(self.length + 1, device=k.device)[:, None] == self._lengths[:, None, None, None]
            self._k, self._v = torch.where(is_new, k, self._k), torch.where(is_new, v, self._v)
            self._lengths = self._lengths + 1
        self.length += 1
        return self.tensors


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
