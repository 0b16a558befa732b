"""A dataset of token shards: memory-mapped training examples, and the validation split as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.config_reader import parse_json
from regard.data import Tokenizer
from regard.data.batching.mapped_sequences import MappedSequences, MappedTokens
from regard.data.text.cleaning import CleaningCounts
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.files import read_file
from regard.pipelines import read_tokenizers
from regard.training.datasets import Dataset, digest
from regard.training.recipe import DataConfig, TokenizerConfig
from regard.training.shards.folder import (
    MANIFEST,
    SAMPLE,
    VALIDATION,
    Manifest,
    open_folder,
    open_sequences,
    open_tokens,
    read_manifest,
    shard_files,
)


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
