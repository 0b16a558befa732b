"""What the tasks of pictures share: how they are read and set aside, batches, and recipes that suit them."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from regard.data import (
    AugmentConfig,
    Augmented,
    ImageBatch,
    ImageBatches,
    ImageSet,
    RaggedBatches,
    RaggedImages,
    read_images,
    read_ragged,
)
from regard.data.special import Special
from regard.errors import RegardError
from regard.models import ViTConfig
from regard.training.datasets import describe_split
from regard.training.recipe import DataConfig, Recipe, TaskName, TokenizerConfig, TrainConfig
from regard.training.report import Tell
from regard.training.tasks.base import Encoded, Shape, Tokenizers, has_gpu, suggested_training, warn_of_rare_labels

Need = Literal["labels", "masks", "nothing"]
# Of each label this share of the pictures is set aside, and at most so many in all.
SHARE, MOST = 0.1, 2000
# Pixels of masks that have this number belong to nothing, as in other programs' files.
NOTHING = 255
# A picture has at least so many patches, where the choice is ours, and patches no longer sides than this.
FEWEST, LONGEST = 49, 16
# Per label; below it a model trained from scratch mostly guesses.
ENOUGH_IMAGES = 200


Images = ImageSet | RaggedImages


class Part(NamedTuple):
    """Some of the pictures."""

    images: Any
    """of one size, or of many: an ImageSet or RaggedImages"""
    rows: Int[np.ndarray, "M"]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures to learn from and to be judged by; where they lie decoded in a cache, `origin` is how to read them."""

    training: Part
    validation: Part
    origin: tuple[DataConfig, Need] | None = None

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Sizes and SHA-256 of what is trained on and validated by."""
        return {
            name: {"pictures": len(part.rows), "sha256": _digest(part)}
            for name, part in (("training", self.training), ("validation", self.validation))
        }

    @property
    def ragged(self) -> bool:
        """Each has its own size."""
        return isinstance(self.training.images, RaggedImages)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels; where each has its own size, those of the largest that there may be."""
        images = self.training.images
        if self.ragged:
            side = images.longest // images.patch * images.patch
            return side, side, len(images.mean)
        _, height, width, channels = images.pixels.shape
        return height, width, channels

    @property
    def sizes(self) -> dict[str, int]:
        """What a model's config says of the pictures' sizes."""
        height, width, _ = self.shape
        longest = self.training.images.longest if self.ragged else 0
        return dict(image_height=height, image_width=width, longest_side=longest)

    def describe(self) -> str:
        height, width, channels = self.shape
        size = f"their own sizes up to {height}" if self.ragged else f"{height}×{width}"
        kind = f"{size} {'grey' if channels == 1 else 'colour'} pixels"
        return describe_split(len(self.training.rows), len(self.validation.rows), f"pictures of {kind}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Members of a team map the pictures themselves instead of being sent them.
        return super().__reduce_ex__(protocol) if self.origin is None else (read_pictures, self.origin)


def read_pictures(config: DataConfig, need: Need, tell: Tell | None = None) -> Pictures:
    """The pictures of a recipe's files; those to validate with are of the same size, and have the same labels."""
    if config.size and config.longest:
        raise RegardError(
            "data.size brings all pictures to one size, and data.longest lets each keep its own.",
            "Leave out one of them.",
        )
    training = _read(config, config.files, config.size, config.channels, tell)
    refuse_lack(training, need)
    if need == "labels" and len(training.names) < 2:
        raise RegardError(
            f"Every picture has the label {training.names[0]!r}: there is nothing to tell apart.",
            "Give pictures of at least two labels.",
        )
    origin = (config, need) if config.cache else None
    if not config.validation:
        rows, aside = set_aside(training.labels)
        if not len(aside):
            raise RegardError(
                "There are too few pictures to set some aside for validation.",
                "Give more of them, or validation files of their own.",
            )
        return Pictures(Part(training, rows), Part(training, aside), origin)
    size = config.size if isinstance(training, RaggedImages) else training.pixels.shape[1:3]
    validation = _read(config, config.validation, size, len(training.mean), tell)
    refuse_lack(validation, need)
    if need == "labels":
        validation = validation.with_names(training.names)
    whole, judged = (Part(one, np.arange(len(one))) for one in (training, validation))
    return Pictures(whole, judged, origin)


def _read(
    config: DataConfig, files: Sequence[str], size: int | tuple[int, int], channels: int, tell: Tell | None
) -> Images:
    common: dict[str, Any] = dict(channels=channels, label=config.label, on_bad=config.on_bad)
    common |= dict(cache=config.cache or None, progress=tell)
    if config.longest:
        patch = config.patch or patch_within(config.longest)
        return read_ragged(files, patch=patch, longest=config.longest, **common)
    return read_images(files, size=size, **common)


def refuse_lack(images: Images, need: Need) -> None:
    """An error for pictures without labels, or without masks, where these are needed."""
    if need == "labels" and not images.names:
        raise RegardError(
            "The pictures have no labels.",
            "Give a folder with a folder for each class, or a table with a column label.",
        )
    if need == "masks" and not images.mask_values:
        raise RegardError(
            "The pictures have no masks.",
            "Give a folder with the folders images and masks, or a table with a column mask.",
        )


def set_aside(labels: Int[np.ndarray, "M"]) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "L"]]:
    """Which pictures to learn from and which to be judged by: a tenth of each label's, the same ones for every run.

    A label of fewer than five pictures is not judged.

    >>> [len(rows) for rows in set_aside(np.repeat([0, 1, 2], [40, 5, 3]))]
    [43, 5]
    """
    order = np.random.default_rng(0).permutation(len(labels))
    share = min(SHARE, MOST / len(labels))
    own = (order[labels[order] == label] for label in np.unique(labels))
    aside = np.sort(np.concatenate([rows[: max(len(rows) >= 5, int(share * len(rows)))] for rows in own]))
    return np.setdiff1d(np.arange(len(labels)), aside), aside


def _digest(part: Part) -> str:
    return hashlib.sha256(part.images.digest.encode() + part.rows.astype("<i8").tobytes()).hexdigest()


class ImageTask(ABC):
    """A task of pictures; the tasks differ in what they need, in the loss, and in what is good."""

    unit = "picture"
    need: ClassVar[Need]

    def read(self, config: DataConfig, tell: Tell | None = None) -> Pictures:
        """The pictures of a recipe's files; `tell` is told how far it is."""
        return read_pictures(config, self.need, tell)

    def make_tokenizers(self, corpus: Pictures, config: TokenizerConfig) -> Tokenizers:
        return ()

    def encode(
        self, corpus: Pictures, tokenizers: Tokenizers, special: Special, recipe: Recipe, model: Any, shape: Shape
    ) -> Encoded:
        for option in ("r_drop", "source_vectors", "target_vectors"):
            if getattr(recipe.train, option):
                raise RegardError(f"train.{option} is for texts, and these are pictures.", "Leave it out.")
        if (corpus.shape[2], model.channels) == (3, 1):
            raise RegardError(
                "The pictures have colours, and the model takes grey ones.", "Set data.channels to 1 to have them grey."
            )
        if corpus.ragged:
            return self._packed(corpus, recipe.augment, model, shape)
        training, validation = (
            ImageBatches(
                part.images,
                part.rows,
                partial(self.targets, part.images, model),
                size=shape.images,
                seed=shape.seed,
                augment=recipe.augment,
            )
            for part in (corpus.training, corpus.validation)
        )
        first = next(training.epoch(0))
        # What cannot be done to pictures is said before the first step.
        self.changed(replace(first, inputs=(first.pixels[:2],), targets=first.targets[:2]), model)
        rows, columns = model.grid
        return Encoded(training, validation, f"a picture has {rows}×{columns} patches of {model.patch}×{model.patch}")

    def _packed(self, corpus: Pictures, augment: AugmentConfig, model: Any, shape: Shape) -> Encoded:
        """Batches of pictures of their own sizes."""
        patch = corpus.training.images.patch
        if model.patch != patch:
            raise RegardError(
                f"Sides of pictures are multiples of {patch}, and the model's patches have {model.patch}×{model.patch}"
                " pixels.",
                f"Set data.patch to {model.patch}.",
            )
        if augment.mixup or augment.cutmix:
            raise RegardError(
                "Pictures of different sizes cannot be mixed.",
                "Set augment.mixup and augment.cutmix to 0, or data.size instead of data.longest.",
            )
        training, validation = (
            RaggedBatches(
                part.images,
                part.rows,
                partial(self.targets, part.images, model),
                budget=shape.budget,
                prefix=model.prefix,
                seed=shape.seed,
                augment=augment,
            )
            for part in (corpus.training, corpus.validation)
        )
        training.smallest().changed(model.channels, patch)  # what cannot be done to it is said before the first step
        note = f"a picture has {training.usual:.0f} tokens on average, of {patch}×{patch} pixels each"
        return Encoded(training, validation, note)

    def reasons(self, corpus: Pictures, recipe: Recipe) -> list[str]:
        height, width, _ = corpus.shape
        where = "" if has_gpu() else "; a small model, since there is no GPU"
        return [f"size, patches and steps: {len(corpus.training.rows):,} images of {height}×{width} pixels{where}"]

    def warnings(self, corpus: Pictures) -> list[str]:
        images, rows = corpus.training
        if self.need == "labels":
            labels = Counter(images.names[label] for label in images.labels[rows].tolist())
            return warn_of_rare_labels(labels, "images", ENOUGH_IMAGES)
        if len(rows) >= 10 * ENOUGH_IMAGES:
            return []
        return [f"{len(rows):,} images are few for a model trained from scratch: fine-tune one with --from."]

    @abstractmethod
    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B *pixels"]:
        """What should come out for some of the pictures."""

    @abstractmethod
    def changed(self, batch: ImageBatch, model: Any) -> Augmented:
        """The pictures of a batch and what should come out, as the model is given them."""


class _Size(NamedTuple):
    """A shape of model that does well on up to so many pictures, and how often it sees them."""

    pictures: float
    width: int
    heads: int
    layers: int
    batch: int
    passes: int


# Little data want a small model and many passes.
_SIZES = (
    _Size(3_000, width=128, heads=4, layers=4, batch=64, passes=60),
    _Size(30_000, width=192, heads=6, layers=6, batch=128, passes=40),
    _Size(float("inf"), width=192, heads=6, layers=8, batch=256, passes=30),
)
# Without a GPU: about a quarter of an hour on two cores for a few thousand images of 80×80 pixels.
_CPU_SIZE = _Size(float("inf"), width=128, heads=4, layers=4, batch=64, passes=30)


def suggested(
    task: TaskName,
    corpus: Pictures,
    fine_tune: bool,
    *,
    passes: float = 1.0,
    model: dict[str, Any],
    augment: dict[str, Any],
    train: dict[str, Any],
) -> Recipe:
    """A recipe for these pictures; `passes` is how much more often than usual they are seen."""
    height, width, channels = corpus.shape
    count = len(corpus.training.rows)
    size = next(size for size in _SIZES if count <= size.pictures) if has_gpu() else _CPU_SIZE
    images = corpus.training.images
    patch = images.patch if corpus.ragged else patch_for(height, width)
    batch = min(size.batch, count)
    steps = max(200, int(passes * size.passes * (0.25 if fine_tune else 1) * count / batch))
    # Digits and letters, which are grey most often, are others when they are mirrored.
    moved: dict[str, Any] = dict(crop=min(height, width) // 8) | (dict(flip=0.5) if channels == 3 else {})
    tokens = TrainConfig.batch_tokens
    if corpus.ragged:
        # None is moved out of sight, and a batch holds as many as usual.
        moved["crop"] = min(moved["crop"], int(images.sizes.min()) - 1)
        patches = (images.sizes // patch).prod(1)
        tokens = -(-int(max(batch * patches.mean(), patches.max() + 1)) // 256) * 256
    sizes: dict[str, Any] = dict(
        width=size.width,
        heads=size.heads,
        layers=size.layers,
        feedforward=4 * size.width,
        drop_path=0.1,
        channels=channels,
        patch=patch,
        # Small convolutions know from the beginning that neighbours belong together, which little data do not teach.
        patches="stem" if patch & (patch - 1) == 0 else "linear",
        positions="rotary",
        pooling="mean",
        mean=tuple(round(one, 4) for one in images.mean),
        std=tuple(round(max(one, 1e-3), 4) for one in images.std),
    )
    usual: dict[str, Any] = dict(batch_images=batch, weight_decay=0.05, ema=0.999 if steps > 5000 else 0.99)
    lr = 1e-4 if fine_tune else 1e-3
    return Recipe(
        task=task,
        model=ViTConfig(**(sizes | model)),
        train=suggested_training(steps, tokens, lr, **(usual | train)),
        augment=AugmentConfig(**(moved | augment)),
    )


def patch_within(longest: int) -> int:
    """The side of patches that suits pictures of all sizes up to this: the largest power of 2 that leaves enough.

    >>> [patch_within(longest) for longest in (28, 64, 100, 224, 1000)]
    [4, 8, 8, 16, 16]
    """
    sides = (1 << power for power in range(LONGEST.bit_length()))
    return max((side for side in sides if (longest // side) ** 2 >= FEWEST), default=1)


def patch_for(height: int, width: int) -> int:
    """The side of patches that suits pictures of this size: the largest power of 2 that leaves enough of them.

    >>> [patch_for(side, side) for side in (28, 32, 80, 96, 224, 45)]
    [4, 4, 8, 8, 16, 5]
    """
    sides = [side for side in range(1, LONGEST + 1) if height % side == 0 and width % side == 0]
    enough = [side for side in sides if height * width // side**2 >= FEWEST] or [1]
    even = [side for side in enough if side & (side - 1) == 0]
    patch = max(even) if max(even) > 1 else max(enough)
    if patch == 1 and min(height, width) > 16:
        raise RegardError(
            f"Pictures of {height}×{width} pixels cannot be cut into equal patches.",
            f"Let them be resized: --data.size {max(8, min(height, width) // 8 * 8)}",
        )
    return patch
