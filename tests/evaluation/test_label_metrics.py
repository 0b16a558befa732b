"""Scores of labels, each against a plain twin and by cases that can be computed by hand."""

import math

import numpy as np
import pytest

from regard.data import IGNORED
from regard.evaluation.label_metrics import calibration_error, label_scores, mask_scores, top_accuracy
from regard.evaluation.text_metrics import intersection_over_union, label_counts


def answers(count=400, labels=7, seed=0):
    """Probabilities, some of them alike, and right labels, which are not always the likeliest."""
    random = np.random.default_rng(seed)
    logits = random.integers(-2, 3, (count, labels)) * random.choice([0.3, 1.0, 3.0], (count, 1))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return shares.astype(np.float32), random.integers(0, labels, count)


# Among the likeliest


@pytest.mark.parametrize("k", [1, 2, 5, 7, 9])
def test_top_accuracy_counts_what_a_stable_order_puts_first(k):
    shares, labels = answers()
    found = sum(int(label in sorted(range(7), key=lambda i: -row[i])[:k]) for row, label in zip(shares, labels))
    assert top_accuracy(shares, labels, k) == pytest.approx(100 * found / len(labels))


def test_top_accuracy_by_hand():
    shares = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3]])
    labels = np.array([0, 0, 2])  # the likeliest, the third, the second
    assert [top_accuracy(shares, labels, k) for k in (1, 2, 3)] == pytest.approx([100 / 3, 200 / 3, 100])


def test_the_first_of_labels_that_are_alike_is_the_one_that_is_given():
    even = np.full((4, 4), 0.25)
    assert [top_accuracy(even, np.arange(4), k) for k in (1, 2, 3, 4)] == [25, 50, 75, 100]
    assert top_accuracy(even, np.arange(4), 1) == 100 * np.mean(even.argmax(1) == np.arange(4))


# Calibration


def plain_calibration_error(shares, labels, bins=15):
    total = 0.0
    for b in range(bins):
        inside = [i for i, row in enumerate(shares) if b / bins < float(row.max()) <= (b + 1) / bins]
        if inside:
            right = sum(int(shares[i].argmax() == labels[i]) for i in inside) / len(inside)
            sure = sum(float(shares[i].max()) for i in inside) / len(inside)
            total += len(inside) / len(shares) * abs(right - sure)
    return 100 * total


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_is_that_of_its_definition(seed):
    shares, labels = answers(seed=seed)
    found = calibration_error(shares, labels)
    assert found == pytest.approx(plain_calibration_error(shares, labels), abs=1e-4)
    assert found > 5


def test_calibration_error_by_hand():
    sure = np.array([[1.0, 0.0]] * 4)
    assert calibration_error(sure, np.array([0, 0, 0, 0])) == 0
    assert calibration_error(sure, np.array([0, 0, 0, 1])) == pytest.approx(25)
    # 0.6 and 0.7 fall into the bins (8/15, 9/15] and (10/15, 11/15]: errors of one bin do not cancel those of another.
    two = np.array([[0.6, 0.4]] * 2 + [[0.7, 0.3]] * 2)
    assert calibration_error(two, np.array([0, 0, 1, 1])) == pytest.approx(100 * (2 * 0.4 + 2 * 0.7) / 4)
    assert calibration_error(two, np.array([0, 0, 1, 1]), bins=1) == pytest.approx(100 * (0.65 - 0.5))


# All of them


def test_scores_of_labels():
    shares, labels = answers()
    found = label_scores(shares, labels)
    assert found.accuracy == pytest.approx(100 * np.mean(shares.argmax(1) == labels))
    assert found.top_5 == top_accuracy(shares, labels, 5)
    assert found.loss == pytest.approx(-np.mean([math.log(row[label]) for row, label in zip(shares, labels)]), rel=1e-5)
    assert found.counts.sum() == len(labels)
    assert found.counts[2, 3] == sum(int(label == 2 and row.argmax() == 3) for row, label in zip(shares, labels))
    assert np.trace(found.counts) == round(found.accuracy * len(labels) / 100)


def test_what_has_no_label_is_left_out():
    shares, labels = answers(50)
    some = np.where(np.arange(50) % 3 == 0, IGNORED, labels)
    found, wanted = label_scores(shares, some), label_scores(shares[some != IGNORED], labels[some != IGNORED])
    assert (found.accuracy, found.loss, found.calibration_error) == pytest.approx(
        (wanted.accuracy, wanted.loss, wanted.calibration_error)
    )
    assert found.counts.sum() == sum(some != IGNORED)


def test_a_label_that_was_held_impossible_costs_much_and_not_infinitely():
    assert 80 < label_scores(np.array([[1.0, 0.0]], np.float32), np.array([1])).loss < 100


# Masks


def plain_iou(found, wanted, labels):
    shares = []
    for label in range(labels):
        a = {i for i, (one, right) in enumerate(zip(found, wanted)) if right != IGNORED and one == label}
        b = {i for i, right in enumerate(wanted) if right == label}
        shares.append(len(a & b) / len(a | b) if a | b else math.nan)
    return shares


def test_intersection_over_union_is_that_of_sets_of_pixels():
    random = np.random.default_rng(0)
    wanted = random.integers(0, 4, (3, 5, 7))
    found = np.where(random.random(wanted.shape) < 0.6, wanted, random.integers(0, 4, wanted.shape))
    wanted[random.random(wanted.shape) < 0.2] = IGNORED
    counts = label_counts(found, wanted, 5)  # the last is neither there nor found
    assert counts.sum() == (wanted != IGNORED).sum()
    expected = plain_iou(found.flatten(), wanted.flatten(), 5)
    np.testing.assert_allclose(intersection_over_union(counts), expected)
    scores = mask_scores(counts)
    np.testing.assert_allclose(scores.iou, 100 * np.array(expected))
    assert scores.mean_iou == pytest.approx(100 * np.mean(expected[:4]))
    assert scores.pixel_accuracy == pytest.approx(100 * np.mean((found == wanted)[wanted != IGNORED]))


def test_masks_by_hand():
    wanted = np.array([[0, 0, 0, 1], [0, 1, 1, IGNORED]])
    found = np.array([[0, 0, 1, 1], [1, 1, 0, 0]])
    counts = label_counts(found, wanted, 2)
    assert counts.tolist() == [[2, 2], [1, 2]]
    scores = mask_scores(counts)
    assert scores.iou.tolist() == [40, 40]  # 2 of 5 either way
    assert scores.mean_iou == 40
    assert scores.pixel_accuracy == pytest.approx(400 / 7)
    assert mask_scores(np.zeros((2, 2), int)).mean_iou == 0
