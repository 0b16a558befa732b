"""Task: classify images."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int

from regard.data import Augmented, ImageBatch, RaggedBatch, as_numbers, augment, soft_targets
from regard.pipelines import ImageModel
from regard.training.datasets import Dataset, ImageSplit
from regard.training.losses import LossParts
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks.image_tasks import ImageTask, Need, suggest_for_images
from regard.training.tasks.task import Features, Tokenizers

# Images per step of validation.
FETCHED = 2048


class ClassifyImages(ImageTask):
    metrics = ("accuracy",)
    try_it = "regard classify {out} photo.jpg"
    need: ClassVar[Need] = "labels"

    def suggest_recipe(self, dataset: Dataset[ImageSplit], fine_tune: bool) -> Recipe:
        height, width, channels = dataset.training.shape
        if dataset.training.is_ragged:
            # Operations are drawn for pictures of one size, which may be few: other changes are quicker.
            changes: dict[str, Any] = {"zoom": 0.5, "colour": 0.4} if channels == 3 else {}
        else:
            changes = {"random_ops": 2} if channels == 3 else {"cutout": min(height, width) // 4}
        return suggest_for_images(
            "classify-images",
            dataset,
            fine_tune,
            model={},
            augment=changes,
            train={"label_smoothing": 0.1, "validate_by": "accuracy"},
        )

    def complete_config(self, config: Any, dataset: Dataset[ImageSplit], tokenizers: Tokenizers) -> Any:
        labels = dataset.training.images.names
        return dataclasses.replace(config, **dataset.training.config_sizes, head="classify", labels=labels)

    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        return images.labels[rows]

    def changed(self, batch: ImageBatch, model: Any) -> Augmented:
        """Targets are the share of each label: two have one where pictures are mixed."""
        return augment(
            as_numbers(batch.pixels, model.channels), soft_targets(batch.targets, len(model.labels)), batch.augment
        )

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        images: Any
        if isinstance(batch, RaggedBatch):
            images, _ = batch.changed(model.config.channels, model.config.patch)
            targets = soft_targets(batch.targets, len(model.config.labels))
        else:
            images, changed, _ = self.changed(batch, model.config)
            assert changed is not None
            targets = changed
        logprobs = model.logits(features(images)).float().log_softmax(-1)
        counted = targets.sum(1)
        nll, even = -(targets * logprobs).sum(), -(counted * logprobs.mean(1)).sum()
        smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
        return LossParts((1 - smoothing) * nll + smoothing * even, nll.detach(), counted.sum())

    def validation_scores(self, bundle: ImageModel, dataset: Dataset[ImageSplit]) -> dict[str, float]:
        images, rows = dataset.validation.images, dataset.validation.rows
        right = 0
        for begin in range(0, len(rows), FETCHED):
            some = rows[begin : begin + FETCHED]
            right += int((bundle.probabilities(images.some(some)).argmax(1) == images.labels[some]).sum())
        return {"accuracy": 100 * right / len(rows)}
