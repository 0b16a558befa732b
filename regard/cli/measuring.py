"""Evaluation of classifiers and segmentation models."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from regard.cli.common import batch_progress
from regard.data import IGNORE_INDEX, label_ids, read_images, read_labeled_texts, read_ragged_images
from regard.errors import RegardError
from regard.evaluation.label_metrics import class_scores, label_scores, mask_scores
from regard.evaluation.text_metrics import confusion_counts
from regard.pipelines import Classification, ImageModel, TextEncoder
from regard.training.datasets import Images
from regard.training.tasks.image_tasks import NO_LABEL, check_annotations

# Examples per progress update.
BLOCK_SIZE = 512


def evaluate_texts(
    encoder: TextEncoder, files: Sequence[str], columns: Sequence[str], truncate: bool
) -> dict[str, Any]:
    """Classification metrics of a text encoder on labeled texts."""
    labels, examples = encoder.model.config.labels, read_labeled_texts(files, columns)
    targets = np.array(label_ids(examples, labels))  # raises an error for unknown labels
    results: list[Classification] = []
    with batch_progress("classifying") as on_progress:
        for indices in index_blocks(len(examples), on_progress):
            results += encoder.classify([examples[i].texts for i in indices], truncate=truncate)
    probabilities = np.array([[result.probabilities[label] for label in labels] for result in results])
    return {"texts": len(examples)} | _label_metrics(probabilities, targets, labels)


def evaluate_images(model: ImageModel, files: Sequence[str], column: str) -> dict[str, Any]:
    """Classification or segmentation metrics of an image model, at the image size of training."""
    head = model.model.config.head
    if head not in ("classify", "segment"):
        raise RegardError(
            f"A model with the head {head} cannot be evaluated.",
            "Fine-tune it for a task first: regard train --from …",
        )
    with batch_progress("reading") as on_progress:
        images = _read_images(model, files, column, on_progress)
    check_annotations(images, "labels" if head == "classify" else "masks")
    start = time.perf_counter()
    metrics = _classification_metrics(model, images) if head == "classify" else _segmentation_metrics(model, images)
    rate = len(images) / (time.perf_counter() - start)
    return {"images": len(images)} | metrics | {"images_per_second": rate}


def _read_images(
    model: ImageModel, files: Sequence[str], column: str, on_progress: Callable[[int, int | None], None]
) -> Images:
    config = model.model.config
    if config.longest_side:
        longest, patch = config.longest_side, config.patch
        return read_ragged_images(
            files, patch=patch, longest=longest, channels=config.channels, label=column, progress=on_progress
        )
    return read_images(files, size=model.size, channels=config.channels, label=column, progress=on_progress)


def _classification_metrics(model: ImageModel, images: Images) -> dict[str, Any]:
    labeled = images.with_names(model.labels)
    with batch_progress("classifying") as on_progress:
        blocks = index_blocks(len(images), on_progress)
        probabilities = np.concatenate([model.probabilities(images.select(indices)) for indices in blocks])
    return _label_metrics(probabilities, labeled.labels, model.labels)


def _label_metrics(
    probabilities: Float[np.ndarray, "M V"], targets: Int[np.ndarray, "M"], labels: Sequence[str]
) -> dict[str, Any]:
    scores = label_scores(probabilities, targets)
    top = {"top_5": scores.top_5} if len(labels) > 5 else {}
    classes = class_scores(scores.counts)
    metrics = {
        "accuracy": scores.accuracy,
        **top,
        "macro_f1": float(np.mean([one.f1 for one in classes])),
        "calibration_error": scores.calibration_error,
        "cross_entropy": scores.loss,
    }
    per_class = {label: dataclasses.asdict(one) for label, one in zip(labels, classes)}
    return metrics | {"per_class": per_class, "labels": list(labels), "confusion": scores.counts.tolist()}


def _segmentation_metrics(model: ImageModel, images: Images) -> dict[str, Any]:
    label_index = np.full(256, IGNORE_INDEX, np.int64)
    label_index[list(model.mask_values)] = np.arange(len(model.labels))
    for value in images.mask_values:
        if value != NO_LABEL and label_index[value] == IGNORE_INDEX:
            known = ", ".join(map(str, model.mask_values[:10])) + (", …" if len(model.labels) > 10 else "")
            message = f"The masks contain the value {value}, which is not a label of the model."
            raise RegardError(message, f"Use its labels ({known}), or {NO_LABEL} for unlabeled pixels.")
    counts = np.zeros((len(model.labels), len(model.labels)), np.int64)
    with batch_progress("segmenting") as on_progress:
        for indices in index_blocks(len(images), on_progress):
            for predicted, i in zip(model.segment(list(images.select(indices))), indices.tolist()):
                counts += confusion_counts(predicted, label_index[images.mask(i)], len(model.labels))
    scores = mask_scores(counts)
    iou_per_label = {label: float(iou) for label, iou in zip(model.labels, scores.iou) if not np.isnan(iou)}
    metrics = {"mean_iou": scores.mean_iou, "iou": iou_per_label, "pixel_accuracy": scores.pixel_accuracy}
    return metrics | {"labels": list(model.labels), "confusion": counts.tolist()}


def index_blocks(count: int, on_progress: Callable[[int, int | None], None]) -> Iterator[Int[np.ndarray, "B"]]:
    """The indices 0 to `count` in blocks; reports progress after each block."""
    for start in range(0, count, BLOCK_SIZE):
        yield np.arange(start, min(start + BLOCK_SIZE, count))
        on_progress(min(start + BLOCK_SIZE, count), count)


def plot_confusion(results: dict[str, Any], file_format: str) -> bytes:
    """Plot of the confusion matrix of an evaluation, as the bytes of a file."""
    from regard.viewer.plots.confusion_matrix import draw_confusion  # matplotlib is slow to import

    items = "pixels" if "mean_iou" in results else "texts" if "texts" in results else "images"
    metric = "mean IoU" if items == "pixels" else "accuracy"
    value = results["mean_iou" if items == "pixels" else "accuracy"]
    title = f"{' '.join(results['data'])}: {metric} {value:.2f} %"
    return draw_confusion(np.array(results["confusion"]), results["labels"], title, items, file_format)
