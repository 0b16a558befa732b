"""Metrics of predicted labels: accuracy, calibration, per-class scores, and scores of segmentation masks."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from regard.data.batching.batch import IGNORE_INDEX
from regard.evaluation.text_metrics import confusion_counts, intersection_over_union

# Number of bins of equal width, as in Guo et al. (2017).
BINS = 15


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Scores in percent; the loss is in nats. `counts` is the confusion matrix, with targets as rows."""

    accuracy: float
    top_5: float
    calibration_error: float
    loss: float
    counts: Int[np.ndarray, "V V"]


def label_scores(probabilities: Float[np.ndarray, "M V"], labels: Int[np.ndarray, "M"]) -> LabelScores:
    """Scores of predicted probabilities against label indices; IGNORE_INDEX labels are skipped.

    >>> scores = label_scores(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 1]))
    >>> scores.accuracy, round(scores.calibration_error, 6), scores.counts.tolist()
    (50.0, 45.0, [[1, 0], [1, 0]])
    """
    real = labels != IGNORE_INDEX
    probabilities, labels = probabilities[real], labels[real]
    target_probs = probabilities[np.arange(len(labels)), labels]
    return LabelScores(
        accuracy=top_accuracy(probabilities, labels, 1),
        top_5=top_accuracy(probabilities, labels, 5),
        calibration_error=calibration_error(probabilities, labels),
        loss=float(-np.log(np.maximum(target_probs, np.finfo(target_probs.dtype).tiny)).mean()) if len(labels) else 0.0,
        counts=confusion_counts(probabilities.argmax(1), labels, probabilities.shape[1]),
    )


@dataclass(frozen=True)
class ClassScores:
    """Precision, recall and F1 of one class, in percent, and its number of examples (support)."""

    precision: float
    recall: float
    f1: float
    support: int


def class_scores(counts: Int[np.ndarray, "V V"]) -> list[ClassScores]:
    """Scores of each class, from a confusion matrix with targets as rows; 0 where the denominator is 0.

    >>> class_scores(np.array([[3, 1], [0, 4]]))[1]
    ClassScores(precision=80.0, recall=100.0, f1=88.88888888888889, support=4)
    """
    correct, predicted, support = counts.diagonal(), counts.sum(0), counts.sum(1)
    columns = (
        100 * correct / np.maximum(predicted, 1),
        100 * correct / np.maximum(support, 1),
        200 * correct / np.maximum(predicted + support, 1),
    )
    return [
        ClassScores(float(precision), float(recall), float(f1), int(count))
        for precision, recall, f1, count in zip(*columns, support)
    ]


def top_accuracy(probabilities: Float[np.ndarray, "M V"], labels: Int[np.ndarray, "M"], k: int) -> float:
    """How often the target is among the k most probable labels, in percent. Ties are broken by the lower index.

    >>> top_accuracy(np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]]), np.array([1, 1]), 1)
    0.0
    """
    target_probs = probabilities[np.arange(len(labels)), labels][:, None]
    is_lower_index = np.arange(probabilities.shape[1]) < labels[:, None]
    ranked_above = (probabilities > target_probs) | ((probabilities == target_probs) & is_lower_index)
    return 100 * float((ranked_above.sum(1) < k).sum()) / max(1, len(labels))


def calibration_error(probabilities: Float[np.ndarray, "M V"], labels: Int[np.ndarray, "M"], bins: int = BINS) -> float:
    """The expected calibration error in percent (Guo et al. 2017).

    Predictions are binned by the probability of the most probable label. The error of a bin is the difference between
    its mean probability and its accuracy; bins are weighted by their size.

    >>> calibration_error(np.array([[0.75, 0.25]] * 4), np.array([0, 0, 0, 1]))
    0.0
    """
    confidence, is_correct = probabilities.max(1).astype(np.float64), probabilities.argmax(1) == labels
    bin_indices = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(bin_indices, weights=is_correct - confidence, minlength=bins)
    return 100 * float(np.abs(gaps).sum()) / max(1, len(labels))


@dataclass(frozen=True, eq=False)
class MaskScores:
    """Scores in percent. `iou` has one value per label, NaN for a label that occurs in no target and no prediction."""

    mean_iou: float
    iou: Float[np.ndarray, "V"]
    pixel_accuracy: float
    counts: Int[np.ndarray, "V V"]


def mask_scores(counts: Int[np.ndarray, "V V"]) -> MaskScores:
    """Scores of pixel labels, from a confusion matrix with targets as rows (see `confusion_counts`).

    >>> mask_scores(np.array([[3, 1], [0, 4]])).mean_iou
    77.5
    """
    iou = 100 * intersection_over_union(counts)
    mean = float(np.nanmean(iou)) if counts.any() else 0.0
    return MaskScores(mean, iou, 100 * float(np.trace(counts)) / max(1, counts.sum()), counts)
