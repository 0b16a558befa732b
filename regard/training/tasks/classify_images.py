"""Pictures with labels to a model that gives a picture its label."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int

from regard.data import Augmented, ImageBatch, RaggedBatch, as_numbers, augment, soft_targets
from regard.folder import ImageModel
from regard.training.losses import LossParts
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks.base import Features, Tokenizers
from regard.training.tasks.image_tasks import ImageTask, Need, Pictures, suggested

# Pictures that are fetched at a time to be judged.
FETCHED = 2048


class ClassifyImages(ImageTask):
    metrics: tuple[str, ...] = ("accuracy",)
    try_it = "regard classify {out} photo.jpg"
    need: ClassVar[Need] = "labels"

    def suggest(self, corpus: Pictures, fine_tune: bool) -> Recipe:
        height, width, channels = corpus.shape
        if corpus.ragged:
            # Operations are drawn for pictures of one size, which may be few: other changes are quicker.
            changes: dict[str, Any] = {"zoom": 0.5, "colour": 0.4} if channels == 3 else {}
        else:
            changes = {"random_ops": 2} if channels == 3 else {"cutout": min(height, width) // 4}
        return suggested(
            "classify-images",
            corpus,
            fine_tune,
            model={},
            augment=changes,
            train={"label_smoothing": 0.1, "validate_by": "accuracy"},
        )

    def complete_config(self, config: Any, corpus: Pictures, tokenizers: Tokenizers) -> Any:
        labels = corpus.training.images.names
        return dataclasses.replace(config, **corpus.sizes, head="classify", labels=labels)

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

    def validation_scores(self, bundle: ImageModel, corpus: Pictures) -> dict[str, float]:
        images, rows = corpus.validation
        right = 0
        for begin in range(0, len(rows), FETCHED):
            some = rows[begin : begin + FETCHED]
            right += int((bundle.probabilities(images.some(some)).argmax(1) == images.labels[some]).sum())
        return {"accuracy": 100 * right / len(rows)}
