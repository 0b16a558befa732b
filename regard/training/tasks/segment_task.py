"""Task: segment images."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data import IGNORED, Augmented, ImageBatch, RaggedBatch, RaggedImages, as_numbers, augment
from regard.errors import RegardError
from regard.evaluation.text_metrics import intersection_over_union, label_counts
from regard.pipelines import ImageModel
from regard.training.datasets import Dataset, Images, ImageSplit
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TrainConfig
from regard.training.run_log import OnProgress
from regard.training.tasks.image_tasks import NO_LABEL, ImageTask, Need, suggest_for_images
from regard.training.tasks.task import Features, Tokenizers

# Images per step of validation.
FETCHED = 256


class Segment(ImageTask):
    metrics = ("iou",)
    try_it = "regard segment {out} photo.jpg --out mask.png"
    need: ClassVar[Need] = "masks"

    def read(self, config: DataConfig, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
        dataset = super().read(config, on_progress)
        labels = _labels(dataset.training.images)
        if len(labels) < 2:
            raise RegardError(
                "Every pixel of the masks has the same number: there is nothing to tell apart.",
                "Give masks of at least two numbers; 255 is none.",
            )
        for label in _labels(dataset.validation.images):
            if label not in labels:
                raise RegardError(
                    f"Some masks to validate with hold the number {label}, and none to learn from.",
                    "Give both the same labels; 255 is none.",
                )
        return dataset

    def suggest_recipe(self, dataset: Dataset[ImageSplit], fine_tune: bool) -> Recipe:
        return suggest_for_images(
            "segment",
            dataset,
            fine_tune,
            model={"segmenter": "queries"},
            augment={"zoom": 0.5, "colour": 0.4} if dataset.training.shape[2] == 3 else {},
            train={"label_smoothing": 0.0, "validate_by": "iou"},
        )

    def complete_config(self, config: Any, dataset: Dataset[ImageSplit], tokenizers: Tokenizers) -> Any:
        labels = _labels(dataset.training.images)
        return dataclasses.replace(config, **dataset.training.config_sizes, head="segment", labels=labels)

    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "*pixels"]:
        if isinstance(images, RaggedImages):
            masks = np.concatenate([images.mask(row).reshape(-1) for row in rows.tolist()])
        else:
            masks = images.masks[rows]
        return _numbers(model.labels)[masks]

    def changed(self, batch: ImageBatch, model: Any) -> Augmented:
        return augment(as_numbers(batch.pixels, model.channels), None, batch.augment, batch.targets)

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        """A picture's loss is the mean over its pixels that have a label."""
        smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
        if not isinstance(batch, RaggedBatch):
            pixels, _, masks = self.changed(batch, model.config)
            assert masks is not None
            return _loss(model.masks(features(pixels), pixels), masks, smoothing)
        images, groups = batch.changed(model.config.channels, model.config.patch, masked=True)
        logits, parts = iter(model.masks(features(images), images)), []
        for masks in groups:  # of one size each
            parts.append(_loss(torch.stack([next(logits) for _ in masks]), masks, smoothing))
        return LossParts(*(torch.stack(column).sum() for column in zip(*parts)))

    def validation_scores(self, bundle: ImageModel, dataset: Dataset[ImageSplit]) -> dict[str, float]:
        images, rows = dataset.validation.images, dataset.validation.rows
        counts = np.zeros((len(bundle.labels), len(bundle.labels)), np.int64)
        for begin in range(0, len(rows), FETCHED):
            some = rows[begin : begin + FETCHED]
            for found, row in zip(bundle.segment(list(images.some(some))), some.tolist()):
                counts += label_counts(found, _numbers(bundle.labels)[images.mask(row)], len(bundle.labels))
        right = 100 * np.trace(counts) / max(1, counts.sum())
        return {"iou": float(100 * np.nanmean(intersection_over_union(counts))), "pixel_accuracy": float(right)}


def _loss(logits: Float[Tensor, "B V H W"], masks: Int[Tensor, "B H W"], smoothing: float) -> LossParts:
    logprobs = logits.float().log_softmax(1)
    wanted = masks[:, None] == torch.arange(logits.shape[1], device=masks.device)[:, None, None]
    counted = (masks != IGNORED).sum((1, 2))
    nlls = -logprobs.masked_fill(~wanted, 0.0).sum((1, 2, 3)) / counted.clamp(min=1)
    nll, loss = nlls.sum(), (1 - smoothing) * nlls.sum()
    if smoothing:
        even = -logprobs.mean(1).masked_fill(masks == IGNORED, 0.0).sum((1, 2)) / counted.clamp(min=1)
        loss = loss + smoothing * even.sum()
    return LossParts(loss, nll.detach(), (counted > 0).float().sum())


def _labels(images: Images) -> tuple[str, ...]:
    """The numbers in the masks are the names of the labels."""
    return tuple(str(value) for value in images.mask_values if value != NO_LABEL)


def _numbers(labels: tuple[str, ...]) -> Int[np.ndarray, "256"]:
    """For each number that a mask may hold, that of its label."""
    table = np.full(256, IGNORED, np.int16)
    table[[int(label) for label in labels]] = np.arange(len(labels))
    return table
