"""The base class of image tasks: reading, the validation split, batches and suggested recipes."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int

from regard.data import AugmentConfig, RaggedImages, read_images, read_ragged_images
from regard.data.batching.images import ImageBatch, ImageBatches, RaggedImageBatches
from regard.data.images.augmentation import AugmentedBatch
from regard.data.images.sets import Annotation, check_annotations
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.models import ViTConfig
from regard.progress import OnProgress
from regard.training.datasets import Dataset, Images, ImageSplit, count_units, too_few_examples
from regard.training.recipe import DataConfig, Recipe, TaskName, TokenizerConfig, TrainConfig
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Task,
    Tokenizers,
    has_gpu,
    suggested_training,
    warn_about_case,
    warn_about_rare_labels,
)

# The validation split: share of the images of each label, and maximum number of images.
VALIDATION_SHARE, MAX_VALIDATION_IMAGES = 0.1, 2000
# Suggested patch sizes: minimum number of patches per image, and maximum patch size in pixels.
MIN_PATCHES, MAX_PATCH = 49, 16
# Per label; with fewer, a model trained from scratch is unreliable.
MIN_RECOMMENDED_IMAGES = 200


def read_image_dataset(
    config: DataConfig, annotation: Annotation, on_progress: OnProgress | None = None
) -> Dataset[ImageSplit]:
    """Read the images of a recipe. Validation images get the size and the labels of the training images."""
    if config.size and config.longest:
        raise RegardError(
            "data.size resizes all images to one size, while data.longest keeps different sizes.",
            "Set only one of them.",
        )
    training = _read(config, config.files, config.size, config.channels, on_progress, config.limit)
    check_annotations(training, annotation)
    if annotation == "labels" and len(training.names) < 2:
        raise RegardError(
            f"All images have the label {training.names[0]!r}; classification needs at least two labels.",
            "Add images with other labels.",
        )
    if not config.validation:
        rows, validation_rows = split_by_label(training.labels)
        if not len(validation_rows):
            raise too_few_examples("images")
        return _image_dataset(ImageSplit(training, rows), ImageSplit(training, validation_rows))
    size = config.size if isinstance(training, RaggedImages) else training.pixels.shape[1:3]
    validation = _read(config, config.validation, size, len(training.mean), on_progress)
    check_annotations(validation, annotation)
    if annotation == "labels":
        validation = validation.with_names(training.names)
    return _image_dataset(*(ImageSplit(images, np.arange(len(images))) for images in (training, validation)))


def _image_dataset(training: ImageSplit, validation: ImageSplit) -> Dataset[ImageSplit]:
    height, width, channels = training.shape
    size = f"up to {height}×{width}" if training.is_ragged else f"{height}×{width}"
    detail = f"of {size} pixels in {'gray' if channels == 1 else 'color'}"
    return Dataset(training, validation, "images", detail)


def _read(
    config: DataConfig,
    files: Sequence[str],
    size: int | tuple[int, int],
    channels: int,
    on_progress: OnProgress | None,
    limit: int = 0,
) -> Images:
    common: dict[str, Any] = dict(channels=channels, label=config.label, on_bad=config.on_bad, limit=limit)
    common |= dict(cache=config.cache or None, progress=on_progress)
    if config.longest:
        patch = config.patch or suggest_ragged_patch(config.longest)
        return read_ragged_images(files, patch=patch, longest=config.longest, **common)
    return read_images(files, size=size, **common)


def split_by_label(labels: Int[np.ndarray, "M"]) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "L"]]:
    """Row indices for training and for validation: a tenth of the images of each label, the same for every run.

    Labels with fewer than five images have none in the validation split.

    >>> [len(rows) for rows in split_by_label(np.repeat([0, 1, 2], [40, 5, 3]))]
    [43, 5]
    """
    order = np.random.default_rng(0).permutation(len(labels))
    share = min(VALIDATION_SHARE, MAX_VALIDATION_IMAGES / len(labels))
    rows_by_label = (order[labels[order] == label] for label in np.unique(labels))
    parts = [rows[: max(len(rows) >= 5, int(share * len(rows)))] for rows in rows_by_label]
    validation = np.sort(np.concatenate(parts))
    return np.setdiff1d(np.arange(len(labels)), validation), validation


class ImageTask(Task):
    """A task on images. Subclasses define the annotation, the loss and the metrics."""

    pipeline = "image_model"
    unit = "image"
    is_image_task = reads_folders = True
    annotation: ClassVar[Annotation]
    """the annotation of the images that the task needs"""

    def read(self, config: DataConfig, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
        """Read the images of a recipe; `on_progress` is called while they are decoded."""
        return read_image_dataset(config, self.annotation, on_progress)

    def make_tokenizers(self, dataset: Dataset[ImageSplit], config: TokenizerConfig) -> Tokenizers:
        return ()

    def encode(
        self,
        dataset: Dataset[ImageSplit],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        for option in ("r_drop", "source_vectors", "target_vectors"):
            if getattr(recipe.train, option):
                raise RegardError(f"train.{option} is only supported for text, not for images.", "Remove it.")
        if (dataset.training.shape[2], model.channels) == (3, 1):
            raise RegardError(
                "The images are in color, but the model expects gray images.",
                "Set data.channels to 1 to convert them.",
            )
        if dataset.training.is_ragged:
            return self._encode_ragged(dataset, recipe.augment, model, shape)
        training, validation = (
            ImageBatches(
                part.images,
                part.rows,
                partial(self.targets, part.images, model),
                size=shape.images,
                seed=shape.seed,
                augment=recipe.augment,
                noise=self.noise_per_image(model),
            )
            for part in (dataset.training, dataset.validation)
        )
        first = next(training.epoch(0))
        # Invalid augmentations are reported before the first step.
        self.augment_batch(replace(first, inputs=(first.pixels[:2],), targets=first.targets[:2]), model)
        rows, columns = model.grid
        return EncodedDataset(
            training, validation, f"{rows}×{columns} patches of {model.patch}×{model.patch} pixels per image"
        )

    def _encode_ragged(
        self, dataset: Dataset[ImageSplit], augment: AugmentConfig, model: Any, shape: BatchShape
    ) -> EncodedDataset:
        """Encode images of different sizes as packed batches."""
        patch = dataset.training.images.patch
        if model.patch != patch:
            raise RegardError(
                f"The images are resized for patches of {patch}×{patch} pixels, but the model has patches of "
                f"{model.patch}×{model.patch}.",
                f"Set data.patch to {model.patch}.",
            )
        if augment.mixup or augment.cutmix:
            raise RegardError(
                "augment.mixup and augment.cutmix need images of one size.",
                "Set both to 0, or set data.size instead of data.longest.",
            )
        training, validation = (
            RaggedImageBatches(
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
        # Invalid augmentations are reported before the first step.
        training.smallest_batch().augment_and_pack(model.channels, patch)
        note = f"{training.mean_tokens:.0f} patches of {patch}×{patch} pixels per image on average"
        return EncodedDataset(training, validation, note)

    def reasons(self, dataset: Dataset[ImageSplit], recipe: Recipe) -> list[str]:
        height, width, _ = dataset.training.shape
        where = "" if has_gpu() else "; small because there is no GPU"
        count = count_units(len(dataset.training), "images")
        return [f"size, patches and steps: {count} of {height}×{width} pixels{where}"]

    def warnings(self, dataset: Dataset[ImageSplit]) -> list[str]:
        images, rows = dataset.training.images, dataset.training.rows
        if self.annotation == "labels":
            labels = Counter(images.names[label] for label in images.labels[rows].tolist())
            return warn_about_case(labels) + warn_about_rare_labels(labels, "images", MIN_RECOMMENDED_IMAGES)
        if len(rows) >= 10 * MIN_RECOMMENDED_IMAGES:
            return []
        count = count_units(len(rows), "images")
        return [f"Little data to train from scratch: {count}. Fine-tune a model with --from instead."]

    def noise_per_image(self, model: Any) -> int:
        """The number of random numbers that the loss of an image needs."""
        return 0

    @abstractmethod
    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B *pixels"]:
        """The targets of the images in these rows."""

    @abstractmethod
    def augment_batch(self, batch: ImageBatch, model: Any) -> AugmentedBatch:
        """Augment the images of a batch and their targets."""


class _ModelSize(NamedTuple):
    """The model size for up to `max_images` images, and the epochs of training."""

    max_images: float
    width: int
    heads: int
    layers: int
    batch: int
    epochs: int


# Small datasets: a small model and many epochs.
_SIZES = (
    _ModelSize(3_000, width=128, heads=4, layers=4, batch=64, epochs=60),
    _ModelSize(30_000, width=192, heads=6, layers=6, batch=128, epochs=40),
    _ModelSize(float("inf"), width=192, heads=6, layers=8, batch=256, epochs=30),
)
# Without a GPU: about a quarter of an hour on two cores for a few thousand images of 80×80 pixels.
_CPU_SIZE = _ModelSize(float("inf"), width=128, heads=4, layers=4, batch=64, epochs=30)


def suggest_for_images(
    task: TaskName,
    dataset: Dataset[ImageSplit],
    fine_tune: bool,
    *,
    epoch_factor: float = 1.0,
    model: dict[str, Any],
    augment: dict[str, Any],
    train: dict[str, Any],
) -> Recipe:
    """Suggest a recipe for images; `epoch_factor` multiplies the default number of epochs."""
    height, width, channels = dataset.training.shape
    count = len(dataset.training)
    size = next(size for size in _SIZES if count <= size.max_images) if has_gpu() else _CPU_SIZE
    images = dataset.training.images
    patch = images.patch if dataset.training.is_ragged else suggest_patch(height, width)
    batch = min(size.batch, count)
    steps = max(200, int(epoch_factor * size.epochs * (0.25 if fine_tune else 1) * count / batch))
    # No flips of gray images: most are digits or letters, which flipping would change.
    augmentation: dict[str, Any] = dict(crop=min(height, width) // 8) | (dict(flip=0.5) if channels == 3 else {})
    tokens = TrainConfig.batch_tokens
    if dataset.training.is_ragged:
        # The crop keeps a part of the smallest image; the batch holds as many images as usual.
        augmentation["crop"] = min(augmentation["crop"], int(images.sizes.min()) - 1)
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
        # A convolutional stem adds locality, which small datasets do not teach.
        patches="stem" if patch & (patch - 1) == 0 else "linear",
        positions="rotary",
        pooling="mean",
        mean=tuple(round(value, 4) for value in images.mean),
        std=tuple(round(max(value, 1e-3), 4) for value in images.std),
    )
    defaults: dict[str, Any] = dict(batch_images=batch, weight_decay=0.05, ema=0.999 if steps > 5000 else 0.99)
    lr = 1e-4 if fine_tune else 1e-3
    return Recipe(
        task=task,
        model=ViTConfig(**(sizes | model)),
        train=suggested_training(steps, tokens, lr, **(defaults | train)),
        augment=AugmentConfig(**(augmentation | augment)),
    )


def suggest_ragged_patch(longest: int) -> int:
    """Suggest a patch size for images of different sizes: the largest power of 2 that leaves enough patches.

    >>> [suggest_ragged_patch(longest) for longest in (28, 64, 100, 224, 1000)]
    [4, 8, 8, 16, 16]
    """
    sides = (1 << power for power in range(MAX_PATCH.bit_length()))
    return max((side for side in sides if (longest // side) ** 2 >= MIN_PATCHES), default=1)


def suggest_patch(height: int, width: int) -> int:
    """Suggest a patch size for images of one size: the largest power of 2 that divides it and leaves enough patches.

    >>> [suggest_patch(side, side) for side in (28, 32, 80, 96, 224, 45)]
    [4, 4, 8, 8, 16, 5]
    """
    sides = [side for side in range(1, MAX_PATCH + 1) if height % side == 0 and width % side == 0]
    candidates = [side for side in sides if height * width // side**2 >= MIN_PATCHES] or [1]
    powers_of_2 = [side for side in candidates if side & (side - 1) == 0]
    patch = max(powers_of_2) if max(powers_of_2) > 1 else max(candidates)
    if patch == 1 and min(height, width) > 16:
        raise RegardError(
            f"Images of {height}×{width} pixels cannot be divided into equal patches.",
            f"Resize them with --data.size {max(8, min(height, width) // 8 * 8)}.",
        )
    return patch
