"""What image tasks share: reading, the validation split, batches and suggested recipes."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from regard.data import (
    AugmentConfig,
    Augmented,
    ImageBatch,
    ImageBatches,
    RaggedBatches,
    RaggedImages,
    read_images,
    read_ragged,
)
from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.models import ViTConfig
from regard.training.datasets import Dataset, Images, ImageSplit, too_few
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.registry import TaskName
from regard.training.run_log import OnProgress
from regard.training.tasks.task import (
    Encoded,
    Shape,
    Task,
    Tokenizers,
    has_gpu,
    suggested_training,
    warn_of_rare_labels,
)

Need = Literal["labels", "masks", "nothing"]
# Share of the images of each label in the validation split, and the most in all.
VALIDATION_SHARE, MOST_VALIDATION = 0.1, 2000
# The value of mask pixels without a label, as in other formats.
NO_LABEL = 255
# Suggested patches: at least this many per image, and no longer sides than this.
MIN_PATCHES, MAX_PATCH = 49, 16
# Per label; below it a model trained from scratch mostly guesses.
ENOUGH_IMAGES = 200


def read_image_dataset(config: DataConfig, need: Need, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
    """The images of a recipe's files. Validation images have the size and the labels of the training images."""
    if config.size and config.longest:
        raise RegardError(
            "data.size brings all pictures to one size, and data.longest lets each keep its own.",
            "Leave out one of them.",
        )
    training = _read(config, config.files, config.size, config.channels, on_progress)
    check_annotations(training, need)
    if need == "labels" and len(training.names) < 2:
        raise RegardError(
            f"Every picture has the label {training.names[0]!r}: there is nothing to tell apart.",
            "Give pictures of at least two labels.",
        )
    if not config.validation:
        rows, validation_rows = split_by_label(training.labels)
        if not len(validation_rows):
            raise too_few("pictures")
        return _image_dataset(ImageSplit(training, rows), ImageSplit(training, validation_rows))
    size = config.size if isinstance(training, RaggedImages) else training.pixels.shape[1:3]
    validation = _read(config, config.validation, size, len(training.mean), on_progress)
    check_annotations(validation, need)
    if need == "labels":
        validation = validation.with_names(training.names)
    return _image_dataset(*(ImageSplit(one, np.arange(len(one))) for one in (training, validation)))


def _image_dataset(training: ImageSplit, validation: ImageSplit) -> Dataset[ImageSplit]:
    height, width, channels = training.shape
    size = f"their own sizes up to {height}" if training.is_ragged else f"{height}×{width}"
    detail = f"of {size} {'grey' if channels == 1 else 'colour'} pixels"
    return Dataset(training, validation, "pictures", detail)


def _read(
    config: DataConfig, files: Sequence[str], size: int | tuple[int, int], channels: int, on_progress: OnProgress | None
) -> Images:
    common: dict[str, Any] = dict(channels=channels, label=config.label, on_bad=config.on_bad)
    common |= dict(cache=config.cache or None, progress=on_progress)
    if config.longest:
        patch = config.patch or patch_within(config.longest)
        return read_ragged(files, patch=patch, longest=config.longest, **common)
    return read_images(files, size=size, **common)


def check_annotations(images: Images, need: Need) -> None:
    """An error for images without the labels or masks that a task needs."""
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


def split_by_label(labels: Int[np.ndarray, "M"]) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "L"]]:
    """Rows for training and for validation: a tenth of each label's, the same for every run.

    A label of fewer than five images is not validated.

    >>> [len(rows) for rows in split_by_label(np.repeat([0, 1, 2], [40, 5, 3]))]
    [43, 5]
    """
    order = np.random.default_rng(0).permutation(len(labels))
    share = min(VALIDATION_SHARE, MOST_VALIDATION / len(labels))
    own = (order[labels[order] == label] for label in np.unique(labels))
    aside = np.sort(np.concatenate([rows[: max(len(rows) >= 5, int(share * len(rows)))] for rows in own]))
    return np.setdiff1d(np.arange(len(labels)), aside), aside


class ImageTask(Task):
    """A task on images. Image tasks differ in the annotations they need, in the loss and in the metrics."""

    unit = "picture"
    pipeline = "image_model"
    need: ClassVar[Need]

    def read(self, config: DataConfig, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
        """The images of a recipe's files; `on_progress` is called while they are decoded."""
        return read_image_dataset(config, self.need, on_progress)

    def make_tokenizers(self, dataset: Dataset[ImageSplit], config: TokenizerConfig) -> Tokenizers:
        return ()

    def encode(
        self,
        dataset: Dataset[ImageSplit],
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: Any,
        shape: Shape,
    ) -> Encoded:
        for option in ("r_drop", "source_vectors", "target_vectors"):
            if getattr(recipe.train, option):
                raise RegardError(f"train.{option} is for texts, and these are pictures.", "Leave it out.")
        if (dataset.training.shape[2], model.channels) == (3, 1):
            raise RegardError(
                "The pictures have colours, and the model takes grey ones.", "Set data.channels to 1 to have them grey."
            )
        if dataset.training.is_ragged:
            return self._packed(dataset, recipe.augment, model, shape)
        training, validation = (
            ImageBatches(
                part.images,
                part.rows,
                partial(self.targets, part.images, model),
                size=shape.images,
                seed=shape.seed,
                augment=recipe.augment,
            )
            for part in (dataset.training, dataset.validation)
        )
        first = next(training.epoch(0))
        # Invalid augmentations are reported before the first step.
        self.changed(replace(first, inputs=(first.pixels[:2],), targets=first.targets[:2]), model)
        rows, columns = model.grid
        return Encoded(training, validation, f"a picture has {rows}×{columns} patches of {model.patch}×{model.patch}")

    def _packed(self, dataset: Dataset[ImageSplit], augment: AugmentConfig, model: Any, shape: Shape) -> Encoded:
        """Batches of pictures of their own sizes."""
        patch = dataset.training.images.patch
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
            for part in (dataset.training, dataset.validation)
        )
        training.smallest().changed(model.channels, patch)  # invalid augmentations are reported before the first step
        note = f"a picture has {training.usual:.0f} tokens on average, of {patch}×{patch} pixels each"
        return Encoded(training, validation, note)

    def reasons(self, dataset: Dataset[ImageSplit], recipe: Recipe) -> list[str]:
        height, width, _ = dataset.training.shape
        where = "" if has_gpu() else "; a small model, since there is no GPU"
        return [f"size, patches and steps: {len(dataset.training):,} images of {height}×{width} pixels{where}"]

    def warnings(self, dataset: Dataset[ImageSplit]) -> list[str]:
        images, rows = dataset.training.images, dataset.training.rows
        if self.need == "labels":
            labels = Counter(images.names[label] for label in images.labels[rows].tolist())
            return warn_of_rare_labels(labels, "images", ENOUGH_IMAGES)
        if len(rows) >= 10 * ENOUGH_IMAGES:
            return []
        return [f"{len(rows):,} images are few for a model trained from scratch: fine-tune one with --from."]

    @abstractmethod
    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B *pixels"]:
        """The targets of some of the images."""

    @abstractmethod
    def changed(self, batch: ImageBatch, model: Any) -> Augmented:
        """The images of a batch, augmented, with their targets."""


class _Size(NamedTuple):
    """The model size for up to `images` images, and the epochs of training."""

    images: float
    width: int
    heads: int
    layers: int
    batch: int
    epochs: int


# A small dataset takes a small model and many epochs.
_SIZES = (
    _Size(3_000, width=128, heads=4, layers=4, batch=64, epochs=60),
    _Size(30_000, width=192, heads=6, layers=6, batch=128, epochs=40),
    _Size(float("inf"), width=192, heads=6, layers=8, batch=256, epochs=30),
)
# Without a GPU: about a quarter of an hour on two cores for a few thousand images of 80×80 pixels.
_CPU_SIZE = _Size(float("inf"), width=128, heads=4, layers=4, batch=64, epochs=30)


def suggest_for_images(
    task: TaskName,
    dataset: Dataset[ImageSplit],
    fine_tune: bool,
    *,
    passes: float = 1.0,
    model: dict[str, Any],
    augment: dict[str, Any],
    train: dict[str, Any],
) -> Recipe:
    """A recipe for these images; `passes` multiplies the usual number of epochs."""
    height, width, channels = dataset.training.shape
    count = len(dataset.training)
    size = next(size for size in _SIZES if count <= size.images) if has_gpu() else _CPU_SIZE
    images = dataset.training.images
    patch = images.patch if dataset.training.is_ragged else patch_for(height, width)
    batch = min(size.batch, count)
    steps = max(200, int(passes * size.epochs * (0.25 if fine_tune else 1) * count / batch))
    # Digits and letters, which are grey most often, are others when they are mirrored.
    moved: dict[str, Any] = dict(crop=min(height, width) // 8) | (dict(flip=0.5) if channels == 3 else {})
    tokens = TrainConfig.batch_tokens
    if dataset.training.is_ragged:
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
    sides = (1 << power for power in range(MAX_PATCH.bit_length()))
    return max((side for side in sides if (longest // side) ** 2 >= MIN_PATCHES), default=1)


def patch_for(height: int, width: int) -> int:
    """The side of patches that suits pictures of this size: the largest power of 2 that leaves enough of them.

    >>> [patch_for(side, side) for side in (28, 32, 80, 96, 224, 45)]
    [4, 4, 8, 8, 16, 5]
    """
    sides = [side for side in range(1, MAX_PATCH + 1) if height % side == 0 and width % side == 0]
    enough = [side for side in sides if height * width // side**2 >= MIN_PATCHES] or [1]
    even = [side for side in enough if side & (side - 1) == 0]
    patch = max(even) if max(even) > 1 else max(enough)
    if patch == 1 and min(height, width) > 16:
        raise RegardError(
            f"Pictures of {height}×{width} pixels cannot be cut into equal patches.",
            f"Let them be resized: --data.size {max(8, min(height, width) // 8 * 8)}",
        )
    return patch
