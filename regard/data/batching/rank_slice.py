"""The part of every batch that one rank of a distributed run trains on."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class RankSlice(NamedTuple):
    """Rank `rank` of `size`: the batches are the same for every `size`, and each sequence belongs to one rank.

    >>> lengths = [2, 9, 4, 4]
    >>> [RankSlice(rank, 2).select(lengths) for rank in range(2)]
    [([1], 1), ([0, 2, 3], 3)]
    """

    rank: int = 0
    size: int = 1

    def select(self, lengths: Sequence[int]) -> tuple[list[int], int]:
        """Indices of the sequences of this rank, and how many of them count in the loss.

        The longest sequence goes first to the rank with the fewest tokens, so that all ranks get about as many. A rank
        without a sequence, in a batch with fewer sequences than ranks, gets the shortest one as padding: every rank
        takes part in every update.

        >>> RankSlice(rank=2, size=3).select([7, 5])
        ([1], 0)
        """
        selected = self.select_all(lengths)[self.rank]
        return selected, len(selected) if self.rank < len(lengths) else 0

    def select_all(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each rank."""
        if self.size == 1:
            return [list(range(len(lengths)))]
        longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        loads = [(0, rank) for rank in range(self.size)]
        selected: list[list[int]] = [[] for _ in range(self.size)]
        for index in longest_first:
            tokens, rank = loads[0]
            heapq.heapreplace(loads, (tokens + max(1, lengths[index]), rank))
            selected[rank].append(index)
        return [sorted(indices) or longest_first[-1:] for indices in selected]


WHOLE = RankSlice()
