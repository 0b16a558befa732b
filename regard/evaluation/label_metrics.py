"""How good are labels, of pictures or of their pixels: how often they are right, and whether a model knows that."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from regard.data import IGNORED
from regard.evaluation.text_metrics import intersection_over_union, label_counts

# Of equal width, as Guo et al. (2017) have them.
BINS = 15


@dataclass(frozen=True, eq=False)
class LabelScores:
    """In percent but for the loss, which is in nats; `counts` has a row for each label that is right."""

    accuracy: float
    top_5: float
    calibration_error: float
    loss: float
    counts: Int[np.ndarray, "V V"]


def label_scores(probabilities: Float[np.ndarray, "M V"], labels: Int[np.ndarray, "M"]) -> LabelScores:
    """Scores of what a model gives each label, against the number of the right one; what is IGNORED is left out.

    >>> found = label_scores(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 1]))
    >>> found.accuracy, round(found.calibration_error, 6), found.counts.tolist()
    (50.0, 45.0, [[1, 0], [1, 0]])
    """
    real = labels != IGNORED
    probabilities, labels = probabilities[real], labels[real]
    right = probabilities[np.arange(len(labels)), labels]
    return LabelScores(
        accuracy=top_accuracy(probabilities, labels, 1),
        top_5=top_accuracy(probabilities, labels, 5),
        calibration_error=calibration_error(probabilities, labels),
        loss=float(-np.log(np.maximum(right, np.finfo(right.dtype).tiny)).mean()) if len(labels) else 0.0,
        counts=label_counts(probabilities.argmax(1), labels, probabilities.shape[1]),
    )


@dataclass(frozen=True)
class ClassScores:
    """Of one class, in percent: how often what was given its label has it (precision), how often what has it was given
    it (recall), their harmonic mean (F1); and how often it occurs (support).
    """

    precision: float
    recall: float
    f1: float
    support: int


def class_scores(counts: Int[np.ndarray, "V V"]) -> list[ClassScores]:
    """Scores of each class, from how often each label (rows) was given each (columns); 0 where nothing is counted.

    >>> class_scores(np.array([[3, 1], [0, 4]]))[1]
    ClassScores(precision=80.0, recall=100.0, f1=88.88888888888889, support=4)
    """
    right, given, support = counts.diagonal(), counts.sum(0), counts.sum(1)
    columns = (
        100 * right / np.maximum(given, 1),
        100 * right / np.maximum(support, 1),
        200 * right / np.maximum(given + support, 1),
    )
    return [
        ClassScores(float(precision), float(recall), float(f1), int(count))
        for precision, recall, f1, count in zip(*columns, support)
    ]


def top_accuracy(probabilities: Float[np.ndarray, "M V"], labels: Int[np.ndarray, "M"], k: int) -> float:
    """How often the right label is among the k likeliest, in percent. Of labels that are alike the first counts first.

    >>> top_accuracy(np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]]), np.array([1, 1]), 1)
    0.0
    """
    right = probabilities[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(probabilities.shape[1]) < labels[:, None]
    before = (probabilities > right) | ((probabilities == right) & earlier)
    return 100 * float((before.sum(1) < k).sum()) / max(1, len(labels))


def calibration_error(probabilities: Float[np.ndarray, "M V"], labels: Int[np.ndarray, "M"], bins: int = BINS) -> float:
    """The expected calibration error, in percent: how far what a model is sure of is from how often it is right.

    Answers are put into bins of equal width by the probability of the likeliest label. The error of a bin is the
    difference of its mean and of the share that is right; bins count by their size.

    >>> calibration_error(np.array([[0.75, 0.25]] * 4), np.array([0, 0, 0, 1]))
    0.0
    """
    sure, right = probabilities.max(1).astype(np.float64), probabilities.argmax(1) == labels
    which = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    apart = np.bincount(which, weights=right - sure, minlength=bins)
    return 100 * float(np.abs(apart).sum()) / max(1, len(labels))


@dataclass(frozen=True, eq=False)
class MaskScores:
    """In percent; `iou` has a number for each label, NaN for one that is neither there nor found."""

    mean_iou: float
    iou: Float[np.ndarray, "V"]
    pixel_accuracy: float
    counts: Int[np.ndarray, "V V"]


def mask_scores(counts: Int[np.ndarray, "V V"]) -> MaskScores:
    """Scores of pixels' labels by how often each (rows) was given each (columns): see `label_counts`.

    >>> mask_scores(np.array([[3, 1], [0, 4]])).mean_iou
    77.5
    """
    iou = 100 * intersection_over_union(counts)
    mean = float(np.nanmean(iou)) if counts.any() else 0.0
    return MaskScores(mean, iou, 100 * float(np.trace(counts)) / max(1, counts.sum()), counts)
