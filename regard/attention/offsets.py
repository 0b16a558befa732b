"""Where each sequence of a packed run begins and ends."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Made = TypeVar("Made")


def to_keep(make: Callable[[], Made]) -> Made:
    """What is made here may be kept: though it is first needed in inference mode, autograd can use it afterwards.

    >>> with torch.inference_mode():
    ...     to_keep(lambda: torch.ones(2) + 1).is_inference()
    False
    """
    if torch.compiler.is_compiling():  # which does not leave a mode, and keeps nothing
        return make()
    with torch.inference_mode(False):
        return make()


@dataclass(frozen=True, eq=False)
class Lengths:
    """The sequences of a padded (B, T) rectangle: the number of valid tokens in each row; None: all T."""

    lengths: Int[Tensor, "B"] | None = None


@dataclass(frozen=True, eq=False)
class Offsets:
    """The borders of B sequences in a flat run of N rows: sequence b is rows starts[b] to starts[b + 1].

    `starts[-1]` is `total` (N) and `max_len` bounds every length: both are plain numbers, so that nobody has to wait
    for a GPU to learn them. The maps between the flat run and the padded rectangle are made once and kept.

    >>> Offsets(torch.tensor([0, 2, 5], dtype=torch.int32), total=5, max_len=3).lengths
    tensor([2, 3], dtype=torch.int32)
    """

    starts: Int[Tensor, "B1"]
    total: int
    max_len: int

    @staticmethod
    def of(offsets: "Tensor | Offsets") -> "Offsets":
        """From a plain tensor of starts; asks it for its last and its longest (on a GPU, that waits for the device)."""
        if isinstance(offsets, Offsets):
            return offsets
        longest = int((offsets[1:] - offsets[:-1]).max()) if len(offsets) > 1 else 0
        return Offsets(offsets, int(offsets[-1]), longest)

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        return self.starts[1:] - self.starts[:-1]

    @property
    def even(self) -> bool:
        """Whether all sequences are as long as they may be: as they lie, they are a rectangle (B, max_len).

        >>> Offsets(torch.tensor([0, 3, 6], dtype=torch.int32), total=6, max_len=3).even
        True
        """
        return self.total == (len(self.starts) - 1) * self.max_len

    @cached_property
    def valid(self) -> Bool[Tensor, "B M"]:
        """Which cells of the padded (B, max_len) rectangle hold a row."""
        return to_keep(lambda: torch.arange(self.max_len, device=self.starts.device) < self.lengths[:, None])

    @cached_property
    def rows(self) -> Int[Tensor, "B M"]:
        """For each cell of the padded rectangle the packed row that it holds (an empty cell: some row)."""

        def rows() -> Tensor:
            cells = self.starts[:-1, None].long() + torch.arange(self.max_len, device=self.starts.device)
            return cells.clamp(max=max(self.total - 1, 0))

        return to_keep(rows)

    @cached_property
    def cells(self) -> Int[Tensor, "N"]:
        """For each packed row its cell in the flattened (B * max_len) rectangle: the way back."""
        return to_keep(lambda: self.sequences * self.max_len + self.places)

    @cached_property
    def layouts(self) -> dict["Offsets", Any]:
        """Kept for kernels that unpack: how these queries and the keys of other offsets lie in rectangles."""
        return {}

    @property
    def sequences(self) -> Int[Tensor, "N"]:
        """For each packed row the sequence that it belongs to."""
        row = torch.arange(self.total, device=self.starts.device)
        return torch.searchsorted(self.starts[1:].long(), row, right=True)

    @property
    def places(self) -> Int[Tensor, "N"]:
        """For each packed row its place in its sequence."""
        return torch.arange(self.total, device=self.starts.device) - self.starts[self.sequences]
