"""Encoded sequences of different lengths, stored in one array, in memory or memory-mapped."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from jaxtyping import Int

from regard.errors import RegardError

STARTS_DTYPE = np.dtype("<i8")
# Lengths are computed in blocks of this many sequences, so that no 8-byte copy of all starts is made.
_BLOCK = 1 << 20


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


class MappedTokens:
    """The concatenation of raw files of token ids, memory-mapped; slices are arrays of int32.

    An id that is not below `vocab` is an error: a file is corrupt.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, ids in (("a", [5, 6, 7]), ("b", [8, 9])):
    ...         np.array(ids, "<u2").tofile(f"{folder}/{name}")
    ...     tokens = MappedTokens([f"{folder}/a", f"{folder}/b"], "<u2", vocab=10)
    ...     print(len(tokens), tokens[2:5])
    5 [7 8 9]
    """

    def __init__(self, files: Sequence[str | Path], dtype: str, vocab: int) -> None:
        self.files, self.dtype, self.vocab = tuple(map(str, files)), dtype, vocab
        self._arrays = [_map_file(file, np.dtype(dtype)) for file in self.files]
        self._bounds = list(accumulate(map(len, self._arrays), initial=0))

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, window: slice) -> Int[np.ndarray, "n"]:
        start, stop, _ = window.indices(len(self))
        return self._concatenate(self._slices(start, stop))

    def gather(self, starts: Int[np.ndarray, "K"], lengths: Int[np.ndarray, "K"]) -> Int[np.ndarray, "n"]:
        """Concatenate the slices [starts[k] : starts[k] + lengths[k]]."""
        windows = zip(starts.tolist(), lengths.tolist())
        return self._concatenate([part for start, length in windows for part in self._slices(start, start + length)])

    def _slices(self, start: int, stop: int) -> list[np.ndarray]:
        """The slice as arrays, one for each file that it overlaps."""
        index, parts = bisect_right(self._bounds, start) - 1, []
        while start < stop:
            begin = self._bounds[index]
            parts.append(self._arrays[index][start - begin : stop - begin])
            index, start = index + 1, self._bounds[index + 1]
        return parts

    def _concatenate(self, parts: list[np.ndarray]) -> Int[np.ndarray, "n"]:
        ids = np.concatenate(parts, dtype=np.int32, casting="unsafe") if parts else np.zeros(0, np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab:
            raise RegardError(
                f"{self.files[0]} or a file next to it is corrupt: it has a token id outside the vocabulary of "
                f"{self.vocab} tokens.",
                f"Find the file with: regard prepare --check {quote(str(Path(self.files[0]).parent))}",
            )
        return ids

    def __reduce__(self) -> Any:
        return MappedTokens, (self.files, self.dtype, self.vocab)


class MappedSequences(Sequences):
    """Sequences whose ids and starts are memory-mapped files; `rows` selects some of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.array([5, 6, 7], "<u2").tofile(f"{folder}/ids")
    ...     np.array([0, 2, 3], "<i8").tofile(f"{folder}/starts")
    ...     corpus = MappedSequences(MappedTokens([f"{folder}/ids"], "<u2", vocab=10), f"{folder}/starts")
    ...     print(corpus.lengths, corpus.take([1, 0]).ids, corpus.select(np.array([1])).take([0]).ids)
    [2 1] [7 5 6] [7]
    """

    starts_file: str
    rows: Int[np.ndarray, "M"] | None

    def __init__(self, ids: MappedTokens, starts_file: str | Path, rows: Int[np.ndarray, "M"] | None = None) -> None:
        self.__dict__.update(
            ids=ids, starts=_map_file(starts_file, STARTS_DTYPE), starts_file=str(starts_file), rows=rows
        )

    def select(self, rows: Int[np.ndarray, "M"]) -> "MappedSequences":
        """The sequences at the given indices, in this order, without copying them."""
        return MappedSequences(self.ids, self.starts_file, rows)

    def __len__(self) -> int:
        return len(self.starts) - 1 if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Int[np.ndarray, "n"]:
        return super().__getitem__(index if self.rows is None else int(self.rows[index]))

    def has_valid_starts(self) -> bool:
        """Whether the starts never decrease, and all lengths are below 2³¹."""
        for first in range(0, len(self.starts), _BLOCK):
            # Compared, since a difference can overflow.
            begins, ends = self.starts[first : first + _BLOCK], self.starts[first + 1 : first + _BLOCK + 1]
            begins = begins[: len(ends)]
            if (begins > ends).any() or (ends - begins).max(initial=0) > np.iinfo(np.int32).max:
                return False
        return True

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        lengths = np.empty(len(self.starts) - 1, np.int32)
        for first in range(0, len(lengths), _BLOCK):
            lengths[first : first + _BLOCK] = np.diff(self.starts[first : first + _BLOCK + 1])
        return lengths if self.rows is None else lengths[self.rows]

    def take(self, rows: Sequence[int]) -> Sequences:
        return super().take(rows if self.rows is None else self.rows[rows].tolist())

    def __reduce__(self) -> Any:
        return MappedSequences, (self.ids, self.starts_file, self.rows)


def _map_file(file: str | Path, dtype: np.dtype) -> np.ndarray:
    """The content of a file as an array; an empty file cannot be memory-mapped."""
    if Path(file).stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.memmap(file, dtype, "r")
