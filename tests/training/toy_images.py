"""Small training runs of the image tasks: 12×12 pixels or different sizes, tiny models, 12 steps."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from regard.data import AugmentConfig
from regard.models import ViTConfig
from regard.training import DataConfig, Recipe, TrainConfig, recipe_from_dict

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
# Validation metrics in addition to the loss.
EXTRA_METRICS: dict[str, set[str]] = {
    "classify-images": {"accuracy"},
    "segment": {"iou", "pixel_accuracy"},
    "mask-images": set(),
}
# All augmentations that the task supports.
STOCHASTIC: dict[str, dict[str, Any]] = {
    "classify-images": {"flip": 0.5, "crop": 1, "random_ops": 1, "cutout": 2, "mixup": 0.5, "cutmix": 1.0},
    "segment": {"flip": 0.5, "crop": 1, "zoom": 0.7, "color": 0.2, "cutmix": 1.0},
    "mask-images": {"flip": 0.5, "zoom": 0.7},
}
NO_AUGMENTATION = {key: value for key, value in vars(AugmentConfig()).items() if key != "padding"}

# Heights and widths of ragged images; the last exceeds LONGEST, and is resized to (12, 24).
SIZES = [(12, 12), (12, 20), (17, 11), (8, 16), (30, 60)]
LONGEST = 24


def draw(count: int, seed: int = 0, side: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images of a colored square on gray noise, their labels (the color channel), and masks.

    Masks have the value 7 in the square, 3 around it and 255 in a corner. Squares cover 2×2 patches exactly.
    """
    random = np.random.default_rng(seed)
    pixels = random.integers(60, 120, (count, side, side, 3), np.uint8)
    labels = random.integers(0, 3, count)
    masks = np.full((count, side, side), 3, np.uint8)
    for index, (top, left) in enumerate(random.integers(0, side // 4 - 1, (count, 2)) * 4):
        pixels[index, top : top + 8, left : left + 8, labels[index]] = 255
        masks[index, top : top + 8, left : left + 8] = 7
    masks[:, 0, 0] = 255
    return pixels, labels, masks


def write(path: Path, count: int, seed: int = 0, side: int = 12, **others: np.ndarray) -> str:
    """Write images, labels and masks as an .npz file; `others` replaces arrays."""
    pixels, labels, masks = draw(count, seed, side)
    arrays: dict[str, Any] = {"images": pixels, "labels": labels, "masks": masks, "names": np.array(NAMES)}
    np.savez(path, **(arrays | others))
    return str(path)


def toy(task: Any, folder: Path, **sections: dict[str, Any]) -> Recipe:
    """Write images and return a small recipe for them: toy("segment", folder, train={"steps": 3})."""
    files, validation = write(folder / "train.npz", 100), write(folder / "validation.npz", 20, seed=1)
    data = DataConfig((files,), (validation,), cache=str(folder / "cache"))
    return recipe_from_dict({"augment": STOCHASTIC[task]} | sections, Recipe(task, data, model=VIT, train=TRAIN))


def write_ragged(folder: Path, count: int, seed: int = 0) -> str:
    """Write dark noise images of different sizes with a red, green or blue square, which is the label.

    Masks have the value 7 in the square and 3 around it.
    """
    random = np.random.default_rng(seed)
    (folder / "files").mkdir(parents=True, exist_ok=True)
    rows = ["path,label,mask"]
    for index in range(count):
        height, width = SIZES[index % len(SIZES)]
        label, side = random.integers(3), min(height, width) * 2 // 3
        top, left = random.integers(height - side + 1), random.integers(width - side + 1)
        pixels = random.integers(60, 120, (height, width, 3), np.uint8)
        pixels[top : top + side, left : left + side, label] = 255
        mask = np.full((height, width), 3, np.uint8)
        mask[top : top + side, left : left + side] = 7
        Image.fromarray(pixels).save(folder / "files" / f"{seed}-{index}.png")
        Image.fromarray(mask).save(folder / "files" / f"{seed}-{index}-mask.png")
        rows.append(f"files/{seed}-{index}.png,{NAMES[label]},files/{seed}-{index}-mask.png")
    (folder / f"{seed}.csv").write_text("\n".join(rows))
    return str(folder / f"{seed}.csv")


def toy_ragged(task: Any, folder: Path, **sections: dict[str, Any]) -> Recipe:
    """Write images of different sizes and return a small recipe for them."""
    files = (write_ragged(folder, 60),), (write_ragged(folder, 15, seed=1),)
    data = DataConfig(*files, longest=LONGEST, patch=4, cache=str(folder / "cache"))
    settings = dataclasses.replace(TRAIN, batch_tokens=128)
    augmentation = {"flip": 0.5, "crop": 1, "color": 0.2, "zoom": 0.8, "cutout": 2}
    if task == "segment":
        del augmentation["cutout"]
    return recipe_from_dict({"augment": augmentation} | sections, Recipe(task, data, model=VIT, train=settings))


def outputs(task: str, pipeline: Any) -> Any:
    """Outputs of a pipeline, to compare with those of another one."""
    pixels = list(draw(3, seed=2)[0])
    if task == "classify-images":
        return pipeline.classify(pixels)
    return [mask.tolist() for mask in pipeline.segment(pixels)] if task == "segment" else None
