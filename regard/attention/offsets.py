"""Boundaries of sequences: offsets of packed sequences (`cu_seqlens`), lengths of padded ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import RegardError

T = TypeVar("T")


def outside_inference_mode(compute: Callable[[], T]) -> T:
    """Compute tensors for a cache: even if first needed in inference mode, autograd can use them later.

    >>> with torch.inference_mode():
    ...     outside_inference_mode(lambda: torch.ones(2) + 1).is_inference()
    False
    """
    if torch.compiler.is_compiling():  # which cannot leave a mode, and caches nothing
        return compute()
    with torch.inference_mode(False):
        return compute()


@dataclass(frozen=True, eq=False)
class Lengths:
    """The sequences of a padded (B, T) batch: the number of valid tokens in each row; None: all T."""

    lengths: Int[Tensor, "B"] | None = None


@dataclass(frozen=True, eq=False)
class Offsets:
    """The offsets of B packed sequences (`cu_seqlens`) in N rows: sequence b is rows starts[b] to starts[b + 1].

    `total` is N, the last offset, and `max_len` an upper bound of the lengths: Python integers, so that reading them
    does not synchronize with a GPU. Index maps between packed rows and the padded (B, max_len) batch are cached.

    >>> Offsets(torch.tensor([0, 2, 5], dtype=torch.int32), total=5, max_len=3).lengths
    tensor([2, 3], dtype=torch.int32)
    """

    starts: Int[Tensor, "B1"]
    total: int
    max_len: int

    @staticmethod
    def from_starts(offsets: "Tensor | Offsets") -> "Offsets":
        """From a tensor of offsets, whose last element and longest sequence are read: on a GPU, this synchronizes."""
        if isinstance(offsets, Offsets):
            return offsets
        if offsets.is_meta:
            raise RegardError(
                "Offsets on the meta device have no values to read.", "Pass Offsets(starts, total, max_len) instead."
            )
        max_len = int((offsets[1:] - offsets[:-1]).max()) if len(offsets) > 1 else 0
        return Offsets(offsets, int(offsets[-1]), max_len)

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        return self.starts[1:] - self.starts[:-1]

    @property
    def is_rectangular(self) -> bool:
        """Whether all sequences have length `max_len`: the rows are a (B, max_len) batch without padding.

        >>> offsets = Offsets(torch.tensor([0, 3, 6], dtype=torch.int32), total=6, max_len=3)
        >>> offsets.is_rectangular
        True
        """
        return self.total == (len(self.starts) - 1) * self.max_len

    @cached_property
    def valid(self) -> Bool[Tensor, "B M"]:
        """True for cells of the padded (B, max_len) batch that hold a row, False for padding."""
        return outside_inference_mode(
            lambda: torch.arange(self.max_len, device=self.starts.device) < self.lengths[:, None]
        )

    @cached_property
    def rows(self) -> Int[Tensor, "B M"]:
        """The index of the packed row of each cell of the padded batch; arbitrary for padding."""

        def compute() -> Tensor:
            cells = self.starts[:-1, None].long() + torch.arange(self.max_len, device=self.starts.device)
            return cells.clamp(max=max(self.total - 1, 0))

        return outside_inference_mode(compute)

    @cached_property
    def cells(self) -> Int[Tensor, "N"]:
        """The index of the cell of each packed row in the flattened (B * max_len) batch."""
        return outside_inference_mode(lambda: self.sequences * self.max_len + self.positions)

    @cached_property
    def layouts(self) -> dict["Offsets", Any]:
        """Cache of `backends.padded`: by offsets of the keys, the layout of padded batches for these queries."""
        return {}

    @property
    def sequences(self) -> Int[Tensor, "N"]:
        """The index of the sequence of each packed row."""
        row = torch.arange(self.total, device=self.starts.device)
        return torch.searchsorted(self.starts[1:].long(), row, right=True)

    @property
    def positions(self) -> Int[Tensor, "N"]:
        """The position of each packed row in its sequence."""
        return torch.arange(self.total, device=self.starts.device) - self.starts[self.sequences]
