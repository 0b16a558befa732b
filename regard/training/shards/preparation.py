"""Preparation of token shards: a corpus of any size is read, cleaned, split and encoded in little memory."""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt64

from regard.data.batching.sequences import STARTS_DTYPE
from regard.data.text.cleaning import CleaningCounts, validation_size
from regard.data.text.documents import VALIDATION_SHARE, no_text_error, text_files
from regard.data.text.readers import find_rows
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND, TOKENIZER_KINDS
from regard.errors import RegardError
from regard.files import write_atomically
from regard.pipelines import ModelFolder, pipeline_class, read_tokenizers, write_tokenizers
from regard.progress import show_progress, show_status
from regard.training.datasets import Dataset, too_few_examples
from regard.training.recipe import DataConfig, TokenizerConfig, recipe_from_dict
from regard.training.shards.corpora import CORPORA, Rows
from regard.training.shards.dataset import (
    MANIFEST,
    SAMPLE,
    VALIDATION,
    Manifest,
    ShardedDataset,
    ShardedSplit,
    check_content,
    check_sizes,
    file_facts,
    open_shards,
    read_manifest,
    shard_name,
    starts_name,
)
from regard.training.shards.encoder import (
    LENGTH_DTYPE,
    TRAINING_FLAGS,
    EncodeJob,
    encode_shards,
    lengths_name,
    plan_shards,
)
from regard.training.shards.row_file import RowReader, RowWriter
from regard.training.tasks import TASKS
from regard.version import __version__

# Bytes of text on which a tokenizer is trained at most: a sample of larger corpora.
TOKENIZER_BYTES = 64 << 20
# Rows that are handled at once; and the largest distance of rows that are read together.
BLOCK, MAX_GAP = 1 << 20, 64
# Examples that are stored as text for suggestions.
SAMPLE_SIZE = 5000
# Of a corpus with fewer documents, the last part is used for validation: at most this many characters.
MIN_SPLIT_DOCUMENTS, MAX_VALIDATION_CHARACTERS = 100, 10_000_000
# Duplicates are searched in buckets of about this many rows, by digest; at most 256 buckets, which are files.
BUCKET_ROWS, MAX_BUCKETS = 1 << 20, 256
# Groups that are considered for validation, those with the smallest digests.
MAX_CANDIDATES = 5000
_ENTRY = np.dtype([("low", "<u8"), ("high", "<u8"), ("row", "<i8")])
LOCK = "prepare.lock"
Data = str | Path | Sequence[str | Path] | Iterable[Any]


def prepare(
    data: Data,
    out: str | Path = "shards",
    *,
    task: str = "translate",
    tokenizer: str | Path | Mapping[str, Any] | None = None,
    validation: str | Path | Sequence[str | Path] = (),
    limit: int = DataConfig.limit,
    columns: Sequence[str] = (),
    max_ratio: float = DataConfig.max_ratio,
    prefixes: Sequence[str] = (),
    quiet: bool = False,
) -> ShardedDataset:
    """Encode a corpus of any size into token shards, from which `regard.train` trains without loading them.

    `data` names one or more files, as for `regard.train`, or is an iterable of rows: pairs, texts, or dictionaries such
    as those of a streaming dataset of Hugging Face. `out` is the folder to write. `task` is translate, text2text,
    language or mask. `tokenizer` is a folder with tokenizers (a model, or other shards), or the settings of a new one
    such as {"vocab_size": 8000}, which is trained on a sample of at most 64 MiB. Without `validation` files, a part of
    the examples is split off by content, and equal ones stay together. With `limit`, only the first examples are read.

    The folder appears under its name when it is complete.

    >>> import tempfile
    >>> pairs = [(f"number {i}", f"le nombre {i}") for i in range(50)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     prepare(pairs, f"{folder}/shards", tokenizer={"vocab_size": 60}, quiet=True).describe()
    '45 pairs for training, 5 for validation'
    """
    if task not in CORPORA:
        raise RegardError(
            f"The task {task} does not support token shards.", f"Choose from: {', '.join(CORPORA)}; or train on files."
        )
    rows: Any = find_rows(data)
    files = () if rows is not None else (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))
    held_out = [validation] if isinstance(validation, str | Path) else list(validation)
    config = DataConfig(
        files=files,
        validation=tuple(map(str, held_out)),
        limit=limit,
        columns=tuple(columns),
        max_ratio=max_ratio,
        prefixes=tuple(prefixes),
    )
    with temporary_folder(Path(out)) as folder:
        _Preparation(task, config, tokenizer, folder, quiet).run(rows)
    return open_shards(out)


def check_shards(folder: str | Path, *, quiet: bool = False) -> Manifest:
    """Check sizes and SHA-256 of all files of a folder of token shards.

    >>> check_shards("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder/dataset.json: the file is missing. Is the folder complete?
    """
    manifest = read_manifest(Path(folder))
    check_sizes(Path(folder), manifest)
    with show_progress("checking (MiB)", silent=quiet) as on_progress:
        check_content(Path(folder), manifest, on_progress)
    return manifest


class _Preparation:
    """One call of `prepare`: reader the text, split it, train the tokenizer, encode, and write dataset.json."""

    def __init__(
        self, task: str, config: DataConfig, tokenizer: str | Path | Mapping[str, Any] | None, folder: Path, quiet: bool
    ) -> None:
        self.task, self.config, self.folder, self.quiet = task, config, folder, quiet
        self.corpus = CORPORA[task]
        self.settings = {} if isinstance(tokenizer, str | Path) else {"tokenizer": dict(tokenizer or {})}
        recipe_from_dict(self.settings, origin="regard.prepare")  # an error in them should not come after hours
        self.dropped: Counter[str] = Counter()
        self.validation: list[Any] = []
        self.examples = self.characters = 0
        self.given = read_tokenizer_folder(Path(tokenizer)) if isinstance(tokenizer, str | Path) else None

    def run(self, data: Any) -> None:
        """Write all files into the folder; dataset.json is the last."""
        if self.config.validation:
            # Read first: an error in these files should not come after hours.
            held_out = dataclasses.replace(self.config, files=self.config.validation)
            self.validation = list(TASKS[self.task].read(held_out).validation)
        self._store(data)
        reader = RowReader(self.folder, len(self.corpus.sides))
        is_training = self._split(reader)
        reader = RowReader(self.folder, len(self.corpus.sides))
        is_training.tofile(self.folder / TRAINING_FLAGS)
        sample = [] if self.corpus.is_stream else self._sample(reader, is_training)
        tokenizers, special, config = self._make_tokenizers(reader, is_training, sample)
        write_tokenizers(self.folder, *tokenizers)
        dtype = "<u2" if max(tokenizer.vocab_size for tokenizer in tokenizers) <= 1 << 16 else "<u4"
        job = EncodeJob(
            str(self.folder),
            self.corpus.sides,
            dtype,
            is_foreign=tokenizers[0].kind == FOREIGN_KIND,
            begin=special.begin if self.corpus.is_stream else None,
            end=special.eos if self.corpus.is_stream else None,
        )
        shards = plan_shards(reader)
        with self._progress("encoding", reader.bytes) as on_bytes:
            files = encode_shards(job, shards, on_bytes)
        reader.delete()
        (self.folder / TRAINING_FLAGS).unlink()
        tokens = tuple(self._merge(job, len(shards), side, files) for side in self.corpus.sides)
        self._write_examples(VALIDATION, self.validation)
        self._write_examples(SAMPLE, sample)
        for path in self.folder.iterdir():
            if path.suffix in (".json", ".jsonl"):
                files[path.name] = list(file_facts(path))
        Manifest(
            version=__version__,
            task=self.task,
            unit=self.corpus.unit,
            sides=self.corpus.sides,
            is_stream=self.corpus.is_stream,
            dtype=dtype,
            shards=len(shards),
            training=self.examples,
            characters=self.characters,
            tokens=tokens,
            validation=len(self.validation),
            dropped=dict(self.dropped),
            tokenizer=config,
            is_foreign=job.is_foreign,
            special=special,
            files={name: (size, digest) for name, (size, digest) in sorted(files.items())},
        ).save(self.folder)

    def _store(self, data: Any) -> None:
        streams: list[Any] = []
        try:
            files = text_files(self.config.files) if self.corpus.sides == ("text",) else self.config.files
            total = sum(map(os.path.getsize, files))
        except OSError:  # standard input, the Hugging Face hub, or a missing file, which the reader reports
            total = 0
        with (
            RowWriter(self.folder, len(self.corpus.sides)) as writer,
            show_status("reading", silent=self.quiet) as on_status,
        ):
            started = time.monotonic()
            for texts, is_first in self.corpus.read(data, self.config, streams.append, self.dropped):
                writer.append(texts, is_first)
                if writer.rows % 20_000 == 0:
                    rate = writer.bytes / 1e6 / (time.monotonic() - started)
                    share = min(1.0, sum(stream.position for stream in streams) / total) if total else None
                    dropped = f", {self.dropped.total():,} dropped" if self.dropped else ""
                    on_status(f"{writer.rows:,} rows{dropped}, {rate:.0f} MB/s", share)
        if not writer.rows:
            if self.corpus.is_stream or not self.dropped:
                raise no_text_error(self.config.files or ("data",))
            names = " ".join(self.config.files) or "data"
            reasons = CleaningCounts(**self.dropped).reasons
            raise RegardError(f"{names}: no pair is left after cleaning.", f"Check the files; dropped: {reasons}.")

    # -- split

    def _split(self, reader: RowReader) -> Bool[np.ndarray, "rows"]:
        """Whether each row is for training; fills `validation`, unless there are validation files, and the counts."""
        is_kept = np.ones(reader.rows, bool)
        if self.corpus.drops_duplicates:
            is_kept = ~find_duplicates(reader)
            if repeated := reader.rows - int(is_kept.sum()):
                self.dropped["duplicate"] = repeated
        if not self.config.validation:
            is_kept = self._split_off(reader, is_kept)
            if self.corpus.is_mixture:
                order = np.random.default_rng(0).permutation(len(self.validation)).tolist()
                self.validation = [self.validation[index] for index in order]
        for first, records in RowReader(self.folder, reader.sides).records():
            records = records[is_kept[first : first + len(records)]]
            self.characters += int(records["characters"].sum(dtype=np.int64))
            self.examples += int(records["is_first"].sum())
        return is_kept

    def _split_off(self, reader: RowReader, is_kept: Bool[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows"]:
        if not self.corpus.is_stream:
            groups = choose_groups(reader, is_kept, validation_size(int(is_kept.sum())))
        else:
            documents = sum(int(records["is_first"].sum()) for _, records in reader.records())
            total = sum(int(records["characters"].sum(dtype=np.int64)) for _, records in reader.records())
            size = min(int(VALIDATION_SHARE * total), MAX_VALIDATION_CHARACTERS)
            if documents < MIN_SPLIT_DOCUMENTS:
                return self._split_off_end(reader, total, documents)
            groups = choose_groups(reader, is_kept, size, by_characters=True)
        if not len(groups):
            raise too_few_examples(self.corpus.unit)
        is_training = is_kept.copy()
        for first, is_held_out in rows_in_groups(reader, groups):
            is_training[first : first + len(is_held_out)] &= ~is_held_out
        self._collect_validation(reader, is_kept & ~is_training)
        return is_training

    def _split_off_end(self, reader: RowReader, total: int, documents: int) -> Bool[np.ndarray, "rows"]:
        """Split off the last characters, as `split_documents` does; a cut inside a row adds its first part as a row."""
        if total < 2:
            raise too_few_examples(self.corpus.unit)
        cut = min(max(1, int(total * (1 - VALIDATION_SHARE)), total - MAX_VALIDATION_CHARACTERS), total - 1)
        if documents > 1 and total * VALIDATION_SHARE <= MAX_VALIDATION_CHARACTERS:
            starts, characters = [], 0
            for _, records in reader.records():
                before = characters + np.cumsum(records["characters"], dtype=np.int64) - records["characters"]
                starts += before[records["is_first"] > 0].tolist()
                characters += int(records["characters"].sum(dtype=np.int64))
            cut = min(starts[1:], key=lambda start: abs(start - cut))
        row, offset = cut_at_character(reader, cut)
        is_training = np.arange(reader.rows) < row
        self._collect_validation(reader, ~is_training, offset)
        if offset:
            [block] = reader.blocks(row, row + 1)
            with RowWriter(self.folder, 1) as writer:
                writer.append((block.texts[0][0][:offset],), bool(block.records["is_first"][0]))
            is_training = np.append(is_training, True)
        return is_training

    def _collect_validation(self, reader: RowReader, is_held_out: Bool[np.ndarray, "rows"], offset: int = 0) -> None:
        """Read the validation examples; the first `offset` characters of the first row are left out."""
        for texts, is_first in self._rows(reader, is_held_out):
            texts = tuple(text[offset:] for text in texts)
            if len(texts) > 1:
                self.validation.append(texts)
            elif is_first or offset or not self.corpus.is_stream:
                self.validation.append(texts[0])
            else:
                self.validation[-1] += texts[0]
            offset = 0

    def _rows(self, reader: RowReader, is_wanted: Bool[np.ndarray, "rows"]) -> Rows:
        """The rows that are wanted; the others are not read."""
        for start in range(0, len(is_wanted), BLOCK):
            wanted = start + np.flatnonzero(is_wanted[start : start + BLOCK])
            # Rows that are close to each other are read together.
            for run in np.split(wanted, 1 + np.flatnonzero(np.diff(wanted) > MAX_GAP)):
                for block in reader.blocks(int(run[0]), int(run[-1]) + 1) if len(run) else ():
                    flags = is_wanted[block.first : block.first + len(block.texts)].tolist()
                    rows = zip(block.texts, (block.records["is_first"] > 0).tolist())
                    yield from itertools.compress(rows, flags)

    # -- tokenizer

    def _sample(self, reader: RowReader, is_training: Bool[np.ndarray, "rows"]) -> list[Any]:
        """About SAMPLE_SIZE training examples at equal distances; all if there are fewer than twice as many."""
        is_wanted, step, count = np.zeros(len(is_training), bool), max(1, int(is_training.sum()) // SAMPLE_SIZE), 0
        for first in range(0, len(is_training), BLOCK):
            rows = first + np.flatnonzero(is_training[first : first + BLOCK])
            is_wanted[rows[-count % step :: step]] = True
            count += len(rows)
        return [texts if len(texts) > 1 else texts[0] for texts, _ in self._rows(reader, is_wanted)]

    def _make_tokenizers(self, reader: RowReader, is_training: Bool[np.ndarray, "rows"], sample: list[Any]) -> Any:
        """The tokenizers, their special tokens, and their settings."""
        task = TASKS[self.task]
        manifest = Manifest(task=self.task, training=self.examples, characters=self.characters)
        dataset = ShardedDataset(ShardedSplit(self.folder, manifest, sample), self.validation, self.corpus.unit)
        suggested = task.suggest_recipe(dataset, False)
        if self.given is not None:
            tokenizers, special = self.given
            kind = tokenizers[0].kind if tokenizers[0].kind in TOKENIZER_KINDS else TokenizerConfig.kind
            size, shared = tokenizers[0].vocab_size, tokenizers[0] is tokenizers[-1]
            settings = TokenizerConfig(kind=kind, vocab_size=size, shared=shared)  # type: ignore[arg-type]
            return tokenizers, special or pipeline_class(suggested.model).special, settings
        settings = recipe_from_dict(self.settings, suggested, "regard.prepare").tokenizer
        texts = Dataset(self._tokenizer_sample(reader, is_training), [], self.corpus.unit)
        return task.make_tokenizers(texts, settings), pipeline_class(suggested.model).special, settings

    def _tokenizer_sample(self, reader: RowReader, is_training: Bool[np.ndarray, "rows"]) -> list[Any]:
        """Training examples of at most about TOKENIZER_BYTES: all, or those with the smallest digests."""
        share = TOKENIZER_BYTES / max(1, reader.bytes)
        is_wanted = is_training
        if share < 1:
            is_wanted = is_training.copy()
            for first, records in reader.records():
                is_wanted[first : first + len(records)] &= records["low"] < np.uint64(share * 2**64)
        return [texts if len(texts) > 1 else texts[0] for texts, _ in self._rows(reader, is_wanted)]

    # -- output

    def _merge(self, job: EncodeJob, shards: int, side: str, files: dict[str, Any]) -> int:
        """Write the starts of the sequences of one side; returns its number of tokens."""
        total, digest, path = 0, hashlib.sha256(), self.folder / starts_name(side)
        with open(path, "wb") as file:
            for index in range(-1, shards):
                if index < 0:
                    data = np.zeros(1, STARTS_DTYPE).tobytes()
                else:
                    temporary = self.folder / lengths_name(shard_name(index, side))
                    ends = total + np.cumsum(np.fromfile(temporary, LENGTH_DTYPE), dtype=np.int64)
                    temporary.unlink()
                    total = int(ends[-1]) if len(ends) else total
                    data = ends.astype(STARTS_DTYPE).tobytes()
                file.write(data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
        if job.end is not None:  # one stream: there are no sequences
            path.unlink()
        else:
            files[path.name] = [path.stat().st_size, digest.hexdigest()]
        return total

    def _write_examples(self, name: str, examples: Sequence[Any]) -> None:
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples]
        write_atomically(self.folder / name, "".join(lines).encode("utf-8", "replace"))

    @contextlib.contextmanager
    def _progress(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        started, done, lock = time.monotonic(), 0, threading.Lock()
        with show_status(description, silent=self.quiet) as on_status:

            def on_bytes(count: int) -> None:
                nonlocal done
                with lock:  # several encoder processes report at once
                    done += count
                    rate = done / (time.monotonic() - started)
                    left = (total - done) / rate
                    on_status(f"{rate / 1e6:.0f} MB/s, {left:.0f} s left", done / max(1, total))

            yield on_bytes


def read_tokenizer_folder(folder: Path) -> tuple[Any, SpecialTokens | None]:
    """The tokenizers of a model folder, or of other token shards, and their special tokens (None: the default ones)."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        return read_tokenizers(folder, foreign=manifest.is_foreign), manifest.special
    if (folder / "config.json").exists():
        special = ModelFolder.open(folder).special
        return read_tokenizers(folder, foreign=special is not None), special
    return read_tokenizers(folder), None


def find_duplicates(reader: RowReader) -> Bool[np.ndarray, "rows"]:
    """Whether each row has the same text as an earlier one (by a digest of 128 bits)."""
    is_duplicate = np.zeros(reader.rows, bool)
    count = min(MAX_BUCKETS, 1 + reader.rows // BUCKET_ROWS)
    paths = [reader.folder / f"bucket-{index}" for index in range(count)]
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        for first, records in reader.records():
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
    reader: RowReader, is_kept: Bool[np.ndarray, "rows"], limit: int, by_characters: bool = False
) -> UInt64[np.ndarray, "groups"]:
    """The digests of the groups for validation: of the kept rows, those with the smallest digests.

    Together they have at most `limit` rows (or characters); a group that does not fit is skipped. If none fits, the
    smallest one is chosen. Without two groups, none is.
    """
    groups, sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for first, records in reader.records():
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


def rows_in_groups(reader: RowReader, groups: UInt64[np.ndarray, "groups"]) -> Iterator[tuple[int, np.ndarray]]:
    """For blocks of rows, the first row, and whether each row belongs to one of the groups."""
    for first, records in reader.records():
        yield first, np.isin(records["group"], groups)


def cut_at_character(reader: RowReader, characters: int) -> tuple[int, int]:
    """The row that contains the character with this index, and its index in the row.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.training.shards.row_file import RowWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(Path(folder), sides=1) as writer:
    ...         writer.append(["abc"])
    ...         writer.append(["defg"])
    ...     cut_at_character(RowReader(Path(folder), sides=1), 5)
    (1, 2)
    """
    for first, records in reader.records():
        ends = np.cumsum(records["characters"].astype(np.int64))
        if characters < ends[-1]:
            row = int(np.searchsorted(ends, characters, side="right"))
            return first + row, int(characters - (ends[row - 1] if row else 0))
        characters -= int(ends[-1])
    raise ValueError("the corpus is shorter")


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """Yield the folder OUT.part, which is renamed to OUT at the end and removed after an error."""
    if str(out) in ("", "."):
        raise RegardError("--out is empty.", "Pass a folder for the shards, for example --out shards.")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise RegardError(f"{out} already exists.", "Choose another --out, or delete it first.")
    part = out.with_name(out.name + ".part")
    if part.exists() and not (part / LOCK).exists():
        raise RegardError(f"{part} exists and is not from an interrupted regard prepare.", "Choose another --out.")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with open(part / LOCK, "a", encoding="utf-8") as lock:
            _lock(lock, part)
            try:
                for entry in part.iterdir():  # left by an interrupted process
                    if entry.name != LOCK:
                        entry.unlink()
                yield part
                (part / LOCK).unlink()
                os.replace(part, out)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RegardError(
                f"{out}: no space left on the device; the uncompressed text and the shards must fit.",
                "Free some space, or choose another --out. Nothing was left behind.",
            ) from None
        place = error.filename or part
        raise RegardError(f"{place}: cannot be written: {error.strerror}.", "Choose another --out.") from None


def _lock(file: Any, part: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RegardError(
            f"{part} is in use by another regard prepare.", "Wait for it to end, or choose another --out."
        ) from None
    except OSError:  # the file system does not support locks
        return
