"""What decoding keeps of the tokens already seen."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention import padding
from regard.attention.offsets import Offsets


class GrowingCache:
    """Keys and values of the target so far, one row for each of the R = B·K hypotheses; room doubles when it is full.

    >>> cache = GrowingCache()
    >>> k, v = cache.append(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    >>> k.shape
    torch.Size([2, 4, 1, 8])
    """

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(
        self, k: Float[Tensor, "R H 1 D"], v: Float[Tensor, "R H 1 D"]
    ) -> tuple[Float[Tensor, "R H S D"], Float[Tensor, "R H S D"]]:
        if self._k is None or self._v is None:
            room = (*k.shape[:2], 16, k.shape[-1])
            self._k, self._v = k.new_zeros(room), v.new_zeros(room)
        elif self.length == self._k.shape[2]:
            self._k = torch.cat((self._k, torch.zeros_like(self._k)), dim=2)
            self._v = torch.cat((self._v, torch.zeros_like(self._v)), dim=2)
        self._k[:, :, self.length : self.length + 1] = k
        self._v[:, :, self.length : self.length + 1] = v
        self.length += 1
        return self._k[:, :, : self.length], self._v[:, :, : self.length]

    def reorder(self, rows: Int[Tensor, "R2"]) -> "GrowingCache":
        """The hypotheses named by `rows`, as a cache of its own."""
        chosen = GrowingCache()
        if self._k is not None and self._v is not None:
            chosen.length = self.length
            chosen._k, chosen._v = self._k[rows], self._v[rows]
        return chosen


class MemoryCache:
    """Keys and values of the source: once per sentence, however many hypotheses look at them."""

    def __init__(
        self,
        k: Float[Tensor, "B H S D"],
        v: Float[Tensor, "B H S D"],
        lengths: Int[Tensor, "B"],
        even: bool,
    ) -> None:
        self.k, self.v, self.lengths, self.even = k, v, lengths, even
        # Sentences of one length need no mask, and the kernels are faster without.
        self.mask = None if even else padding(lengths)

    @staticmethod
    def of(k: Float[Tensor, "N H D"], v: Float[Tensor, "N H D"], offsets: Offsets) -> "MemoryCache":
        even = offsets.total == offsets.max_len * (len(offsets.starts) - 1)
        return MemoryCache(
            k[offsets.rows].transpose(1, 2).contiguous(),
            v[offsets.rows].transpose(1, 2).contiguous(),
            offsets.lengths,
            even,
        )

    def reorder(self, sentences: Int[Tensor, "B2"]) -> "MemoryCache":
        return MemoryCache(self.k[sentences], self.v[sentences], self.lengths[sentences], self.even)
