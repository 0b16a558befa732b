"""Very small runs of the tasks of pictures: 12×12 pixels, models of some thousand weights, a dozen steps."""

from pathlib import Path
from typing import Any

import numpy as np

from regard.models import ViTConfig
from regard.training import DataConfig, Recipe, TrainConfig, recipe_from

NAMES = ("first", "second", "third")
VIT = ViTConfig(
    width=16,
    heads=2,
    layers=2,
    feedforward=32,
    dropout=0.1,
    drop_path=0.2,
    patch=4,
    pooling="mean",
    decoder_width=32,
    decoder_layers=1,
)
TRAIN = TrainConfig(
    steps=12,
    batch_images=16,
    lr=5e-3,
    warmup=3,
    ema=0.9,
    validate_every=6,
    save_every=4,
    log_every=2,
    workers=1,
    device="cpu",
)
# What is measured beside the loss, and all that can be done to the pictures.
MEASURES: dict[str, set[str]] = {
    "classify-images": {"accuracy"},
    "segment": {"iou", "pixel_accuracy"},
    "mask-images": set(),
}
LIVELY: dict[str, dict[str, Any]] = {
    "classify-images": {"flip": 0.5, "crop": 1, "random_ops": 1, "cutout": 2, "mixup": 0.5, "cutmix": 1.0},
    "segment": {"flip": 0.5, "crop": 1, "zoom": 0.7, "colour": 0.2, "cutmix": 1.0},
    "mask-images": {"flip": 0.5, "zoom": 0.7},
}


def draw(count: int, seed: int = 0, side: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Squares of a colour on grey noise; the channel of each, and masks: 7 in the square, 3 around it, 255 in a corner.

    A square is two patches wide, and lies on whole ones.
    """
    random = np.random.default_rng(seed)
    pixels = random.integers(60, 120, (count, side, side, 3), np.uint8)
    labels = random.integers(0, 3, count)
    masks = np.full((count, side, side), 3, np.uint8)
    for number, (top, left) in enumerate(random.integers(0, side // 4 - 1, (count, 2)) * 4):
        pixels[number, top : top + 8, left : left + 8, labels[number]] = 255
        masks[number, top : top + 8, left : left + 8] = 7
    masks[:, 0, 0] = 255
    return pixels, labels, masks


def write(path: Path, count: int, seed: int = 0, side: int = 12, **others: np.ndarray) -> str:
    pixels, labels, masks = draw(count, seed, side)
    arrays: dict[str, Any] = {"images": pixels, "labels": labels, "masks": masks, "names": np.array(NAMES)}
    np.savez(path, **(arrays | others))
    return str(path)


def toy(task: Any, folder: Path, **sections: dict[str, Any]) -> Recipe:
    """Writes pictures into the folder; a small recipe, with changes: toy("segment", folder, train={"steps": 3})"""
    files, validation = write(folder / "train.npz", 100), write(folder / "validation.npz", 20, seed=1)
    data = DataConfig((files,), (validation,), cache=str(folder / "cache"))
    return recipe_from({"augment": LIVELY[task]} | sections, Recipe(task, data, model=VIT, train=TRAIN))


def outputs(task: str, bundle: Any) -> Any:
    """What a model says, to compare with what another says."""
    pixels = list(draw(3, seed=2)[0])
    if task == "classify-images":
        return bundle.classify(pixels)
    return [mask.tolist() for mask in bundle.segment(pixels)] if task == "segment" else None
