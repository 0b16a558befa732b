"""Many sequences of ids in one array."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class Sequences:
    """A corpus of encoded sentences: sentence i is ids[starts[i]:starts[i + 1]].

    >>> corpus = Sequences.of([[5, 6], [], [7]])
    >>> len(corpus), corpus.lengths.tolist(), corpus[0].tolist()
    (3, [2, 0, 1], [5, 6])
    """

    ids: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "borders"]

    @staticmethod
    def of(sentences: Iterable[list[int]]) -> "Sequences":
        rows = [np.asarray(sentence, np.int32) for sentence in sentences]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return Sequences(np.concatenate([*rows, np.zeros(0, np.int32)]), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Int[np.ndarray, "n"]:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        return np.diff(self.starts)

    def framed(self, begin: int | None = None, end: int | None = None) -> "Sequences":
        """With an id before and after every sentence.

        >>> Sequences.of([[5, 6], []]).framed(begin=2, end=3).ids.tolist()
        [2, 5, 6, 3, 2, 3]
        """
        added = (begin is not None) + (end is not None)
        starts = self.starts + added * np.arange(len(self.starts))
        ids, inner = np.empty(starts[-1], self.ids.dtype), np.ones(starts[-1], bool)
        for place, value in ((starts[:-1], begin), (starts[1:] - 1, end)):
            if value is not None:
                ids[place], inner[place] = value, False
        ids[inner] = self.ids
        return Sequences(ids, starts)

    def draw(self, generator: np.random.Generator) -> "Sequences":
        """The encoding of this epoch: the same in every one. (BpeDropout's differs.)"""
        return self


def gather(ids: Int[np.ndarray, "N"], starts: Int[np.ndarray, "K"], lengths: Int[np.ndarray, "K"]) -> np.ndarray:
    """The slices ids[starts[k] : starts[k] + lengths[k]] laid end to end.

    >>> gather(np.arange(10), np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    shift = np.repeat(starts - (ends - lengths), lengths)
    return ids[shift + np.arange(len(shift))]
