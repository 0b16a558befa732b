"""Entropy and agreement of attention heads compared with their definitions."""

import math

import numpy as np
import pytest

from regard.evaluation.teacher_forcing import entropy
from tests.viewer.web.measures import agreement, mean_entropy


def random_weights(heads: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    weights = np.random.default_rng(seed).random((heads, rows, columns)) ** 4
    weights[weights < 0.01] = 0
    return weights / weights.sum(-1, keepdims=True)


def bits(row: np.ndarray) -> float:
    return -sum(p * math.log2(p) for p in row.tolist() if p > 0)


def test_entropy_matches_the_definition():
    weights = random_weights(3, 5, 7)
    np.testing.assert_allclose(entropy(weights), [[bits(row) for row in head] for head in weights])
    assert entropy(np.zeros((2, 4))).tolist() == [0, 0]
    assert entropy(np.full(8, 1 / 8)) == 3


def test_rows_without_attention_are_left_out():
    weights = random_weights(3, 5, 7)
    with_empty_rows = np.concatenate([weights, np.zeros((3, 2, 7))], axis=1)
    np.testing.assert_allclose(mean_entropy(with_empty_rows), entropy(weights).mean(1))
    assert mean_entropy(np.zeros((3, 2, 7))).tolist() == [0, 0, 0]


def test_agreement_is_one_minus_total_variation_distance():
    a, b = random_weights(2, 5, 7)
    distances = [sum(abs(x - y) for x, y in zip(p, q)) / 2 for p, q in zip(a.tolist(), b.tolist())]
    assert float(agreement(a, b)) == pytest.approx(1 - sum(distances) / 5)
    assert 0.1 < float(agreement(a, b)) < 0.9
    assert float(agreement(a, a)) == pytest.approx(1)
