"""Datasets: training examples and a validation split."""

import hashlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Int

from regard.data import Counts, ImageSet, RaggedImages, clean, read_pairs, split_validation
from regard.data.phrasebook import phrasebook_pairs
from regard.errors import RegardError
from regard.training.recipe import PHRASEBOOK, DataConfig

Example = TypeVar("Example")
Split = TypeVar("Split", bound=Sized)
Pairs = list[tuple[str, str]]
Images = ImageSet | RaggedImages


@dataclass(frozen=True)
class Dataset(Generic[Split]):
    """Training examples, the validation split, and what an example is called.

    >>> Dataset(["a", "b"], ["c"], "texts").describe()
    '2 texts for training, 1 for validation'
    """

    training: Split
    validation: Split
    unit: str = "pairs"
    detail: str = ""
    """what all examples have in common, such as the size of images"""
    left_out: str = ""
    """how many examples cleaning dropped, and why"""

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Sizes and SHA-256 of both splits, as training.json stores them."""
        return {
            name: {self.unit: len(split), "sha256": digest(split)}
            for name, split in (("training", self.training), ("validation", self.validation))
        }

    def describe(self) -> str:
        """A sentence for the log."""
        called = f"{self.unit} {self.detail}".rstrip()
        sizes = describe_split(len(self.training), len(self.validation), called)
        return f"{sizes}; left out: {self.left_out}" if self.left_out else sizes


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Some rows of a set of images."""

    images: Any
    """an ImageSet (one size) or RaggedImages (many sizes)"""
    rows: Int[np.ndarray, "M"]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_ragged(self) -> bool:
        """Whether each image has its own size."""
        return isinstance(self.images, RaggedImages)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels; with own sizes, the largest height and width possible."""
        images = self.images
        if self.is_ragged:
            side = images.longest // images.patch * images.patch
            return side, side, len(images.mean)
        _, height, width, channels = images.pixels.shape
        return height, width, channels

    @property
    def config_sizes(self) -> dict[str, int]:
        """The fields of a model's config that follow from the sizes of the images."""
        height, width, _ = self.shape
        longest = self.images.longest if self.is_ragged else 0
        return dict(image_height=height, image_width=width, longest_side=longest)


def describe_split(training: int, validation: int, unit: str) -> str:
    """The sizes of both splits, for the log.

    >>> describe_split(19600, 400, "pairs")
    '19,600 pairs for training, 400 for validation'
    """
    return f"{training:,} {unit} for training, {validation:,} for validation"


def digest(split: Any) -> str:
    """SHA-256 of a split; a pair counts as a line of a TSV file.

    >>> digest([("a", "b")]) == hashlib.sha256(b"a\\tb\\n").hexdigest()
    True
    """
    if isinstance(split, ImageSplit):
        return hashlib.sha256(split.images.digest.encode() + split.rows.astype("<i8").tobytes()).hexdigest()
    found = hashlib.sha256()
    for example in split:
        text = "\t".join(example) + "\n" if type(example) is tuple else repr(example)
        found.update(text.encode())
    return found.hexdigest()


def split_dataset(
    examples: Sequence[Example], validation: Sequence[Example], unit: str, key: Callable[[Example], Any]
) -> Dataset[Sequence[Example]]:
    """A dataset with the given validation examples, or else with a part of the examples, the same for every run.

    Examples with the same `key` stay in one split, so that validation contains nothing that was trained on.
    """
    if not validation:
        if len({key(example) for example in examples}) < 2:
            raise too_few(unit)
        splits = split_validation([(key(example), example) for example in examples], seed=0)
        examples, validation = ([example for _, example in split] for split in splits)
    return Dataset(examples, validation, unit)


def too_few(unit: str) -> RegardError:
    """The error for data of which no validation split can be taken."""
    return RegardError(
        f"There are too few {unit} to set some aside for validation.",
        "Give more of them, or validation files of their own.",
    )


def read_pair_dataset(config: DataConfig) -> Dataset[Pairs]:
    """Sentence pairs: read, cleaned and, without validation files, split.

    >>> len(read_pair_dataset(DataConfig(phrasebook_size=100)).training)
    100
    """
    if len(config.languages) not in (0, 2):
        raise RegardError(
            f"data.languages = {list(config.languages)}; expected two codes.",
            "Name two, for example en fr.",
        )
    if config.files == (PHRASEBOOK,):
        training = [(pair.source, pair.target) for pair in phrasebook_pairs("train", config.phrasebook_size)]
        return Dataset(training, [(pair.source, pair.target) for pair in phrasebook_pairs("val", 500)])
    training, validation, counts = read_pair_splits(config, config.files, config.validation)
    return Dataset(training, validation, left_out=counts.reasons)


def read_pair_splits(
    config: DataConfig, files: Sequence[str], validation: Sequence[str]
) -> tuple[Pairs, Pairs, Counts]:
    """Training pairs, validation pairs, and what cleaning dropped."""
    pairs, counts = clean(read_pairs(files, config.columns), config.max_ratio)
    if not pairs:
        raise RegardError(f"{' '.join(files)}: no pair is left after cleaning.", f"Dropped: {counts}.")
    if not validation:
        # The same split for every seed of a run: their scores are comparable, and their models can be an ensemble.
        return *split_validation(pairs, seed=0), counts
    held_out = [pair for pair in read_pairs(validation, config.columns) if all(side.strip() for side in pair)]
    if not held_out:
        raise RegardError(f"{' '.join(validation)}: every pair has an empty side.", "Give other pairs.")
    return pairs, held_out, counts
