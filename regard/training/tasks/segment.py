"""The task `segment`: semantic segmentation of images."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data import RaggedImages, augment
from regard.data.batching.image_batches import ImageBatch, pixels_to_float
from regard.data.batching.pair_batches import IGNORE_INDEX
from regard.data.batching.ragged_batches import RaggedImageBatch
from regard.data.images.annotations import NO_LABEL, Annotation
from regard.data.images.augmentation import AugmentedBatch
from regard.errors import RegardError
from regard.evaluation.text_metrics import confusion_counts, intersection_over_union
from regard.pipelines import ImageModel
from regard.progress import OnProgress
from regard.training.datasets import Dataset, Images, ImageSplit
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TrainConfig
from regard.training.tasks.images import ImageTask, suggest_for_images
from regard.training.tasks.task import Features, Tokenizers

# Images that are read and segmented at a time in validation.
VALIDATION_BATCH = 256


class SegmentTask(ImageTask):
    """Semantic segmentation by a Vision Transformer."""

    metrics = ("iou",)
    head: ClassVar = {"head": "segment"}
    usage_hint = "regard segment {out} photo.jpg --out mask.png"
    annotation: ClassVar[Annotation] = "masks"

    def read(self, config: DataConfig, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
        dataset = super().read(config, on_progress)
        labels = _labels(dataset.training.images)
        if len(labels) < 2:
            raise RegardError(
                "All pixels of the masks have the same label; segmentation needs at least two.",
                "Use masks with at least two pixel values besides 255, which means no label.",
            )
        for label in _labels(dataset.validation.images):
            if label not in labels:
                raise RegardError(
                    f"Label {label} occurs in the validation masks but not in the training masks.",
                    "Use the same labels in both; pixel value 255 means no label.",
                )
        return dataset

    def suggest_recipe(self, dataset: Dataset[ImageSplit], fine_tune: bool) -> Recipe:
        return suggest_for_images(
            "segment",
            dataset,
            fine_tune,
            model={"segmenter": "queries"},
            augment={"zoom": 0.5, "color": 0.4} if dataset.training.shape[2] == 3 else {},
            train={"label_smoothing": 0.0, "validate_by": "iou"},
        )

    def complete_config(self, config: Any, dataset: Dataset[ImageSplit], tokenizers: Tokenizers) -> Any:
        labels = _labels(dataset.training.images)
        return dataclasses.replace(self.with_head(config), **dataset.training.config_sizes, labels=labels)

    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "*pixels"]:
        if isinstance(images, RaggedImages):
            masks = np.concatenate([images.mask(row).reshape(-1) for row in rows.tolist()])
        else:
            masks = images.masks[rows]
        return _label_table(model.labels)[masks]

    def augment_batch(self, batch: ImageBatch, model: Any) -> AugmentedBatch:
        return augment(pixels_to_float(batch.pixels, model.channels), None, batch.augment, batch.targets)

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        """The sum over images of the mean cross-entropy of their labeled pixels."""
        smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
        if not isinstance(batch, RaggedImageBatch):
            pixels, _, masks = self.augment_batch(batch, model.config)
            assert masks is not None
            return _loss(model.masks(features(pixels), pixels), masks, smoothing)
        images, groups = batch.augment_and_pack(model.config.channels, model.config.patch, masked=True)
        logits, parts = iter(model.masks(features(images), images)), []
        for masks in groups:  # one group per image size
            parts.append(_loss(torch.stack([next(logits) for _ in masks]), masks, smoothing))
        return LossParts(*(torch.stack(column).sum() for column in zip(*parts)))

    def validation_scores(self, pipeline: ImageModel, dataset: Dataset[ImageSplit]) -> dict[str, float]:
        images, rows = dataset.validation.images, dataset.validation.rows
        counts = np.zeros((len(pipeline.labels), len(pipeline.labels)), np.int64)
        for begin in range(0, len(rows), VALIDATION_BATCH):
            batch = rows[begin : begin + VALIDATION_BATCH]
            for prediction, row in zip(pipeline.segment(list(images.select(batch))), batch.tolist()):
                target = _label_table(pipeline.labels)[images.mask(row)]
                counts += confusion_counts(prediction, target, len(pipeline.labels))
        accuracy = 100 * np.trace(counts) / max(1, counts.sum())
        return {"iou": float(100 * np.nanmean(intersection_over_union(counts))), "pixel_accuracy": float(accuracy)}


def _loss(logits: Float[Tensor, "B V H W"], masks: Int[Tensor, "B H W"], smoothing: float) -> LossParts:
    logprobs = logits.float().log_softmax(1)
    is_target = masks[:, None] == torch.arange(logits.shape[1], device=masks.device)[:, None, None]
    counted = (masks != IGNORE_INDEX).sum((1, 2))
    nlls = -logprobs.masked_fill(~is_target, 0.0).sum((1, 2, 3)) / counted.clamp(min=1)
    nll, loss = nlls.sum(), (1 - smoothing) * nlls.sum()
    if smoothing:
        uniform_nlls = -logprobs.mean(1).masked_fill(masks == IGNORE_INDEX, 0.0).sum((1, 2)) / counted.clamp(min=1)
        loss = loss + smoothing * uniform_nlls.sum()
    return LossParts(loss, nll.detach(), (counted > 0).float().sum())


def _labels(images: Images) -> tuple[str, ...]:
    """Label names: the pixel values of the masks, as text."""
    return tuple(str(value) for value in images.mask_values if value != NO_LABEL)


def _label_table(labels: tuple[str, ...]) -> Int[np.ndarray, "256"]:
    """A table from the pixel values of masks to label indices."""
    table = np.full(256, IGNORE_INDEX, np.int16)
    table[[int(label) for label in labels]] = np.arange(len(labels))
    return table
