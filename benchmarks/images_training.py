"""Vision Transformers trained one after another and scored on the test pictures.

    python benchmarks/images_training.py --data data --out runs \
        "fashion fashion-mnist seed=1" "cifar10 cifar10 seed=1" \
        "pets-mask pets-mask" "pets-breed pets-classify from=earlier/run2 lr=5e-4"

What can be trained: `fashion`, `cifar10`, `pets-breed`, `pets-species`, `pets-segment`, `pets-mask`. The rest of a
run's words are as in texts.py: `steps=500`, `model.patch=4`, `augment.mixup=0`, `from=FOLDER` to begin with a model.
`--data` is a folder of fashion.npz, cifar10.npz and pets.npz as benchmarks/images.py makes them. All training pictures
are learned from; the test pictures validate, which decides nothing where `validate_by` is "last", as in the recipes.

`seconds_to` tells after how many seconds of training, validations included, the test accuracy first was that high.
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
from regard.training.run_log import read_metrics
from regard.training.trainer import METRICS

# The accuracies whose time is told.
GOALS = {"fashion": (90.0, 93.5, 95.0, 95.5), "cifar10": (80.0, 90.9, 94.0, 96.0, 96.5)}


def trained(run: Run, file: Path, out: Path, label: str = "label") -> tuple[ImageModel, dict[str, Any]]:
    began = time.monotonic()
    data = {"files": [f"{file}:train"], "validation": [f"{file}:test"], "label": label}
    data |= {"cache": str(out.parent / "cache")}
    recipe = recipe_from_dict(run.recipe | {"data": run.recipe.get("data", {}) | data})
    bundle = run_recipe(recipe, out, start_from=run.start_from)
    speeds = [line["pictures_per_second"] for line in read_metrics(out / METRICS) if "pictures_per_second" in line]
    return bundle, {
        "seconds": round(time.monotonic() - began, 1),
        "step": bundle.training["step"],
        "parameters": sum(p.numel() for p in bundle.model.parameters()),
        "pictures_per_second": int(np.median(speeds)),
        "validation": {name: round(value, 4) for name, value in bundle.training["validation"].items()},
    }


def labels(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """How often the likeliest label of a test picture is right."""
    name, _, label = run.what.partition("-")
    file = data / f"{name}.npz"
    bundle, told = trained(run, file, out, label or "label")
    test = read_images([f"{file}:test"], size=bundle.size, label=label or "label").with_names(bundle.labels)
    right = bundle.probabilities(test.pixels).argmax(1) == test.labels
    times = {goal: time_to(out, goal) for goal in GOALS.get(name, ())}
    return told | {"accuracy": round(100 * right.mean(), 3), "of": len(test), "seconds_to": times}


def time_to(out: Path, accuracy: float) -> float | None:
    reached = (line["seconds"] for line in read_metrics(out / METRICS) if line.get("accuracy", 0.0) >= accuracy)
    return next(reached, None)


def masks(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """Intersection over union: of pet, background and border; and of pet with border, and background."""
    bundle, told = trained(run, data / "pets.npz", out, "species")
    test = read_images([f"{data / 'pets.npz'}:test"], size=bundle.size, label="species")
    assert test.masks is not None
    wanted = test.masks.astype(np.int64) - 1  # the labels are 1, 2, 3
    found = np.stack(bundle.segment(test))
    each = intersection_over_union(confusion_counts(found, wanted, 3))
    two = intersection_over_union(confusion_counts((found == 1).astype(np.int64), (wanted == 1).astype(np.int64), 2))
    return told | {
        "iou": {name: round(100 * float(one), 2) for name, one in zip(("pet", "background", "border"), each)},
        "mean_iou": round(100 * float(each.mean()), 2),
        "foreground_mean_iou": round(100 * float(two.mean()), 2),
        "of": len(test),
    }


def hidden(run: Run, data: Path, out: Path) -> dict[str, Any]:
    return trained(run, data / "pets.npz", out, "species")[1]


SETS = {
    "fashion": labels,
    "cifar10": labels,
    "pets-breed": labels,
    "pets-species": labels,
    "pets-segment": masks,
    "pets-mask": hidden,
}


def one_run(run: Run, data: Path, out: Path) -> dict[str, Any]:
    return SETS[run.what](run, data, out)


if __name__ == "__main__":
    main(__doc__, one_run)
