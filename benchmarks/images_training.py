"""Train Vision Transformers in sequence and score them on the test images.

    python benchmarks/images_training.py --data data --out runs \
        "fashion fashion-mnist seed=1" "cifar10 cifar10 seed=1" \
        "pets-mask pets-mask" "pets-breed pets-classify from=earlier/run2 lr=5e-4"

Data sets: `fashion`, `cifar10`, `pets-breed`, `pets-species`, `pets-segment`, `pets-mask`. The other words of a run are
as in texts.py: `steps=500`, `model.patch=4`, `augment.mixup=0`, `from=FOLDER` to fine-tune a model. `--data` is a
folder with fashion.npz, cifar10.npz and pets.npz as written by benchmarks/images.py. All training images are used for
training; the test images are used for validation, which does not affect the result with `validate_by = "last"`, as in
the recipes.

`seconds_to` is the training time, including validations, until the test accuracy first reaches each value.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from training_runs import Run, main

from regard.data import read_images
from regard.evaluation.text_metrics import confusion_counts, intersection_over_union
from regard.pipelines import ImageModel
from regard.training import recipe_from_dict, run_recipe
from regard.training.checkpoint import METRICS
from regard.training.log import read_metrics

# Accuracies whose time is reported.
TARGETS = {"fashion": (90.0, 93.5, 95.0, 95.5), "cifar10": (80.0, 90.9, 94.0, 96.0, 96.5)}


def train_model(run: Run, file: Path, out: Path, label: str = "label") -> tuple[ImageModel, dict[str, Any]]:
    start = time.monotonic()
    data = {"files": [f"{file}:train"], "validation": [f"{file}:test"], "label": label}
    data |= {"cache": str(out.parent / "cache")}
    recipe = recipe_from_dict(run.recipe | {"data": run.recipe.get("data", {}) | data})
    pipeline = run_recipe(recipe, out, start_from=run.start_from)
    speeds = [line["images_per_second"] for line in read_metrics(out / METRICS) if "images_per_second" in line]
    return pipeline, {
        "seconds": round(time.monotonic() - start, 1),
        "step": pipeline.training["step"],
        "parameters": sum(p.numel() for p in pipeline.model.parameters()),
        "images_per_second": int(np.median(speeds)),
        "validation": {name: round(value, 4) for name, value in pipeline.training["validation"].items()},
    }


def score_labels(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """Accuracy on the test images."""
    name, _, label = run.dataset.partition("-")
    file = data / f"{name}.npz"
    pipeline, result = train_model(run, file, out, label or "label")
    test = read_images([f"{file}:test"], size=pipeline.size, label=label or "label").with_names(pipeline.labels)
    is_correct = pipeline.probabilities(test.pixels).argmax(1) == test.labels
    times = {target: time_to(out, target) for target in TARGETS.get(name, ())}
    return result | {"accuracy": round(100 * is_correct.mean(), 3), "of": len(test), "seconds_to": times}


def time_to(out: Path, accuracy: float) -> float | None:
    reached = (line["seconds"] for line in read_metrics(out / METRICS) if line.get("accuracy", 0.0) >= accuracy)
    return next(reached, None)


def score_masks(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """Intersection over union of pet, background and border; and of pet with border, and background."""
    pipeline, result = train_model(run, data / "pets.npz", out, "species")
    test = read_images([f"{data / 'pets.npz'}:test"], size=pipeline.size, label="species")
    assert test.masks is not None
    expected = test.masks.astype(np.int64) - 1  # the labels are 1, 2, 3
    predicted = np.stack(pipeline.segment(test))
    per_label = intersection_over_union(confusion_counts(predicted, expected, 3))
    background = (predicted == 1).astype(np.int64), (expected == 1).astype(np.int64)
    two = intersection_over_union(confusion_counts(*background, 2))
    return result | {
        "iou": {name: round(100 * float(iou), 2) for name, iou in zip(("pet", "background", "border"), per_label)},
        "mean_iou": round(100 * float(per_label.mean()), 2),
        "foreground_mean_iou": round(100 * float(two.mean()), 2),
        "of": len(test),
    }


def pretrain(run: Run, data: Path, out: Path) -> dict[str, Any]:
    return train_model(run, data / "pets.npz", out, "species")[1]


SETS = {
    "fashion": score_labels,
    "cifar10": score_labels,
    "pets-breed": score_labels,
    "pets-species": score_labels,
    "pets-segment": score_masks,
    "pets-mask": pretrain,
}


def train_and_score(run: Run, data: Path, out: Path) -> dict[str, Any]:
    return SETS[run.dataset](run, data, out)


if __name__ == "__main__":
    main(__doc__, train_and_score)
