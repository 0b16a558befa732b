"""A batch of sequences as one flat run of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.attention.offsets import Lengths, Offsets


@dataclass(frozen=True, eq=False)
class Packed:
    """B sequences of tokens laid end to end: N ids, where each sequence begins, and each token's place in its own.

    >>> batch = pack([[5, 6, 7], [8, 9]])
    >>> batch.ids, batch.positions
    (tensor([5, 6, 7, 8, 9]), tensor([0, 1, 2, 0, 1]))
    >>> batch.padded()
    (tensor([[5, 6, 7],
            [8, 9, 0]]), tensor([3, 2]))
    """

    ids: Int[Tensor, "N"]
    offsets: Offsets
    positions: Int[Tensor, "N"]

    def __len__(self) -> int:
        """The number of sequences, empty ones and the tail's included."""
        return len(self.offsets.starts) - 1

    @property
    def max_len(self) -> int:
        """A bound on every sequence's length."""
        return self.offsets.max_len

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Packed":
        """The same batch on another device."""
        return Packed(
            self.ids.to(device, non_blocking=non_blocking),
            Offsets(
                self.offsets.starts.to(device, non_blocking=non_blocking), self.offsets.total, self.offsets.max_len
            ),
            self.positions.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Packed":
        """The same batch in page-locked memory, from where a GPU can fetch it while the CPU goes on."""
        starts = self.offsets.starts.pin_memory()
        offsets = Offsets(starts, self.offsets.total, self.offsets.max_len)
        return Packed(self.ids.pin_memory(), offsets, self.positions.pin_memory())

    def padded(self, fill: int = 0) -> tuple[Int[Tensor, "B M"], Int[Tensor, "B"]]:
        """As a rectangle with `fill` after each sequence's end, and the lengths."""
        lengths = self.offsets.lengths.long()
        if self.offsets.total == 0:
            return self.ids.new_full((len(self), self.max_len), fill), lengths
        return self.ids[self.offsets.rows].masked_fill(~self.offsets.valid, fill), lengths


@dataclass(frozen=True, eq=False)
class Padded:
    """B sequences of tokens as a rectangle: what models take in place of `Packed` while they are exported.

    Tokens at or beyond a row's length are padding: no attention reaches them.

    >>> Padded(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2])).positions
    tensor([[0, 1, 2],
            [0, 1, 2]])
    """

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"] | None = None

    @property
    def offsets(self) -> Lengths:
        return Lengths(self.lengths)

    @property
    def positions(self) -> Int[Tensor, "B T"]:
        return torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)

    @property
    def max_len(self) -> int | torch.SymInt:
        return self.ids.shape[1]


Tokens = Packed | Padded


def pack(
    sequences: Sequence[Sequence[int]] | Sequence[np.ndarray],
    *,
    total: int | None = None,
    count: int | None = None,
    max_len: int | None = None,
    fill: int = 0,
) -> Packed:
    """Lay sequences of ids end to end.

    With `total` the run is brought to that many tokens: what is missing comes after the real sequences as sequences of
    `fill`, each no longer than `max_len`. With `count` the number of sequences is brought to `count` with empty ones.
    `max_len` is the bound that the batch states; without it, the longest sequence.

    >>> batch = pack([[5, 6, 7], [8]], total=8, count=5)
    >>> batch.ids, batch.offsets.lengths
    (tensor([5, 6, 7, 8, 0, 0, 0, 0]), tensor([3, 1, 3, 1, 0], dtype=torch.int32))
    """
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    real, longest = int(lengths.sum()), int(lengths.max(initial=0))
    tail = 0 if total is None else total - real
    if max_len is None:
        max_len = longest or tail
    if longest > max_len:
        raise ValueError(f"a sequence of {longest} tokens is longer than max_len = {max_len}")
    if tail < 0:
        raise ValueError(f"{real} tokens do not fit into total = {total}")
    if tail:
        whole, rest = divmod(tail, max_len)
        lengths = np.concatenate([lengths, np.full(whole, max_len), np.full(int(rest > 0), rest)])
    if count is not None:
        if len(lengths) > count:
            raise ValueError(f"{len(lengths)} sequences, the tail's included, do not fit into count = {count}")
        lengths = np.pad(lengths, (0, count - len(lengths)))

    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    ids = np.full(real + tail, fill, np.int64)
    if real and isinstance(sequences[0], np.ndarray):
        np.concatenate(sequences, out=ids[:real])
    elif real:
        ids[:real] = np.fromiter(chain.from_iterable(sequences), np.int64, real)
    positions = np.arange(real + tail) - np.repeat(starts[:-1], lengths)
    offsets = Offsets(torch.from_numpy(starts.astype(np.int32)), real + tail, max_len)
    return Packed(torch.from_numpy(ids), offsets, torch.from_numpy(positions))
