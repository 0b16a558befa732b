"""Encoding of a stored corpus into token shards, by one process per core."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from regard.data import Tokenizer
from regard.errors import RegardError
from regard.pipelines import read_tokenizers
from regard.training.shards.dataset import shard_name
from regard.training.shards.row_file import RECORD_ROWS, RowBlock, RowReader

# Bytes of text in a shard, of all sides together.
SHARD_BYTES = 64 << 20
TRAINING_FLAGS = "rows.training"
LENGTH_DTYPE = "<u4"
# The program of an encoder process. It reads its job from standard input.
_PROGRAM = "from regard.training.shards.encoder import encoder_main; encoder_main()"
OnBytes = Callable[[int], None]
"""called with the number of bytes of text that have been encoded since the last call"""


@dataclass(frozen=True)
class EncodeJob:
    """What an encoder process needs to know, apart from the files in the folder."""

    folder: str
    sides: tuple[str, ...]
    dtype: str
    is_foreign: bool
    begin: int | None
    """stream: id before each document"""
    end: int | None
    """stream: id after each document; None: the rows are separate sequences"""
    shards: tuple[tuple[int, int, int], ...] = ()
    """index, first row and end of the rows of each shard to write"""


def plan_shards(reader: RowReader) -> list[tuple[int, int, int]]:
    """Split the rows into shards of about SHARD_BYTES: index, first row and end of each."""
    shards: list[tuple[int, int, int]] = []
    first, start = 0, 0
    for block in range(0, reader.rows, RECORD_ROWS):
        ends = reader.ends(block, min(reader.rows, block + RECORD_ROWS))[1:, -1]
        while len(cut := np.flatnonzero(ends >= start + SHARD_BYTES)):
            last = block + int(cut[0]) + 1
            if last == first:
                break
            shards.append((len(shards), first, last))
            first, start = last, int(ends[cut[0]])
    if first < reader.rows:
        shards.append((len(shards), first, reader.rows))
    return shards


def encode_shards(job: EncodeJob, shards: Sequence[tuple[int, int, int]], on_bytes: OnBytes) -> dict[str, list[Any]]:
    """Write the shards; returns size and SHA-256 of each file."""
    workers = min(len(shards), _count_cores())
    if workers <= 1:
        return _encode_here(job, shards, on_bytes)
    files: dict[str, list[Any]] = {}
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(workers):
            processes.append(_start(asdict(job) | {"shards": shards[rank::workers]}))
        with ThreadPoolExecutor(workers) as threads:
            for result in threads.map(lambda process: _follow(process, on_bytes), processes):
                files |= result
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return files


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(message: dict[str, Any]) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends the others
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()  # the pipe stays open; its end signals the end of this process
    return process


def _follow(process: subprocess.Popen, on_bytes: OnBytes) -> dict[str, list[Any]]:
    """Read the reports of an encoder process until it is done."""
    assert process.stdout is not None
    for line in process.stdout:
        report = json.loads(line)
        if "error" in report:
            raise OSError(*report["error"]) if isinstance(report["error"], list) else RegardError(report["error"])
        if "files" in report:
            return report["files"]
        on_bytes(report["bytes"])
    raise RegardError(
        f"An encoder process ended (status {process.wait()}).", "Check that there is enough memory, and try again."
    )


def encoder_main() -> None:
    """Entry point of an encoder process: reads a job, and reports progress and results as lines of JSON."""
    table = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    table["sides"], shards = tuple(table["sides"]), [tuple(shard) for shard in table.pop("shards")]

    def report(**values: Any) -> None:
        os.write(sys.stdout.fileno(), json.dumps(values).encode() + b"\n")

    try:
        report(files=_encode_here(EncodeJob(**table), shards, lambda count: report(bytes=count)))
    except RegardError as error:
        report(error=str(error))
    except OSError as error:
        report(error=[error.errno, error.strerror, error.filename])


def _exit_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _encode_here(job: EncodeJob, shards: Sequence[tuple[int, int, int]], on_bytes: OnBytes) -> dict[str, list[Any]]:
    folder = Path(job.folder)
    tokenizers = read_tokenizers(folder, foreign=job.is_foreign)[: len(job.sides)]
    reader = RowReader(folder, len(job.sides))
    files: dict[str, list[Any]] = {}
    for index, first, last in shards:
        writers = [_ShardWriter(folder, index, side, job.dtype) for side in job.sides]
        try:
            for block in reader.blocks(first, last):
                _encode_block(job, reader, block, tokenizers, writers)
                on_bytes(block.bytes)
            for writer in writers:
                files[writer.name] = [writer.bytes, writer.finish()]
        finally:
            for writer in writers:
                writer.close()
    return files


def _encode_block(
    job: EncodeJob,
    reader: RowReader,
    block: RowBlock,
    tokenizers: Sequence[Tokenizer],
    writers: Sequence["_ShardWriter"],
) -> None:
    count = len(block.texts)
    is_training = np.fromfile(reader.folder / TRAINING_FLAGS, bool, count, offset=block.first)
    rows = np.flatnonzero(is_training).tolist()
    for side, (tokenizer, writer) in enumerate(zip(tokenizers, writers)):
        encoded = tokenizer.encode_batch([block.texts[row][side] for row in rows])
        if job.end is not None:
            encoded = [_add_stream_tokens(job, reader, block, row, ids) for row, ids in zip(rows, encoded)]
        writer.write(encoded)


def _add_stream_tokens(job: EncodeJob, reader: RowReader, block: RowBlock, row: int, ids: list[int]) -> list[int]:
    """The ids of a row of a stream, with the special tokens of a document that starts or ends with it."""
    if block.records["is_first"][row] and job.begin is not None:
        ids = [job.begin, *ids]
    following = block.first + row + 1
    if row + 1 < len(block.records):
        is_last = bool(block.records["is_first"][row + 1])
    elif following < reader.rows:
        [(_, record)] = reader.records(following, following + 1)
        is_last = bool(record["is_first"][0])
    else:
        is_last = True
    return [*ids, job.end] if is_last else ids  # type: ignore[list-item]


class _ShardWriter:
    """Writer of the ids of one side of a shard, and of their lengths."""

    def __init__(self, folder: Path, index: int, side: str, dtype: str) -> None:
        self.name, self.bytes, self.dtype = shard_name(index, side), 0, dtype
        self._ids = open(folder / self.name, "wb")  # noqa: SIM115
        self._lengths = open(folder / lengths_name(self.name), "wb")  # noqa: SIM115
        self._digest = hashlib.sha256()

    def write(self, rows: Sequence[list[int]]) -> None:
        ids = np.fromiter(chain.from_iterable(rows), self.dtype, sum(map(len, rows))).tobytes()
        self._ids.write(ids)
        self._digest.update(ids)
        self.bytes += len(ids)
        self._lengths.write(np.array([len(row) for row in rows], LENGTH_DTYPE).tobytes())

    def finish(self) -> str:
        """Write everything to disk; returns the SHA-256."""
        self._ids.flush()
        os.fsync(self._ids.fileno())
        self._lengths.flush()
        return self._digest.hexdigest()

    def close(self) -> None:
        self._ids.close()
        self._lengths.close()


def lengths_name(shard: str) -> str:
    """The name of the temporary file with the lengths of the sequences of a shard."""
    return f"{shard}.lengths"
