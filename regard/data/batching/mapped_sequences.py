"""Token ids in memory-mapped files: corpora larger than memory. Objects are pickled by path, not by content."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from jaxtyping import Int

from regard.data.batching.sequences import Sequences
from regard.errors import RegardError

STARTS_DTYPE = np.dtype("<i8")
# Lengths are computed in blocks of this many sequences, so that no 8-byte copy of all starts is made.
_BLOCK = 1 << 20


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
