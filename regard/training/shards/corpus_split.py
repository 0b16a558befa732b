"""Duplicates and the validation split of a spooled corpus, in little memory: a byte per row."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
from jaxtyping import Bool, UInt64

from regard.training.shards.text_spool import SpoolReader

# Duplicates are searched in buckets of about this many rows, by digest; at most 256 buckets, which are files.
BUCKET_ROWS, MAX_BUCKETS = 1 << 20, 256
# Groups that are considered for validation, those with the smallest digests.
MAX_CANDIDATES = 5000
_ENTRY = np.dtype([("low", "<u8"), ("high", "<u8"), ("row", "<i8")])


def find_duplicates(spool: SpoolReader) -> Bool[np.ndarray, "rows"]:
    """Whether each row has the same text as an earlier one (by a digest of 128 bits)."""
    is_duplicate = np.zeros(spool.rows, bool)
    count = min(MAX_BUCKETS, 1 + spool.rows // BUCKET_ROWS)
    paths = [spool.folder / f"bucket-{index}" for index in range(count)]
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        for first, records in spool.records():
            entries = np.empty(len(records), _ENTRY)
            entries["low"], entries["high"] = records["low"], records["high"]
            entries["row"] = np.arange(first, first + len(records))
            buckets = entries["low"] % np.uint64(count)
            for index, file in enumerate(files):
                file.write(entries[buckets == index].tobytes())
    for path in paths:
        entries = np.fromfile(path, _ENTRY)
        path.unlink()
        entries = entries[np.lexsort((entries["row"], entries["high"], entries["low"]))]
        repeats = (entries["low"][1:] == entries["low"][:-1]) & (entries["high"][1:] == entries["high"][:-1])
        is_duplicate[entries["row"][1:][repeats]] = True
    return is_duplicate


def choose_groups(
    spool: SpoolReader, is_kept: Bool[np.ndarray, "rows"], limit: int, by_characters: bool = False
) -> UInt64[np.ndarray, "groups"]:
    """The digests of the groups for validation: of the kept rows, those with the smallest digests.

    Together they have at most `limit` rows (or characters); a group that does not fit is skipped. If none fits, the
    smallest one is chosen. Without two groups, none is.
    """
    groups, sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for first, records in spool.records():
        records = records[is_kept[first : first + len(records)]]
        weights = records["characters"].astype(np.int64) if by_characters else np.ones(len(records), np.int64)
        # Only the smallest digests are kept; one that is dropped here can never be among the smallest again.
        groups, inverse = np.unique(np.concatenate([groups, records["group"]]), return_inverse=True)
        sizes = np.bincount(inverse, np.concatenate([sizes, weights]), len(groups)).astype(np.int64)
        groups, sizes = groups[:MAX_CANDIDATES], sizes[:MAX_CANDIDATES]
    if len(groups) < 2:
        return groups[:0]
    chosen, total = [], 0
    for index, size in enumerate(sizes.tolist()):
        if total + size <= limit:
            chosen.append(index)
            total += size
    return groups[chosen or [int(sizes.argmin())]]


def rows_in_groups(spool: SpoolReader, groups: UInt64[np.ndarray, "groups"]) -> Iterator[tuple[int, np.ndarray]]:
    """For blocks of rows, the first row, and whether each row belongs to one of the groups."""
    for first, records in spool.records():
        yield first, np.isin(records["group"], groups)


def cut_at_character(spool: SpoolReader, characters: int) -> tuple[int, int]:
    """The row that contains the character with this index, and its index in the row.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.training.shards.text_spool import TextSpool
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TextSpool(Path(folder), sides=1) as writer:
    ...         writer.append(["abc"])
    ...         writer.append(["defg"])
    ...     cut_at_character(SpoolReader(Path(folder), sides=1), 5)
    (1, 2)
    """
    for first, records in spool.records():
        ends = np.cumsum(records["characters"].astype(np.int64))
        if characters < ends[-1]:
            row = int(np.searchsorted(ends, characters, side="right"))
            return first + row, int(characters - (ends[row - 1] if row else 0))
        characters -= int(ends[-1])
    raise ValueError("the corpus is shorter")
