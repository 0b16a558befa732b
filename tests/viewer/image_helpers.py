"""Small image models with amplified weights, and images for them."""

import numpy as np
import torch
from PIL import Image

from regard.models import ViT
from regard.models.vit import vit_pico

LABELS = ("cat", "dog", "owl")
SIZES = dict(width=16, heads=2, layers=3, feedforward=32, patch=4, image_height=8, image_width=12)
# All prefix tokens and all kinds of pooling.
KINDS = {
    "class": dict(pooling="class"),
    "distilled": dict(pooling="class", distilled=True, registers=2),
    "mean": dict(pooling="mean", registers=1),
    "query": dict(pooling="query", registers=1),
    "rotary": dict(pooling="mean", positions="rotary", pooled_norm=True),
}


def model_of(kind="class", **changes) -> ViT:
    torch.manual_seed(0)
    model = ViT(vit_pico(**(SIZES | dict(labels=LABELS) | KINDS[kind] | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 3
    return model.eval()


def images(count=1, height=8, width=12, seed=1) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def photo(file, height=8, width=12, mode="RGB"):
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save(file)
    return file
