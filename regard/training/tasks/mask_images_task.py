"""Task: mask images, an encoder without labels that predicts hidden patches from the visible ones."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int

from regard.data import IGNORED, Augmented, ImageBatch, as_numbers, augment
from regard.errors import RegardError
from regard.training.datasets import Dataset, ImageSplit
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TrainConfig
from regard.training.run_log import OnProgress
from regard.training.tasks.image_tasks import ImageTask, Need, suggest_for_images
from regard.training.tasks.task import Features, Tokenizers

# The share of the patches that is hidden (He et al. 2022).
HIDDEN = 0.75


class MaskImages(ImageTask):
    try_it = "regard train --task classify-images --from {out} --data …"
    need: ClassVar[Need] = "nothing"

    def read(self, config: DataConfig, on_progress: OnProgress | None = None) -> Dataset[ImageSplit]:
        if config.longest:
            raise RegardError("Patches are hidden in pictures of one size only.", "Set data.size, not data.longest.")
        return super().read(config, on_progress)

    def suggest_recipe(self, dataset: Dataset[ImageSplit], fine_tune: bool) -> Recipe:
        return suggest_for_images(
            "mask-images",
            dataset,
            fine_tune,
            passes=3,  # there is time for them: only a quarter of the patches goes through the encoder
            model={"head": "pixels", "drop_path": 0.0},
            augment={"zoom": 0.5} if dataset.training.shape[2] == 3 else {},
            train={},
        )

    def complete_config(self, config: Any, dataset: Dataset[ImageSplit], tokenizers: Tokenizers) -> Any:
        return dataclasses.replace(config, **dataset.training.config_sizes, head="pixels", labels=())

    def targets(self, images: Any, model: Any, rows: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        return np.full(len(rows), IGNORED)

    def changed(self, batch: ImageBatch, model: Any) -> Augmented:
        return augment(as_numbers(batch.pixels, model.channels), None, batch.augment)

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        """The mean square over the hidden pixels of a picture, each patch brought to mean 0 and variance 1."""
        pixels = self.changed(batch, model.config).pixels
        with contextlib.nullcontext() if torch.is_grad_enabled() else _always_the_same(pixels.device):
            loss = model.masked_loss(pixels, HIDDEN) * len(pixels)
        return LossParts(loss, loss.detach(), torch.full_like(loss, len(pixels)).detach())


@contextlib.contextmanager
def _always_the_same(device: torch.device) -> Iterator[None]:
    """Inside, the same patches are hidden in every validation."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
