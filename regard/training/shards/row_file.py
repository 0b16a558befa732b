"""Temporary storage of cleaned text on disk, between reading and encoding."""

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

TEXT, ENDS, RECORDS = "rows.text", "rows.ends", "rows.records"
# The digest of the example, in two halves; the digest of its group, whose examples stay in one split; its characters;
# and whether it starts a document.
RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("group", "<u8"), ("characters", "<u4"), ("is_first", "<u4")])
_PACKED = struct.Struct("<16s8sII")
# A block that is read at once has at most this many rows or bytes (but at least one row).
BLOCK_ROWS, BLOCK_BYTES = 4096, 4 << 20
# Records that are read at once.
RECORD_ROWS = 1 << 17


class RowWriter:
    """Writer of rows of text: pairs of source and target, or one text (`sides` = 1) per row. Adds to existing rows.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(Path(folder), sides=2) as writer:
    ...         writer.append(("A cat.", "Un chat."))
    ...     [block] = RowReader(Path(folder), sides=2).blocks()
    >>> block.texts
    [('A cat.', 'Un chat.')]
    """

    def __init__(self, folder: Path, sides: int) -> None:
        self._text, self._ends, self._records = (
            open(folder / name, "ab")  # noqa: SIM115
            for name in (TEXT, ENDS, RECORDS)
        )
        self.bytes, self.rows = self._text.tell(), self._records.tell() // RECORD.itemsize
        self._buffer, self._group = array("q"), b""

    def append(self, texts: Sequence[str], is_first: bool = True) -> None:
        """Add a row: a text, or a part of a document (`is_first`: its first part). Parts stay in one split."""
        parts = [text.encode("utf-8", "replace") for text in texts]  # JSON can contain half of a surrogate pair
        self._text.write(b"".join(parts))
        for part in parts:
            self.bytes += len(part)
            self._buffer.append(self.bytes)
        if is_first:
            self._group = hashlib.blake2b(parts[0], digest_size=8).digest()
        digest = hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
        self._records.write(_PACKED.pack(digest, self._group, sum(map(len, texts)), is_first))
        self.rows += 1
        if len(self._buffer) >= BLOCK_ROWS:
            self._flush_ends()

    def _flush_ends(self) -> None:
        self._ends.write(np.array(self._buffer, "<i8").tobytes())
        del self._buffer[:]

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush_ends()
        finally:
            for file in (self._text, self._ends, self._records):
                file.close()


class RowBlock(NamedTuple):
    """Consecutive rows."""

    first: int
    texts: list[tuple[str, ...]]
    records: np.ndarray
    bytes: int
    """size of the texts"""


class RowReader:
    """Reader of the rows of a RowWriter, a block at a time."""

    def __init__(self, folder: Path, sides: int) -> None:
        self.folder, self.sides = folder, sides
        self.rows = (folder / RECORDS).stat().st_size // RECORD.itemsize

    def records(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the records of the rows from `first` to `last` in blocks, each with its first row."""
        last = self.rows if last is None else last
        for start in range(first, last, RECORD_ROWS):
            count = min(RECORD_ROWS, last - start)
            yield start, np.fromfile(self.folder / RECORDS, RECORD, count, offset=start * RECORD.itemsize)

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[RowBlock]:
        """Yield the rows from `first` to `last`."""
        last = self.rows if last is None else last
        with open(self.folder / TEXT, "rb") as file:
            while first < last:
                ends = self.ends(first, min(last, first + BLOCK_ROWS))
                count = max(1, int(np.searchsorted(ends[1:, -1], ends[0, -1] + BLOCK_BYTES, side="right")))
                ends, begin = ends[: count + 1], int(ends[0, -1])
                file.seek(begin)
                data = file.read(int(ends[-1, -1]) - begin)
                bounds = [begin, *ends[1:].reshape(-1).tolist()]
                texts = [data[a - begin : b - begin].decode() for a, b in pairwise(bounds)]
                rows = list(zip(*(texts[side :: self.sides] for side in range(self.sides))))
                [(_, records)] = self.records(first, first + count)
                yield RowBlock(first, rows, records, len(data))
                first += count

    @property
    def bytes(self) -> int:
        """The size of all texts."""
        return (self.folder / TEXT).stat().st_size

    def ends(self, first: int, last: int) -> np.ndarray:
        """The ends of the texts of rows first to last, below those of the row before: (rows + 1, sides)."""
        before = first - 1 if first else 0
        offset = before * self.sides * 8
        ends = np.fromfile(self.folder / ENDS, "<i8", (last - before) * self.sides, offset=offset)
        ends = ends.reshape(-1, self.sides)
        return ends if first else np.concatenate([np.zeros((1, self.sides), np.int64), ends])

    def delete(self) -> None:
        """Delete the files."""
        for name in (TEXT, ENDS, RECORDS):
            (self.folder / name).unlink(missing_ok=True)
