"""Batches of sequences: packed end to end without padding, or padded."""

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
    """B sequences concatenated into one run of N token ids, with start offsets and the position of each token.

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
        """The number of sequences, including empty ones and padding sequences."""
        return len(self.offsets.starts) - 1

    @property
    def max_len(self) -> int:
        """Upper bound on the length of any sequence."""
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
        """The same batch in pinned memory, for asynchronous copies to a GPU."""
        starts = self.offsets.starts.pin_memory()
        offsets = Offsets(starts, self.offsets.total, self.offsets.max_len)
        return Packed(self.ids.pin_memory(), offsets, self.positions.pin_memory())

    def padded(self, fill: int = 0) -> tuple[Int[Tensor, "B M"], Int[Tensor, "B"]]:
        """The ids as a (B, max_len) tensor, padded on the right with `fill`, and the lengths."""
        lengths = self.offsets.lengths.long()
        if self.offsets.total == 0:
            return self.ids.new_full((len(self), self.max_len), fill), lengths
        return self.ids[self.offsets.rows].masked_fill(~self.offsets.valid, fill), lengths


@dataclass(frozen=True, eq=False)
class Padded:
    """B sequences padded to one length: replaces `Packed` as input of a model during export.

    Tokens at or beyond a row's length are padding and masked in attention.

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
    """Concatenate sequences of ids into a packed batch.

    `total` pads the batch to that many tokens: padding sequences of `fill`, none longer than `max_len`, follow the real
    ones. `count` pads the number of sequences with empty ones. `max_len` is the bound on lengths that the batch
    declares; by default the length of the longest sequence.

    >>> batch = pack([[5, 6, 7], [8]], total=8, count=5)
    >>> batch.ids, batch.offsets.lengths
    (tensor([5, 6, 7, 8, 0, 0, 0, 0]), tensor([3, 1, 3, 1, 0], dtype=torch.int32))
    """
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    real, longest = int(lengths.sum()), int(lengths.max(initial=0))
    padding = 0 if total is None else total - real
    if max_len is None:
        max_len = longest or padding
    if longest > max_len:
        raise ValueError(f"a sequence has {longest} tokens; max_len is {max_len}")
    if padding < 0:
        raise ValueError(f"the sequences have {real} tokens; total is {total}")
    if padding:
        full, rest = divmod(padding, max_len)
        lengths = np.concatenate([lengths, np.full(full, max_len), np.full(int(rest > 0), rest)])
    if count is not None:
        if len(lengths) > count:
            raise ValueError(f"{len(lengths)} sequences including padding; count is {count}")
        lengths = np.pad(lengths, (0, count - len(lengths)))

    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    ids = np.full(real + padding, fill, np.int64)
    if real and isinstance(sequences[0], np.ndarray):
        np.concatenate(sequences, out=ids[:real])
    elif real:
        ids[:real] = np.fromiter(chain.from_iterable(sequences), np.int64, real)
    positions = np.arange(real + padding) - np.repeat(starts[:-1], lengths)
    offsets = Offsets(torch.from_numpy(starts.astype(np.int32)), real + padding, max_len)
    return Packed(torch.from_numpy(ids), offsets, torch.from_numpy(positions))
