"""The folder of token shards: file names, dataset.json, and integrity checks."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.config_reader import fill_config, json_bytes, read_json
from regard.data.batching.mapped_sequences import STARTS_DTYPE, MappedSequences, MappedTokens
from regard.data.text.cleaning import CleaningCounts
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.files import write_atomically
from regard.progress import OnProgress
from regard.ranges import Natural, format_value
from regard.training.recipe import TokenizerConfig
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
