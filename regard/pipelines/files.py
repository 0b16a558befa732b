"""Processing of files of any size with a model: constant memory, resumable, on several devices."""

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from logging import getLogger
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from regard.errors import Interrupted, RegardError
from regard.pipelines.input_items import InputItems, T
from regard.pipelines.resumable_file import AllowedChange, ResumableFile, check_output, remove_journal
from regard.ranges import check_value

logger = getLogger("regard")

B = TypeVar("B")
R = TypeVar("R")
P = TypeVar("P")
Cluster = Literal["ray"]
"""a cluster whose workers process blocks of a file"""
OnBatch = Callable[[int, int], None]
"""called with the finished part of a block and its total"""
BlockWorker = Callable[[B, OnBatch], R]
"""returns the result of a block, and reports its progress"""
# A block is given up after it was lost this often: it is probably what ends the workers.
MAX_LOSSES = 5
# Seconds between two reports while a block is processed.
REPORT_INTERVAL = 0.5
# Seconds to wait for the threads after an error; they stop at the next report of progress.
_JOIN_SECONDS = 10.0

# A block ends after this many items or characters. It is sorted by length into batches; an interruption loses at most
# the blocks in progress.
BLOCK_ITEMS, BLOCK_CHARACTERS = 4096, 1 << 22


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
    """What `process_file` has done: items in the output files, of these from earlier runs, seconds, and totals."""

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


class _Shard(Generic[T]):
    """An input with its output file, of which the finished items have been skipped."""

    def __init__(self, source: InputItems[T], file: ResumableFile, overwrite: bool) -> None:
        self.source: InputItems[T] = source
        self.file = file
        self.items: Iterator[T] = iter(source)
        self.digest = hashlib.sha256()
        if problem := self._skip_finished():
            if not (overwrite and source.is_rereadable):
                raise file.resume_error(f"it was written from another input; {source.name} {problem}")
            file.restart()
            self.items, self.digest = iter(source), hashlib.sha256()
        self.resumed_items = file.items
        if file.items:
            logger.warning("Resuming %s after %s %ss.", file.output, f"{file.items:,}", source.unit)

    def append(self, items: Sequence[T], output: BlockOutput) -> None:
        """Write the output for items."""
        self.digest.update(self.source.encode(items))
        self.file.append(output.data, len(items), input_sha256=self.digest.hexdigest(), totals=output.totals)

    def _skip_finished(self) -> str:
        """Skip the items whose output is in the file. Returns how the items differ from those, or ""."""
        count, unit = self.file.items, self.source.unit
        skipped = 0
        while skipped < count and (block := list(islice(self.items, min(BLOCK_ITEMS, count - skipped)))):
            self.digest.update(self.source.encode(block))
            skipped += len(block)
        if skipped < count:
            return f"has only {skipped:,} {unit}s"
        if count and self.digest.hexdigest() != self.file.input_sha256:
            return f"differs in the first {count:,} {unit}s"
        if self.file.is_renamed and next(self.items, None) is not None:
            return f"has more than {count:,} {unit}s"
        return ""


class _Block(NamedTuple):
    shard: _Shard[Any]
    first: int
    items: list[Any]
    share: float | None
    """share of the input that has been read at the end of the block"""


class _Outcome(NamedTuple):
    output: BlockOutput
    done: int
    """number of processed items; fewer than in the block if an item is invalid"""
    error: RegardError | None


def make_processors(
    make_processor: Callable[[P], ProcessItems[Any]], pipeline: P, replicas: Sequence[P], cluster: Cluster | None
) -> list[ProcessItems[Any]]:
    """The processors of a file: of the pipeline and its replicas in this process, or of a cluster."""
    if cluster is None:
        return [make_processor(replica) for replica in (pipeline, *replicas)]
    check_value(Cluster, cluster, "cluster")
    from regard.pipelines.ray_workers import ray_processors

    return ray_processors(make_processor, pipeline)


def process_file(
    source: InputItems[T], output: str | Path, processors: Sequence[ProcessItems[T]], **options: Any
) -> FileSummary:
    """Write the output for every item of an input to a file: `process_shards` with one shard."""
    return process_shards([(source, output)], processors, **options)


def process_shards(
    shards: Sequence[tuple[InputItems[T], str | Path]],
    processors: Sequence[ProcessItems[T]],
    *,
    settings: dict[str, Any],
    check: CheckItem[T],
    header: Callable[[int], bytes] | None = None,
    allowed_changes: Collection[AllowedChange] = (),
    overwrite: bool = False,
    progress: Callable[[FileProgress], None] | None = None,
) -> FileSummary:
    """Write the output for every item of each input to its file; the same call resumes after an interruption.

    The inputs are read in blocks, and each block is processed by one of `processors`, which run in parallel threads,
    also across the border of two shards. The output is in the order of the input and does not depend on interruptions.
    Before an invalid item, for which `check` raises an error, the items before it are written. See `ResumableFile` for
    the other parameters.
    """
    for source, output in shards:
        check_output(output, source.files, overwrite=overwrite)

    def open_shard(source: InputItems[T], output: str | Path) -> _Shard[T]:
        file = ResumableFile(output, settings, overwrite=overwrite, allowed_changes=allowed_changes, header=header)
        try:
            return _Shard(source, file, overwrite)
        except BaseException:
            file.close()
            raise

    with closing(_Shards(shards, open_shard, progress)) as work:
        try:
            work.process([_Worker(processor, check) for processor in processors])
        except KeyboardInterrupt:
            if work.meter.items == 0:
                raise
            raise Interrupted(
                f"Interrupted; {work.meter.items:,} {shards[0][0].unit}s are complete.", "The same command resumes."
            ) from None
    return work.summary()


class _Shards(Generic[T]):
    """The shards of a run: opened one after another as they are read, and finished in the same order."""

    def __init__(
        self,
        shards: Sequence[tuple[InputItems[T], str | Path]],
        open_shard: Callable[[InputItems[T], str | Path], _Shard[T]],
        progress: Callable[[FileProgress], None] | None,
    ) -> None:
        self.shards: Sequence[tuple[InputItems[T], str | Path]] = shards
        self.open_shard: Callable[[InputItems[T], str | Path], _Shard[T]] = open_shard
        self.opened: list[_Shard[T]] = []
        """shards that are being processed"""
        self.totals: dict[str, float] = {}
        self.meter = _Meter(progress)
        sizes = [source.size() for source, _ in shards]
        self.size = None if None in sizes else sum(size for size in sizes if size is not None)
        self.read_size = 0
        """size of the inputs that have been read to their end"""

    def process(self, workers: Sequence["_Worker[T]"]) -> None:
        """Append the output for all items that are not in the files."""
        with closing(process_blocks(self._read(), workers, self.meter.report)) as results:
            while True:
                try:
                    block, outcome = next(results)
                except StopIteration:
                    break
                except RegardError as error:
                    raise self._with_resume_hint(error) from None
                while self.opened[0] is not block.shard:
                    self._finish(self.opened[0])
                if outcome.done:
                    block.shard.append(block.items[: outcome.done], outcome.output)
                    self.meter.add(outcome.done, block.share)
                if outcome.error is not None:
                    raise self._with_resume_hint(outcome.error)
        while self.opened:
            self._finish(self.opened[0])
        for _, output in self.shards:
            remove_journal(output)

    def summary(self) -> FileSummary:
        """Items and totals of all shards."""
        meter = self.meter
        return FileSummary(meter.items, meter.first_items, time.monotonic() - meter.start, self.totals)

    def close(self) -> None:
        """Close the files of unfinished shards."""
        for shard in self.opened:
            shard.file.close()

    def _read(self) -> Iterator[_Block]:
        """The blocks of all shards."""
        for source, output in self.shards:
            shard = self.open_shard(source, output)
            self.opened.append(shard)
            self.meter.skip(shard.file.items, self._share(0), self._share(source.position()))
            first = shard.resumed_items
            for items in _read_blocks(shard.items):
                yield _Block(shard, first, items, self._share(source.position()))
                first += len(items)
            if first == shard.resumed_items:
                self._finish(shard)  # no block does
            self.read_size += source.size() or 0

    def _share(self, position: int) -> float | None:
        """The share of all inputs that has been read, at a position of the present one."""
        return (self.read_size + position) / self.size if self.size else None

    def _finish(self, shard: _Shard[T]) -> None:
        shard.file.finish(keep_journal=True)
        for name, value in shard.file.totals.items():
            self.totals[name] = self.totals.get(name, 0) + value
        self.opened.remove(shard)

    def _with_resume_hint(self, error: RegardError) -> RegardError:
        if self.meter.items == 0:
            return error
        lines = f"{self.meter.items:,} {self.shards[0][0].unit}s"
        kept = f"The {lines} before it are kept: after the fix, the same command resumes there."
        return RegardError(error.message, f"{error.hint} {kept}".strip())


def _read_blocks(items: Iterator[T]) -> Iterator[list[T]]:
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
            yield block
        elif error is None:
            return
    raise error


@dataclass
class _Worker(Generic[T]):
    """Processes a block, or the items before the first invalid one."""

    processor: ProcessItems[T]
    check: CheckItem[T]

    def wait_until_ready(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for a processor on another machine."""
        if hasattr(self.processor, "wait_until_ready"):
            self.processor.wait_until_ready(is_stopped)

    def __call__(self, block: _Block, on_batch: OnBatch) -> _Outcome:
        try:
            return _Outcome(self.processor(block.items, block.first, on_batch), len(block.items), None)
        except RegardError as caught:
            error, count = caught, 0
        for i, item in enumerate(block.items):
            try:
                self.check(item, block.shard.source.item_name(block.first + i))
            except RegardError as caught:
                error, count = caught, i
                break
        output = self.processor(block.items[:count], block.first, on_batch) if count else BlockOutput(b"")
        return _Outcome(output, count, error)


class _Meter:
    """Measures the progress and reports it."""

    def __init__(self, progress: Callable[[FileProgress], None] | None) -> None:
        self.items = self.first_items = 0
        self.share: float | None = 0.0
        self.first_share = 0.0
        self.start, self.progress = time.monotonic(), progress

    def skip(self, items: int, begin: float | None, end: float | None) -> None:
        """Count items that an earlier run has finished, between two shares of the input."""
        self.items, self.first_items = self.items + items, self.first_items + items
        if begin is not None and end is not None:
            self.first_share += end - begin

    def add(self, items: int, share: float | None) -> None:
        """Count finished items, up to a share of the input."""
        self.items, self.share = self.items + items, share
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
        if share is not None and share > self.first_share:
            seconds_left = seconds * (1 - share) / (share - self.first_share)
        self.progress(FileProgress(int(items), share, (items - self.first_items) / seconds, seconds_left))


class _Stopped(Exception):
    """Raised inside a worker to end its work early."""


class WorkerLost(Exception):
    """Raised by a worker that died, or that cannot be reached: another one processes its block."""


@dataclass
class _Task(Generic[B, R]):
    """A block, and its result once it is available."""

    block: B
    is_done: threading.Event = field(default_factory=threading.Event)
    result: R | None = None
    error: BaseException | None = None
    share: float = 0.0
    """finished share of the block, from 0 to 1"""
    losses: int = 0
    """number of workers that were lost while they processed the block"""


def process_blocks(
    blocks: Iterator[B], workers: Sequence[BlockWorker[B, R]], on_wait: Callable[[list[tuple[B, float]]], None]
) -> Generator[tuple[B, R], None, None]:
    """Each block with its result, in the order of `blocks`. Each worker runs in a thread and takes the next block.

    At most one block more than there are workers is read ahead. An error from `blocks` is raised after the results of
    the blocks before it. `on_wait` is called now and then with the blocks in progress and their finished shares.

    A worker may have a method `wait_until_ready(is_stopped)`, which is called before its first block and after a
    `WorkerLost`; it returns once the worker can take a block, or `is_stopped()`.

    >>> list(process_blocks(iter([1, 2, 3]), [lambda block, on_batch: 10 * block] * 2, lambda blocks: None))
    [(1, 10), (2, 20), (3, 30)]
    """
    queue: SimpleQueue[_Task[B, R] | None] = SimpleQueue()
    is_stopped = threading.Event()

    def run(worker: BlockWorker[B, R]) -> None:
        while True:
            error = _wait_until_ready(worker, is_stopped)
            while (task := queue.get()) is not None:
                if error is not None:
                    task.error = error
                elif _is_lost(task, worker, is_stopped):
                    queue.put(task)
                    break
                task.is_done.set()
            else:
                return

    # Daemon threads in a copy of this context, so that settings in context variables apply.
    threads = [threading.Thread(target=copy_context().run, args=(run, worker), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    pending: deque[_Task[B, R]] = deque()
    read_error: Exception | None = None
    has_more = True
    try:
        while has_more or pending:
            while has_more and len(pending) <= len(workers):
                try:
                    task = _Task[B, R](next(blocks))
                except StopIteration:
                    has_more = False
                except Exception as error:
                    has_more, read_error = False, error
                else:
                    pending.append(task)
                    queue.put(task)
            if not pending:
                break
            while not pending[0].is_done.wait(REPORT_INTERVAL):
                on_wait([(task.block, task.share) for task in pending])
            first = pending.popleft()
            if first.error is not None:
                raise first.error
            yield first.block, first.result  # type: ignore[misc]
        if read_error is not None:
            raise read_error
    finally:
        is_stopped.set()
        with contextlib.suppress(Empty):
            while True:
                queue.get_nowait()
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join(_JOIN_SECONDS)


def _wait_until_ready(worker: BlockWorker[B, R], is_stopped: threading.Event) -> Exception | None:
    """Wait for a worker. Returns the error if it cannot start."""
    try:
        if hasattr(worker, "wait_until_ready"):
            worker.wait_until_ready(is_stopped.is_set)
    except Exception as error:
        return error
    return None


def _is_lost(task: _Task[B, R], worker: BlockWorker[B, R], is_stopped: threading.Event) -> bool:
    """Process a task. Returns True if the worker is lost, so that the task must be processed again."""
    try:
        task.result = worker(task.block, _share_reporter(task, is_stopped))
    except WorkerLost as error:
        task.losses, task.share = task.losses + 1, 0.0
        if task.losses < MAX_LOSSES:
            return True
        task.error = RegardError(
            f"{task.losses} workers were lost, one after another, with the same block: {error}.",
            "Check the memory of the machines.",
        )
    except BaseException as error:
        task.error = error
    return False


def _share_reporter(task: _Task[B, R], is_stopped: threading.Event) -> OnBatch:
    def on_batch(done: int, total: int) -> None:
        if is_stopped.is_set():
            raise _Stopped
        task.share = done / total

    return on_batch
