"""Entropy and agreement against their definitions, term by term."""

import math

import numpy as np
import pytest

from regard.viewer.measures import agreement, entropy, mean_entropy


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
    assert agreement(empty) == pytest.approx(agreement(weights))
    assert mean_entropy(np.zeros((3, 2, 7))).tolist() == [0, 0, 0]
    assert agreement(np.zeros((3, 2, 7))) == 1


def test_two_heads_agree_by_their_jensen_shannon_divergence():
    a, b = drawn(2, 5, 7)
    apart = []
    for p, q in zip(a, b):
        middle = (p + q) / 2
        apart += [sum(x * math.log2(x / m) for one in (p, q) for x, m in zip(one, middle) if x > 0) / 2]
    assert agreement(np.stack([a, b])) == pytest.approx(1 - np.mean(apart))
    assert 0.2 < agreement(np.stack([a, b])) < 0.9


def test_agreement_is_between_nothing_in_common_and_the_same():
    weights = drawn(4, 5, 7)
    assert agreement(weights[:1].repeat(4, 0)) == pytest.approx(1)
    assert agreement(weights[:1]) == 1
    apart = np.stack([np.eye(4)[[(t + h) % 4 for t in range(4)]] for h in range(4)])
    assert agreement(apart) == pytest.approx(0)
    assert agreement(weights) == pytest.approx(agreement(weights[::-1]))
