"""The task `mask-images`: masked autoencoding, the prediction of masked patches (He et al. 2022)."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int

from regard.data import augment
from regard.data.batching.image_batches import ImageBatch, pixels_to_float
from regard.data.batching.pair_batches import IGNORE_INDEX
from regard.data.images.annotations import Annotation
from regard.data.images.augmentation import AugmentedBatch
from regard.errors import RegardError
from regard.progress import OnProgress
from regard.training.datasets import Dataset, ImageSplit
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TrainConfig
from regard.training.tasks.images import ImageTask, suggest_for_images
from regard.training.tasks.task import Features, Tokenizers

# The share of masked patches, as in He et al. (2022).
MASK_RATIO = 0.75


class MaskImagesTask(ImageTask):
    """Masked autoencoding by a Vision Transformer, without labels."""

    head: ClassVar = {"head": "pixels", "labels": ()}
    usage_hint = "regard train --task classify-images --from {out} --data …"
    annotation: ClassVar[Annotation] = "none"

    def read(self, config: DataConfig, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
        if config.longest:
            raise RegardError(
                "The task mask-images needs images of one size.", "Set data.size instead of data.longest."
            )
        return super().read(config, on_progress)

    def suggest_recipe(self, dataset: Dataset[ImageSplit], fine_tune: bool) -> Recipe:
        return suggest_for_images(
            "mask-images",
            dataset,
            fine_tune,
            epoch_factor=3,  # epochs are fast, since only a quarter of the patches goes through the encoder
            model={"head": "pixels", "drop_path": 0.0},
            augment={"zoom": 0.5} if dataset.training.shape[2] == 3 else {},
            train={},
        )

    def complete_config(self, config: Any, dataset: Dataset[ImageSplit], tokenizers: Tokenizers) -> Any:
        return dataclasses.replace(self.with_head(config), **dataset.training.config_sizes)

    def noise_per_image(self, model: Any) -> int:
        rows, columns = model.grid
        return rows * columns

    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        return np.full(len(rows), IGNORE_INDEX)

    def augment_batch(self, batch: ImageBatch, model: Any) -> AugmentedBatch:
        return augment(pixels_to_float(batch.pixels, model.channels), None, batch.augment)

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        """Mean squared error over the masked pixels of an image, each patch normalized to mean 0 and variance 1."""
        pixels = self.augment_batch(batch, model.config).pixels
        loss = model.masked_loss(pixels, MASK_RATIO, batch.noise) * len(pixels)
        return LossParts(loss, loss.detach(), torch.full_like(loss, len(pixels)).detach())
