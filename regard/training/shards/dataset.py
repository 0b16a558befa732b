"""Token shards: their folder with dataset.json and integrity checks, and the dataset of memory-mapped examples."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.config_reader import fill_config, json_bytes, parse_json, read_json
from regard.data import Tokenizer
from regard.data.batching.sequences import STARTS_DTYPE, MappedSequences, MappedTokens
from regard.data.text.cleaning import CleaningCounts
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.files import read_file, write_atomically
from regard.pipelines import read_tokenizers
from regard.progress import OnProgress
from regard.ranges import Natural, format_value
from regard.training.datasets import Dataset, digest
from regard.training.recipe import DataConfig, TokenizerConfig
from regard.training.shards.corpora import CORPORA

MANIFEST, VALIDATION, SAMPLE = "dataset.json", "validation.jsonl", "sample.jsonl"
FORMAT = 1
# Folders of at most this size are checked by SHA-256 whenever they are opened; of larger ones, only the sizes.
ALWAYS_CHECKED_BYTES = 64 << 20
_DTYPES = {"<u2": 2, "<u4": 4}
_PREPARE_AGAIN = "Prepare the data again: regard prepare"


@dataclass(frozen=True)
class Manifest:
    """The content of dataset.json."""

    format: int = FORMAT
    version: str = ""
    """version of Regard that wrote the folder"""
    task: str = ""
    unit: str = ""
    """plural noun for the examples"""
    sides: tuple[str, ...] = ()
    """parts of an example, which have their own files: source and target, or text"""
    is_stream: bool = False
    """whether the ids are one stream, with special tokens, instead of separate sequences"""
    dtype: str = "<u2"
    """type of the token ids: little-endian integers of 2 or 4 bytes"""
    shards: int = 0
    training: Natural = 0
    """number of training examples"""
    characters: Natural = 0
    """number of characters of the training examples"""
    tokens: tuple[int, ...] = ()
    """number of training tokens of each side"""
    validation: Natural = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    """number of examples that cleaning dropped, by reason (a field of CleaningCounts)"""
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    is_foreign: bool = False
    """whether the tokenizers are those of an imported model"""
    special: SpecialTokens = dataclasses.field(default_factory=SpecialTokens)
    files: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """size in bytes and SHA-256 of every other file"""

    @property
    def digest(self) -> str:
        """SHA-256 of the training part: of the shards and the tokenizers."""
        names = sorted(name for name in self.files if name not in (VALIDATION, SAMPLE))
        return hashlib.sha256("".join(f"{name} {self.files[name][1]}\n" for name in names).encode()).hexdigest()

    def shard_names(self, side: str) -> list[str]:
        """The files with the ids of one side, in order."""
        return [shard_name(index, side) for index in range(self.shards)]

    def expected_names(self) -> list[str]:
        """All files that a complete folder has, apart from dataset.json and a second tokenizer."""
        names = [VALIDATION, SAMPLE, "tokenizer.json"]
        for side in self.sides:
            names += self.shard_names(side) + ([] if self.is_stream else [starts_name(side)])
        return names

    def save(self, folder: Path) -> None:
        """Write dataset.json, the last file of a folder."""
        write_atomically(folder / MANIFEST, json_bytes(dataclasses.asdict(self)))


def shard_name(index: int, side: str) -> str:
    """The name of a file of token ids.

    >>> shard_name(3, "source")
    'training-00003.source.bin'
    """
    return f"training-{index:05d}.{side}.bin"


def starts_name(side: str) -> str:
    """The name of the file with the start of every sequence in the concatenation of all shards."""
    return f"training.{side}.starts.bin"


def is_shard_folder(path: str | Path) -> bool:
    """Whether this is a complete folder of token shards.

    >>> is_shard_folder("pairs.tsv")
    False
    """
    try:
        return (Path(path) / MANIFEST).is_file()
    except (OSError, ValueError):  # a name that is too long, or with a NUL
        return False


def read_manifest(folder: Path) -> Manifest:
    """Read and check dataset.json."""
    path = folder / MANIFEST
    table = read_json(path)
    if type(table.get("format")) is not int:
        raise RegardError(f"{path}: not written by regard prepare (`format` is missing).", "Pass another folder.")
    if table["format"] > FORMAT:
        raise RegardError(
            f"{path}: format {table['format']} is newer than this version of Regard supports ({FORMAT}).",
            "Upgrade regard.",
        )
    nested = {key: table.pop(key, {}) for key in ("tokenizer", "special", "files", "dropped")}
    manifest = fill_config(Manifest(), table, path)
    try:
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in nested["files"].items()}
        manifest = dataclasses.replace(
            manifest,
            files=files,
            dropped=dataclasses.asdict(CleaningCounts(**{key: int(n) for key, n in nested["dropped"].items()})),
            tokenizer=fill_config(TokenizerConfig(), nested["tokenizer"], path, "tokenizer."),
            special=fill_config(SpecialTokens(), nested["special"], path, "special."),
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise RegardError(f"{path}: tokenizer, special, files or dropped are invalid.", _PREPARE_AGAIN) from None
    corpus = CORPORA.get(manifest.task)
    if corpus is None or (manifest.sides, manifest.is_stream) != (corpus.sides, corpus.is_stream):
        raise RegardError(
            f"{path}: sides or is_stream do not belong to the task {format_value(manifest.task)}.", _PREPARE_AGAIN
        )
    is_plain = all(Path(name).name == name and name not in ("", ".", "..") and "\0" not in name for name in files)
    if (
        manifest.dtype not in _DTYPES
        or not 0 < manifest.shards <= len(files)
        or len(manifest.tokens) != len(manifest.sides)
        or not is_plain
        or not set(manifest.expected_names()) <= files.keys()
    ):
        raise RegardError(f"{path}: the list of files is invalid.", _PREPARE_AGAIN)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise an error if a file is missing or does not have its size."""
    for name, (expected, _) in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise RegardError(f"{folder / name}: the file is missing.", _PREPARE_AGAIN) from None
        if size != expected:
            raise RegardError(f"{folder / name}: expected {expected:,} bytes, got {size:,}.", _PREPARE_AGAIN)
    for side, tokens in zip(manifest.sides, manifest.tokens):
        size = sum(manifest.files[name][0] for name in manifest.shard_names(side))
        if size != tokens * _DTYPES[manifest.dtype]:
            raise RegardError(f"{folder / MANIFEST}: the number of {side} tokens is wrong.", _PREPARE_AGAIN)
        if not manifest.is_stream and manifest.files[starts_name(side)][0] != (
            STARTS_DTYPE.itemsize * (manifest.training + 1)
        ):
            raise RegardError(f"{folder / MANIFEST}: the number of {manifest.unit} is wrong.", _PREPARE_AGAIN)


def check_content(folder: Path, manifest: Manifest, on_progress: OnProgress | None = None) -> None:
    """Raise an error if a file does not have its SHA-256."""
    done, total = 0, sum(size for size, _ in manifest.files.values())
    for name, (size, expected) in manifest.files.items():
        try:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise RegardError(f"{folder / name}: cannot be read: {error.strerror}.", _PREPARE_AGAIN) from None
        if digest != expected:
            raise RegardError(f"{folder / name}: corrupt (its SHA-256 does not match).", _PREPARE_AGAIN)
        done += size
        if on_progress is not None:
            on_progress(done >> 20, total >> 20)


def open_folder(folder: Path) -> Manifest:
    """Read dataset.json and check the files: always their sizes, of small folders also their content."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    if sum(size for size, _ in manifest.files.values()) <= ALWAYS_CHECKED_BYTES:
        check_content(folder, manifest)
    return manifest


def open_tokens(folder: Path, manifest: Manifest, side: str, vocab: int) -> MappedTokens:
    """The ids of one side of all training examples."""
    return MappedTokens([folder / name for name in manifest.shard_names(side)], manifest.dtype, vocab)


def open_sequences(folder: Path, manifest: Manifest, side: str, vocab: int) -> MappedSequences:
    """The training sequences of one side."""
    sequences = MappedSequences(open_tokens(folder, manifest, side, vocab), folder / starts_name(side))
    starts = sequences.starts
    if starts[0] != 0 or starts[-1] != len(sequences.ids) or not sequences.has_valid_starts():
        raise RegardError(f"{folder / starts_name(side)}: corrupt (the starts do not increase).", _PREPARE_AGAIN)
    return sequences


def shard_files(files: Sequence[str | Path]) -> Path | None:
    """The folder of token shards that these data files name; None if they are other files.

    >>> shard_files(["train.en", "train.fr"])
    """
    folders = [Path(file) for file in files if is_shard_folder(file)]
    if folders and len(files) > 1:
        raise RegardError(
            f"{folders[0]} is a folder of token shards; it cannot be combined with other data.",
            "Prepare all data together: regard prepare",
        )
    return folders[0] if folders else None


def file_facts(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, eq=False)
class ShardedSplit:
    """The training examples of a corpus that is not in memory, and a sample of their texts."""

    folder: Path
    manifest: Manifest
    sample: list[Any]
    tokenizers: tuple[Tokenizer, ...] = ()

    def __len__(self) -> int:
        return self.manifest.training


@dataclass(frozen=True)
class ShardedDataset(Dataset[Any]):
    """A dataset whose training examples are encoded and memory-mapped; the validation split is text, in memory."""

    training: ShardedSplit
    validation: Any = field(default_factory=list)

    @property
    def sample(self) -> Any:
        return self.training.sample

    def total(self, measure: Callable[[Any], int]) -> int:
        """The sum of a measure over the training examples, estimated from the sample and the number of characters."""
        if not self.sample:
            return self.training.manifest.characters
        texts = [example if isinstance(example, str) else "".join(example) for example in self.sample]
        characters = max(1, sum(map(len, texts)))
        return round(sum(map(measure, self.sample)) * (self.training.manifest.characters / characters))

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        return self.training.tokenizers

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The tokenizer settings with which the shards were made."""
        return self.training.manifest.tokenizer

    def sequences(self, side: int) -> MappedSequences:
        """The encoded training texts of one side."""
        split = self.training
        vocab = split.tokenizers[side].vocab_size
        return open_sequences(split.folder, split.manifest, split.manifest.sides[side], vocab)

    def pairs(self, max_len: int) -> tuple[MappedSequences, MappedSequences, int]:
        """Both sides of the training pairs without those of `max_len` tokens or more on either side, and their number.

        In training on text, `encode_pairs` leaves out the same pairs.
        """
        source, target = self.sequences(0), self.sequences(1)
        fits = np.maximum(source.lengths, target.lengths) < max_len
        if fits.all():
            return source, target, 0
        rows = np.flatnonzero(fits).astype(np.uint32 if len(fits) < 1 << 32 else np.int64)
        if not len(rows):
            raise RegardError(f"All {len(fits)} pairs are longer than {max_len} tokens.", hint="Raise model.max_len.")
        return source.select(rows), target.select(rows), len(fits) - len(rows)

    def stream(self, special: SpecialTokens) -> MappedTokens:
        """The encoded training documents as one stream of ids, with special tokens."""
        split = self.training
        if split.manifest.special != special:
            raise RegardError(
                f"{split.folder} was prepared with other special tokens than those of the model to fine-tune.",
                "Prepare the data again: regard prepare --tokenizer MODEL",
            )
        return open_tokens(split.folder, split.manifest, split.manifest.sides[0], split.tokenizers[0].vocab_size)

    @property
    def fingerprints(self) -> dict[str, Any]:
        manifest = self.training.manifest
        return {
            "training": {self.unit: manifest.training, "sha256": manifest.digest},
            "validation": {self.unit: len(self.validation), "sha256": digest(self.validation)},
        }


def open_shards(folder: str | Path) -> ShardedDataset:
    """Open a folder of token shards; its files are checked (see `open_folder`) and memory-mapped.

    >>> open_shards("no-such-folder")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder/dataset.json: the file is missing. Is the folder complete?
    """
    manifest = open_folder(Path(folder))
    folder = Path(folder).absolute()  # worker processes may have another working directory
    tokenizers = read_tokenizers(folder, foreign=manifest.is_foreign)
    split = ShardedSplit(folder, manifest, read_examples(folder / SAMPLE, manifest), tokenizers)
    validation = read_examples(folder / VALIDATION, manifest)
    return ShardedDataset(split, validation, manifest.unit, dropped=CleaningCounts(**manifest.dropped).reasons)


def read_shards(task: str, config: DataConfig) -> ShardedDataset | None:
    """The dataset of token shards that the data config names; None if it names other files."""
    folder = shard_files(config.files)
    if folder is None:
        return None
    dataset = open_shards(folder)
    prepared = dataset.training.manifest.task
    if prepared != task:
        raise RegardError(
            f"{folder} was prepared for the task {prepared}, not {task}.",
            f"Prepare the data again with --task {task}, or train with --task {prepared}.",
        )
    for name in ("validation", "limit", "columns", "prefixes", "weights"):
        if getattr(config, name):
            raise RegardError(
                f"data.{name} has no effect on token shards.",
                f"Pass it to regard prepare, and leave it out for {folder}.",
            )
    return dataset


def check_no_folder(files: Sequence[str]) -> None:
    """Raise an error for a folder that is not a complete folder of token shards.

    >>> check_no_folder(["pairs.tsv"])
    """
    for file in files:
        if Path(file).is_dir():
            raise RegardError(
                f"{file} is a folder without {MANIFEST}, so it is not a complete folder of token shards.",
                "Pass files, or run regard prepare again; folders of .txt files are data for --task language or mask.",
            )


def shards_task(files: Any) -> str | None:
    """The task for which token shards were prepared; None if `files` are other files.

    >>> shards_task(["pairs.tsv"])
    """
    if not isinstance(files, list | tuple) or not all(isinstance(file, str | Path) for file in files):
        return None
    folder = shard_files(files)
    return None if folder is None else read_manifest(folder).task


def read_examples(path: Path, manifest: Manifest) -> list[Any]:
    """The examples in a JSONL file of the folder: texts, or pairs of texts."""
    examples, is_pair = [], len(manifest.sides) > 1
    for number, line in enumerate(read_file(path).splitlines(), 1):
        try:
            value = parse_json(line.decode())
        except (ValueError, RecursionError):
            value = None
        texts = value if is_pair else [value]
        is_valid = isinstance(texts, list) and len(texts) == len(manifest.sides)
        if not is_valid or not all(isinstance(text, str) for text in texts):
            raise RegardError(f"{path}, line {number}: not a valid example.", "Prepare the data again.")
        examples.append(tuple(texts) if is_pair else value)
    return examples
