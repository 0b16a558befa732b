"""Processing of files of any size with a model: constant memory, resumable, on several devices."""

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from logging import getLogger
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from regard.data.text.compression import STDIN, InputStream
from regard.data.text.readers import OnOpen, display_name, numbered_lines, stream_pairs
from regard.errors import Interrupted, RegardError
from regard.pipelines.block_workers import OnBatch, process_blocks
from regard.pipelines.resumable_file import AllowedChange, ResumableFile, check_output

logger = getLogger("regard")

T = TypeVar("T", str, tuple[str, str])
# A block ends after this many items or characters. It is sorted by length into batches; an interruption loses at most
# the blocks in progress.
BLOCK_ITEMS, BLOCK_CHARACTERS = 4096, 1 << 22


@dataclass
class InputItems(Generic[T]):
    """The items of an input, in order: lines, or pairs of source and target."""

    name: str
    """name in messages"""
    read: Callable[[OnOpen], Iterator[T]]
    """returns an iterator over the items, and calls its argument with each stream that it opens"""
    unit: str = "line"
    files: tuple[str | Path, ...] = ()
    streams: list[InputStream] = field(default_factory=list)
    """the streams opened so far; their positions show how much has been read"""

    @classmethod
    def from_lines(cls, file: str | Path) -> "InputItems[str]":
        """The lines of a file, plain or compressed, or of standard input ("-")."""
        file = STDIN if str(file) == STDIN else file
        return InputItems(
            display_name(file),
            lambda on_open: (line for _, line in numbered_lines(file, on_open=on_open)),
            files=(file,),
        )

    @classmethod
    def from_pairs(
        cls, files: str | Path | Sequence[str | Path], columns: Sequence[str] = ()
    ) -> "InputItems[tuple[str, str]]":
        """The pairs of two parallel files, or of TSV, CSV or JSONL files."""
        paths = (files,) if isinstance(files, str | Path) else tuple(files)
        names = [str(path) for path in paths]
        return InputItems(
            " ".join(map(display_name, paths)),
            lambda on_open: stream_pairs(names, columns, on_open=on_open),
            "pair",
            paths,
        )

    def __iter__(self) -> Iterator[T]:
        """Read the items from the beginning."""
        self.streams.clear()
        return self.read(self.streams.append)

    @property
    def is_rereadable(self) -> bool:
        """Whether the items can be read again, which standard input cannot."""
        return STDIN not in map(str, self.files)

    def item_name(self, index: int) -> str:
        """The name of an item in messages."""
        return f"{self.name}, {self.unit} {index + 1}"

    def read_share(self) -> float | None:
        """The share of the files, in bytes, that has been read; None if their size is unknown."""
        try:
            total = sum(os.path.getsize(file) for file in self.files)
        except OSError:
            return None
        return sum(stream.position for stream in self.streams) / total if total else None

    def encode(self, items: Sequence[T]) -> bytes:
        """The items as bytes, for the hash of the input."""
        return "".join((item if isinstance(item, str) else "\t".join(item)) + "\n" for item in items).encode()


class BlockOutput(NamedTuple):
    """The output for a block of items, and numbers that are summed over all blocks."""

    data: bytes
    totals: Mapping[str, float] = MappingProxyType({})


ProcessItems = Callable[[list[T], int, OnBatch], BlockOutput]
"""computes the output for items, given the index of the first one"""
CheckItem = Callable[[T, str], object]
"""called with an item and its name; raises an error if the item is invalid"""


@dataclass(frozen=True)
class FileSummary:
    """What `process_file` has done: items in the output file, of these from earlier runs, seconds, and totals."""

    items: int
    resumed_items: int
    seconds: float
    totals: dict[str, float]


@dataclass(frozen=True)
class FileProgress:
    """Progress of the work on a file.

    >>> print(FileProgress(items=12288, share=0.34, items_per_second=5012.0, seconds_left=46.0))
    12,288 lines (34%), 5,012 lines/s, 0:00:46 left
    """

    items: int
    """finished lines"""
    share: float | None
    """finished share of the file, from 0 to 1; None if unknown"""
    items_per_second: float
    seconds_left: float | None

    def __str__(self) -> str:
        share = "" if self.share is None else f" ({self.share:.0%})"
        left = "" if self.seconds_left is None else f", {timedelta(seconds=round(self.seconds_left))} left"
        return f"{self.items:,} lines{share}, {self.items_per_second:,.0f} lines/s{left}"


class _Block(NamedTuple):
    first: int
    items: list[Any]
    share: float | None
    """share of the input that has been read at the end of the block"""


class _Outcome(NamedTuple):
    output: BlockOutput
    done: int
    """number of processed items; fewer than in the block if an item is invalid"""
    error: RegardError | None


def process_file(
    source: InputItems[T],
    output: str | Path,
    processors: Sequence[ProcessItems[T]],
    *,
    settings: dict[str, Any],
    check: CheckItem[T],
    header: Callable[[int], bytes] | None = None,
    allowed_changes: Collection[AllowedChange] = (),
    overwrite: bool = False,
    progress: Callable[[FileProgress], None] | None = None,
) -> FileSummary:
    """Write the output for every item of an input to a file; the same call resumes it after an interruption.

    The input is read in blocks, and each block is processed by one of `processors`, which run in parallel threads. The
    output is in the order of the input and does not depend on interruptions. Before an invalid item, for which `check`
    raises an error, the items before it are written. See `ResumableFile` for the other parameters.
    """
    check_output(output, source.files, overwrite=overwrite)
    with ResumableFile(output, settings, overwrite=overwrite, allowed_changes=allowed_changes, header=header) as file:
        try:
            meter = _process(source, file, processors, check, overwrite, progress)
        except KeyboardInterrupt:
            if file.items == 0:
                raise
            raise Interrupted(
                f"Interrupted; {file.items:,} {source.unit}s are complete.", "The same command resumes."
            ) from None
        file.finish()
    return FileSummary(file.items, meter.first_items, time.monotonic() - meter.start, file.totals)


def _process(
    source: InputItems[T],
    file: ResumableFile,
    processors: Sequence[ProcessItems[T]],
    check: CheckItem[T],
    overwrite: bool,
    progress: Callable[[FileProgress], None] | None,
) -> "_Meter":
    """Append the output for all items that are not in the file."""
    items, digest = iter(source), hashlib.sha256()
    if problem := _skip_finished(source, items, file, digest):
        if not (overwrite and source.is_rereadable):
            raise file.resume_error(f"it was written from another input; {source.name} {problem}")
        file.restart()
        items, digest = iter(source), hashlib.sha256()
    if file.items:
        logger.warning("Resuming %s after %s %ss.", file.output, f"{file.items:,}", source.unit)
    meter = _Meter(file.items, source.read_share(), progress)
    workers = [_make_worker(processor, source, check) for processor in processors]
    with closing(process_blocks(_read_blocks(source, items, file.items), workers, meter.report)) as results:
        while True:
            try:
                block, outcome = next(results)
            except StopIteration:
                return meter
            except RegardError as error:
                raise _with_resume_hint(error, source, file) from None
            if outcome.done:
                digest.update(source.encode(block.items[: outcome.done]))
                file.append(
                    outcome.output.data,
                    outcome.done,
                    input_sha256=digest.hexdigest(),
                    totals=outcome.output.totals,
                )
                meter.add(block)
            if outcome.error is not None:
                raise _with_resume_hint(outcome.error, source, file)


def _skip_finished(source: InputItems[T], items: Iterator[T], file: ResumableFile, digest: Any) -> str:
    """Skip the items whose output is in the file. Returns how the items differ from those, or ""."""
    skipped = 0
    while skipped < file.items and (block := list(islice(items, min(BLOCK_ITEMS, file.items - skipped)))):
        digest.update(source.encode(block))
        skipped += len(block)
    if skipped < file.items:
        return f"has only {skipped:,} {source.unit}s"
    if file.items and digest.hexdigest() != file.input_sha256:
        return f"differs in the first {file.items:,} {source.unit}s"
    return ""


def _read_blocks(source: InputItems[T], items: Iterator[T], first: int) -> Iterator[_Block]:
    """Blocks of items; an error while reading is raised after the items before it."""
    error: RegardError | None = None
    while error is None:
        block: list[T] = []
        characters = 0
        try:
            for item in items:
                block.append(item)
                characters += len(item) if isinstance(item, str) else sum(map(len, item))
                if len(block) >= BLOCK_ITEMS or characters >= BLOCK_CHARACTERS:
                    break
        except RegardError as caught:
            error = caught
        if block:
            yield _Block(first, block, source.read_share())
            first += len(block)
        elif error is None:
            return
    raise error


def _make_worker(
    processor: ProcessItems[T], source: InputItems[T], check: CheckItem[T]
) -> Callable[[_Block, OnBatch], _Outcome]:
    """A function that processes a block, or the items before the first invalid one."""

    def process(block: _Block, on_batch: OnBatch) -> _Outcome:
        try:
            return _Outcome(processor(block.items, block.first, on_batch), len(block.items), None)
        except RegardError as caught:
            error, count = caught, 0
        for i, item in enumerate(block.items):
            try:
                check(item, source.item_name(block.first + i))
            except RegardError as caught:
                error, count = caught, i
                break
        output = processor(block.items[:count], block.first, on_batch) if count else BlockOutput(b"")
        return _Outcome(output, count, error)

    return process


def _with_resume_hint(error: RegardError, source: InputItems[T], file: ResumableFile) -> RegardError:
    if file.items == 0:
        return error
    kept = f"The {file.items:,} {source.unit}s before it are kept: after the fix, the same command resumes there."
    return RegardError(error.message, f"{error.hint} {kept}".strip())


class _Meter:
    """Measures the progress and reports it."""

    def __init__(self, items: int, share: float | None, progress: Callable[[FileProgress], None] | None) -> None:
        self.items = self.first_items = items
        self.share = self.first_share = share
        self.start, self.progress = time.monotonic(), progress

    def add(self, block: _Block) -> None:
        """Count a finished block."""
        self.items, self.share = block.first + len(block.items), block.share
        self.report([])

    def report(self, blocks: list[tuple[_Block, float]]) -> None:
        """Report the progress, including the finished shares of blocks in progress."""
        if self.progress is None:
            return
        items, share, begin = float(self.items), self.share, self.share
        for block, done in blocks:
            items += done * len(block.items)
            if share is not None and begin is not None and block.share is not None:
                share, begin = share + done * (block.share - begin), block.share
        seconds = max(time.monotonic() - self.start, 1e-9)
        seconds_left = None
        if share is not None and self.first_share is not None and share > self.first_share:
            seconds_left = seconds * (1 - share) / (share - self.first_share)
        self.progress(FileProgress(int(items), share, (items - self.first_items) / seconds, seconds_left))
