"""Datasets: training examples and a validation split."""

import hashlib
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Int

from regard.data import ImageSet, RaggedImages, Tokenizer, clean, read_pairs, split_validation
from regard.data.text.cleaning import CleaningCounts
from regard.data.text.readers import built_in_part, stream_pairs
from regard.errors import RegardError
from regard.training.recipe import DataConfig

Example = TypeVar("Example")
Split = TypeVar("Split", bound=Sized)
Pairs = list[tuple[str, str]]
Images = ImageSet | RaggedImages


@dataclass(frozen=True)
class Dataset(Generic[Split]):
    """Training examples, the validation split, and the plural noun for examples.

    >>> Dataset(["a", "b"], ["c"], "texts").describe()
    '2 texts for training, 1 for validation'
    """

    training: Split
    validation: Split
    unit: str = "pairs"
    detail: str = ""
    """properties of all examples for the log, such as the image size"""
    dropped: str = ""
    """counts of the examples that cleaning dropped, by reason"""

    @property
    def sample(self) -> Any:
        """Training examples to inspect for suggestions: all, or a part if they are not in memory."""
        return self.training

    def total(self, measure: Callable[[Any], int]) -> int:
        """The sum of a measure, such as the number of words, over the training examples."""
        return sum(map(measure, self.training))  # type: ignore[call-overload]

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        """The tokenizers of a dataset that is already encoded; otherwise none."""
        return ()

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Size and SHA-256 of both splits, as stored in training.json."""
        return {
            name: {self.unit: len(split), "sha256": digest(split)}
            for name, split in (("training", self.training), ("validation", self.validation))
        }

    def describe(self) -> str:
        """Sizes of both splits and the dropped examples, for the log."""
        sizes = describe_split(len(self.training), len(self.validation), self.unit, self.detail)
        return f"{sizes}; dropped: {self.dropped}" if self.dropped else sizes


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """A subset of a set of images, by row index."""

    images: Any
    """an ImageSet (one size) or RaggedImages (different sizes)"""
    rows: Int[np.ndarray, "M"]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_ragged(self) -> bool:
        """Whether the images have different sizes."""
        return isinstance(self.images, RaggedImages)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels; for images of different sizes, the maximum height and width."""
        images = self.images
        if self.is_ragged:
            side = images.longest // images.patch * images.patch
            return side, side, len(images.mean)
        _, height, width, channels = images.pixels.shape
        return height, width, channels

    @property
    def config_sizes(self) -> dict[str, int]:
        """The model config fields that are derived from the image size."""
        height, width, _ = self.shape
        longest = self.images.longest if self.is_ragged else 0
        return dict(image_height=height, image_width=width, longest_side=longest)


def describe_split(training: int, validation: int, unit: str, detail: str = "") -> str:
    """The sizes of both splits, for the log; `unit` is a plural noun.

    >>> describe_split(19600, 400, "pairs"), describe_split(1, 1, "documents")
    ('19,600 pairs for training, 400 for validation', '1 document for training, 1 for validation')
    """
    examples = f"{count_units(training, unit)} {detail}".rstrip()
    return f"{examples} for training, {validation:,} for validation"


def count_units(count: int, unit: str) -> str:
    """A count with its unit, a plural noun.

    >>> count_units(1200, "images"), count_units(1, "images")
    ('1,200 images', '1 image')
    """
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def digest(split: Any) -> str:
    """SHA-256 of a split; pairs are hashed as lines of a TSV file.

    >>> digest([("a", "b")]) == hashlib.sha256(b"a\\tb\\n").hexdigest()
    True
    """
    if isinstance(split, ImageSplit):
        return hashlib.sha256(split.images.digest.encode() + split.rows.astype("<i8").tobytes()).hexdigest()
    result = hashlib.sha256()
    for example in split:
        text = "\t".join(example) + "\n" if type(example) is tuple else repr(example)
        result.update(text.encode())
    return result.hexdigest()


def split_dataset(
    examples: Sequence[Example], validation: Sequence[Example], unit: str, key: Callable[[Example], Any]
) -> Dataset[Sequence[Example]]:
    """A dataset with the given validation examples or, if there are none, with a deterministic validation split.

    Examples with the same `key` stay in one split, so that no validation example was trained on.
    """
    if not validation:
        if len({key(example) for example in examples}) < 2:
            raise too_few_examples(unit)
        splits = split_validation([(key(example), example) for example in examples], seed=0)
        examples, validation = ([example for _, example in split] for split in splits)
    return Dataset(examples, validation, unit)


def keep_known_names(dataset: Dataset[Any], names: Callable[[Any], Iterable[str]]) -> Dataset[Any]:
    """Move validation examples with a label (or tag) that no training example has to the training examples.

    >>> keep_known_names(Dataset(["a", "b"], ["b", "c"], "texts"), list)
    Dataset(training=['a', 'b', 'c'], validation=['b'], unit='texts', detail='', dropped='')
    """
    known = {name for example in dataset.training for name in names(example)}
    validation = [example for example in dataset.validation if known.issuperset(names(example))]
    if not validation:
        raise too_few_examples(dataset.unit)
    rare = [example for example in dataset.validation if not known.issuperset(names(example))]
    return Dataset([*dataset.training, *rare], validation, dataset.unit)


def too_few_examples(unit: str) -> RegardError:
    """The error for data that are too small for a validation split."""
    return RegardError(f"Too few {unit} for a validation split.", "Add more data, or pass --validation files.")


def read_pair_dataset(config: DataConfig) -> Dataset[Pairs]:
    """Read and clean sentence pairs; without validation files, split them.

    >>> len(read_pair_dataset(DataConfig(limit=100)).training)
    100
    """
    training, validation, counts = read_pair_splits(config, config.files, config.validation)
    return Dataset(training, validation, dropped=counts.reasons)


def read_pair_splits(
    config: DataConfig, files: Sequence[str], validation: Sequence[str]
) -> tuple[Pairs, Pairs, CleaningCounts]:
    """Training pairs, validation pairs, and the counts of dropped pairs."""
    pairs, counts = clean(islice(stream_pairs(files, config.columns), config.limit or None), config.max_ratio)
    if not pairs:
        raise RegardError(
            f"{' '.join(files)}: no pair is left after cleaning.", f"Check the files; dropped: {counts.reasons}."
        )
    validation = validation or built_in_part(files, "validation")
    if not validation:
        # Independent of the seed, so that runs with different seeds are comparable and can be ensembled.
        return *split_validation(pairs, seed=0), counts
    held_out = [pair for pair in read_pairs(validation, config.columns) if all(side.strip() for side in pair)]
    if not held_out:
        raise RegardError(f"{' '.join(validation)}: every pair has an empty side.", "Pass other validation files.")
    return pairs, held_out, counts


def repeat_pairs(pairs: Pairs, weight: float) -> Pairs:
    """Repeat the pairs `weight` times; for the fractional part, add a deterministic sample.

    >>> len(repeat_pairs([("a", "b"), ("c", "d")], 2.5))
    5
    """
    repeats, fraction = divmod(weight, 1.0)
    extra = np.random.default_rng(0).permutation(len(pairs))[: round(fraction * len(pairs))]
    return pairs * int(repeats) + [pairs[i] for i in sorted(extra.tolist())]
