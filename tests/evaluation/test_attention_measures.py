"""Entropy and agreement against their definitions, term by term."""

import math

import numpy as np
import pytest

from regard.evaluation.attention_measures import agreement, agreement_of_heads, entropy, mean_entropy


def drawn(heads: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    weights = np.random.default_rng(seed).random((heads, rows, columns)) ** 4
    weights[weights < 0.01] = 0
    return weights / weights.sum(-1, keepdims=True)


def bits(row: np.ndarray) -> float:
    return -sum(p * math.log2(p) for p in row.tolist() if p > 0)


def test_entropy_term_by_term():
    weights = drawn(3, 5, 7)
    np.testing.assert_allclose(entropy(weights), [[bits(row) for row in head] for head in weights])
    assert entropy(np.zeros((2, 4))).tolist() == [0, 0]
    assert entropy(np.full(8, 1 / 8)) == 3


def test_rows_that_look_at_nothing_are_left_out():
    weights = drawn(3, 5, 7)
    empty = np.concatenate([weights, np.zeros((3, 2, 7))], axis=1)
    np.testing.assert_allclose(mean_entropy(empty), entropy(weights).mean(1))
    np.testing.assert_allclose(agreement_of_heads(empty), agreement_of_heads(weights))
    assert mean_entropy(np.zeros((3, 2, 7))).tolist() == [0, 0, 0]


def test_agreement_is_one_less_the_total_variation_distance():
    a, b = drawn(2, 5, 7)
    apart = [sum(abs(x - y) for x, y in zip(p, q)) / 2 for p, q in zip(a.tolist(), b.tolist())]
    assert float(agreement(a, b)) == pytest.approx(1 - sum(apart) / 5)
    assert 0.1 < float(agreement(a, b)) < 0.9
    assert float(agreement(a, a)) == pytest.approx(1)


def test_each_head_against_the_others():
    weights = drawn(4, 5, 7)
    found = agreement_of_heads(weights)
    for h in range(4):
        expected = np.mean([float(agreement(weights[h], weights[other])) for other in range(4) if other != h])
        assert found[h] == pytest.approx(expected)
    assert agreement_of_heads(weights[:1]).tolist() == [1]
    apart = np.stack([np.eye(4)[[(t + h) % 4 for t in range(4)]] for h in range(4)])
    assert agreement_of_heads(apart).tolist() == [0, 0, 0, 0]
