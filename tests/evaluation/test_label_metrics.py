"""Metrics of labels and masks, against plain implementations and small examples."""

import math

import numpy as np
import pytest

from regard.data.batching.batch import IGNORE_INDEX
from regard.evaluation.label_metrics import calibration_error, label_scores, mask_scores, top_accuracy
from regard.evaluation.text_metrics import confusion_counts, intersection_over_union


def predictions(count=400, labels=7, seed=0):
    """Random probabilities, with ties, and random labels."""
    random = np.random.default_rng(seed)
    logits = random.integers(-2, 3, (count, labels)) * random.choice([0.3, 1.0, 3.0], (count, 1))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return probs.astype(np.float32), random.integers(0, labels, count)


# Top-k accuracy


@pytest.mark.parametrize("k", [1, 2, 5, 7, 9])
def test_top_accuracy_matches_a_stable_sort(k):
    probs, labels = predictions()
    correct = sum(int(label in sorted(range(7), key=lambda i: -row[i])[:k]) for row, label in zip(probs, labels))
    assert top_accuracy(probs, labels, k) == pytest.approx(100 * correct / len(labels))


def test_top_accuracy_of_a_small_example():
    probs = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3]])
    labels = np.array([0, 0, 2])  # ranks 1, 3 and 2
    assert [top_accuracy(probs, labels, k) for k in (1, 2, 3)] == pytest.approx([100 / 3, 200 / 3, 100])


def test_ties_are_broken_by_the_lower_index():
    uniform = np.full((4, 4), 0.25)
    assert [top_accuracy(uniform, np.arange(4), k) for k in (1, 2, 3, 4)] == [25, 50, 75, 100]
    assert top_accuracy(uniform, np.arange(4), 1) == 100 * np.mean(uniform.argmax(1) == np.arange(4))


# Calibration


def plain_calibration_error(probs, labels, bins=15):
    total = 0.0
    for b in range(bins):
        inside = [i for i, row in enumerate(probs) if b / bins < float(row.max()) <= (b + 1) / bins]
        if inside:
            accuracy = sum(int(probs[i].argmax() == labels[i]) for i in inside) / len(inside)
            confidence = sum(float(probs[i].max()) for i in inside) / len(inside)
            total += len(inside) / len(probs) * abs(accuracy - confidence)
    return 100 * total


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_matches_its_definition(seed):
    probs, labels = predictions(seed=seed)
    error = calibration_error(probs, labels)
    assert error == pytest.approx(plain_calibration_error(probs, labels), abs=1e-4)
    assert error > 5


def test_calibration_error_of_small_examples():
    certain = np.array([[1.0, 0.0]] * 4)
    assert calibration_error(certain, np.array([0, 0, 0, 0])) == 0
    assert calibration_error(certain, np.array([0, 0, 0, 1])) == pytest.approx(25)
    # 0.6 and 0.7 fall into the bins (8/15, 9/15] and (10/15, 11/15], whose errors do not cancel each other.
    two = np.array([[0.6, 0.4]] * 2 + [[0.7, 0.3]] * 2)
    assert calibration_error(two, np.array([0, 0, 1, 1])) == pytest.approx(100 * (2 * 0.4 + 2 * 0.7) / 4)
    assert calibration_error(two, np.array([0, 0, 1, 1]), bins=1) == pytest.approx(100 * (0.65 - 0.5))


# Label scores


def test_label_scores_match_their_definitions():
    probs, labels = predictions()
    scores = label_scores(probs, labels)
    assert scores.accuracy == pytest.approx(100 * np.mean(probs.argmax(1) == labels))
    assert scores.top_5 == top_accuracy(probs, labels, 5)
    assert scores.loss == pytest.approx(-np.mean([math.log(row[label]) for row, label in zip(probs, labels)]), rel=1e-5)
    assert scores.counts.sum() == len(labels)
    assert scores.counts[2, 3] == sum(int(label == 2 and row.argmax() == 3) for row, label in zip(probs, labels))
    assert np.trace(scores.counts) == round(scores.accuracy * len(labels) / 100)


def test_ignored_labels_are_skipped():
    probs, labels = predictions(50)
    some = np.where(np.arange(50) % 3 == 0, IGNORE_INDEX, labels)
    scores = label_scores(probs, some)
    expected = label_scores(probs[some != IGNORE_INDEX], labels[some != IGNORE_INDEX])
    assert (scores.accuracy, scores.loss, scores.calibration_error) == pytest.approx(
        (expected.accuracy, expected.loss, expected.calibration_error)
    )
    assert scores.counts.sum() == sum(some != IGNORE_INDEX)


def test_loss_of_a_zero_probability_is_finite():
    assert 80 < label_scores(np.array([[1.0, 0.0]], np.float32), np.array([1])).loss < 100


# Masks


def plain_iou(predicted, targets, labels):
    ious = []
    for label in range(labels):
        a = {
            i
            for i, (prediction, target) in enumerate(zip(predicted, targets))
            if target != IGNORE_INDEX and prediction == label
        }
        b = {i for i, target in enumerate(targets) if target == label}
        ious.append(len(a & b) / len(a | b) if a | b else math.nan)
    return ious


def test_intersection_over_union_matches_sets_of_pixels():
    random = np.random.default_rng(0)
    targets = random.integers(0, 4, (3, 5, 7))
    predicted = np.where(random.random(targets.shape) < 0.6, targets, random.integers(0, 4, targets.shape))
    targets[random.random(targets.shape) < 0.2] = IGNORE_INDEX
    counts = confusion_counts(predicted, targets, 5)  # the last label does not occur
    assert counts.sum() == (targets != IGNORE_INDEX).sum()
    expected = plain_iou(predicted.flatten(), targets.flatten(), 5)
    np.testing.assert_allclose(intersection_over_union(counts), expected)
    scores = mask_scores(counts)
    np.testing.assert_allclose(scores.iou, 100 * np.array(expected))
    assert scores.mean_iou == pytest.approx(100 * np.mean(expected[:4]))
    assert scores.pixel_accuracy == pytest.approx(100 * np.mean((predicted == targets)[targets != IGNORE_INDEX]))


def test_mask_scores_of_a_small_example():
    targets = np.array([[0, 0, 0, 1], [0, 1, 1, IGNORE_INDEX]])
    predicted = np.array([[0, 0, 1, 1], [1, 1, 0, 0]])
    counts = confusion_counts(predicted, targets, 2)
    assert counts.tolist() == [[2, 2], [1, 2]]
    scores = mask_scores(counts)
    assert scores.iou.tolist() == [40, 40]  # 2 of 5 either way
    assert scores.mean_iou == 40
    assert scores.pixel_accuracy == pytest.approx(400 / 7)
    assert mask_scores(np.zeros((2, 2), int)).mean_iou == 0
