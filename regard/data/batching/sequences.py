"""Encoded sequences of different lengths, stored in one array."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class Sequences:
    """A corpus of encoded sentences: sentence i is ids[starts[i]:starts[i + 1]].

    >>> corpus = Sequences.from_lists([[5, 6], [], [7]])
    >>> len(corpus), corpus.lengths.tolist(), corpus[0].tolist()
    (3, [2, 0, 1], [5, 6])
    """

    ids: Any
    """array of ids, or MappedTokens"""
    starts: Int[np.ndarray, "borders"]

    @staticmethod
    def from_lists(sentences: Iterable[list[int]]) -> "Sequences":
        rows = [np.asarray(sentence, np.int32) for sentence in sentences]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return Sequences(np.concatenate([*rows, np.zeros(0, np.int32)]), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Int[np.ndarray, "n"]:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[Int[np.ndarray, "n"]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        return np.diff(self.starts)

    def take(self, rows: Sequence[int]) -> "Sequences":
        """The sentences at the given indices.

        >>> Sequences.from_lists([[5, 6], [], [7]]).take([2, 0]).ids.tolist()
        [7, 5, 6]
        """
        starts = self.starts[rows]
        lengths = self.starts[np.asarray(rows, np.int64) + 1] - starts
        borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Sequences(gather_slices(self.ids, starts, lengths), borders)

    def add_special_tokens(
        self, begin: int | Int[np.ndarray, "B"] | None = None, end: int | None = None
    ) -> "Sequences":
        """Add one id before and one id after every sentence; None adds nothing, an array has one id per sentence.

        >>> Sequences.from_lists([[5, 6], []]).add_special_tokens(begin=2, end=3).ids.tolist()
        [2, 5, 6, 3, 2, 3]
        """
        added = (begin is not None) + (end is not None)
        starts = self.starts + added * np.arange(len(self.starts))
        ids, is_text = np.empty(starts[-1], self.ids.dtype), np.ones(starts[-1], bool)
        for positions, token in ((starts[:-1], begin), (starts[1:] - 1, end)):
            if token is not None:
                ids[positions], is_text[positions] = token, False
        ids[is_text] = self.ids
        return Sequences(ids, starts)

    def sample_encoding(self, generator: np.random.Generator) -> "Sequences":
        """The encoding for one epoch. It is the same in every epoch, unlike that of BpeDropout."""
        return self


def gather_slices(ids: Any, starts: Int[np.ndarray, "K"], lengths: Int[np.ndarray, "K"]) -> np.ndarray:
    """Concatenate the slices ids[starts[k] : starts[k] + lengths[k]] of an array or of memory-mapped files.

    >>> gather_slices(np.arange(10), np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    if not isinstance(ids, np.ndarray):
        return ids.gather(starts, lengths)
    ends = np.cumsum(lengths)
    shift = np.repeat(starts - (ends - lengths), lengths)
    return ids[shift + np.arange(len(shift))]
