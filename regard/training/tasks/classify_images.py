"""The task `classify-images`: image classification."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int

from regard.data import augment, one_hot_targets
from regard.data.batching.images import ImageBatch, RaggedImageBatch, pixels_to_float
from regard.data.images.augmentation import AugmentedBatch
from regard.data.images.sets import Annotation
from regard.evaluation.bootstrap import share
from regard.pipelines import ImageModel
from regard.training.datasets import Dataset, ImageSplit
from regard.training.losses import LossParts
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks.images import ImageTask, suggest_for_images
from regard.training.tasks.task import Features, Tokenizers, with_margins

# Images that are read and classified at a time in validation.
VALIDATION_BATCH = 2048


class ClassifyImagesTask(ImageTask):
    """Image classification by a Vision Transformer."""

    metrics = ("accuracy",)
    head: ClassVar = {"head": "classify"}
    usage_hint = "regard classify {out} photo.jpg"
    annotation: ClassVar[Annotation] = "labels"

    def suggest_recipe(self, dataset: Dataset[ImageSplit], fine_tune: bool) -> Recipe:
        height, width, channels = dataset.training.shape
        if dataset.training.is_ragged:
            # Random operations run per image size, which is slow if few images share a size.
            augmentation: dict[str, Any] = {"zoom": 0.5, "color": 0.4} if channels == 3 else {}
        else:
            augmentation = {"random_ops": 2} if channels == 3 else {"cutout": min(height, width) // 4}
        return suggest_for_images(
            "classify-images",
            dataset,
            fine_tune,
            model={},
            augment=augmentation,
            train={"label_smoothing": 0.1, "validate_by": "accuracy"},
        )

    def complete_config(self, config: Any, dataset: Dataset[ImageSplit], tokenizers: Tokenizers) -> Any:
        labels = dataset.training.images.names
        return dataclasses.replace(self.with_head(config), **dataset.training.config_sizes, labels=labels)

    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        return images.labels[rows]

    def augment_batch(self, batch: ImageBatch, model: Any) -> AugmentedBatch:
        """Augment a batch; targets are probabilities of the labels, since mixed images have two labels."""
        return augment(
            pixels_to_float(batch.pixels, model.channels),
            one_hot_targets(batch.targets, len(model.labels)),
            batch.augment,
        )

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        images: Any
        if isinstance(batch, RaggedImageBatch):
            images, _ = batch.augment_and_pack(model.config.channels, model.config.patch)
            targets = one_hot_targets(batch.targets, len(model.config.labels))
        else:
            images, mixed_targets, _ = self.augment_batch(batch, model.config)
            assert mixed_targets is not None
            targets = mixed_targets
        logprobs = model.logits(features(images)).float().log_softmax(-1)
        counted = targets.sum(1)
        nll, uniform_nll = -(targets * logprobs).sum(), -(counted * logprobs.mean(1)).sum()
        smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
        return LossParts((1 - smoothing) * nll + smoothing * uniform_nll, nll.detach(), counted.sum())

    def validation_scores(self, pipeline: ImageModel, dataset: Dataset[ImageSplit]) -> dict[str, float]:
        images, rows = dataset.validation.images, dataset.validation.rows
        correct = np.empty(len(rows), bool)
        for begin in range(0, len(rows), VALIDATION_BATCH):
            batch = rows[begin : begin + VALIDATION_BATCH]
            predicted = pipeline.probabilities(images.select(batch)).argmax(1)
            correct[begin : begin + VALIDATION_BATCH] = predicted == images.labels[batch]
        return with_margins({"accuracy": share(correct)})
