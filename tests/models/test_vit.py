"""The Vision Transformer: its inputs, its choices and its heads."""

import torch

from regard.models.vit import ViT, ViTConfig

LABELS = ("cat", "dog", "fox")


def small(**changes) -> ViT:
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, layers=2, feedforward=32, image_height=12, image_width=20, patch=4, labels=LABELS)
    return ViT(ViTConfig(**(sizes | changes))).eval()


def test_every_patch_matters():
    model, image = small(), torch.rand(1, 3, 12, 20)
    before = model(image)
    for row in range(3):
        for column in range(5):
            other = image.clone()
            other[:, :, 4 * row, 4 * column] = 0
            assert not torch.allclose(model(other), before, atol=1e-6)
