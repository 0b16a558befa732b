"""Measures of attention maps, which the page computes in JavaScript."""

import numpy as np
from jaxtyping import Float

from regard.evaluation.teacher_forcing import entropy


def mean_entropy(weights: Float[np.ndarray, "H T S"]) -> Float[np.ndarray, "H"]:
    """Mean entropy per row for each head, without fully masked rows.

    >>> mean_entropy(np.array([[[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]]))
    array([0.5])
    """
    is_unmasked = weights.sum(-1) > 0
    return entropy(weights).sum(-1) / np.maximum(is_unmasked.sum(-1), 1)


def agreement(a: Float[np.ndarray, "*n T S"], b: Float[np.ndarray, "*n T S"]) -> Float[np.ndarray, "*n"]:
    """Agreement of two heads: 1 minus the total variation distance of their rows, averaged over rows.

    It is 1 if the maps are equal and 0 if no two rows share a key. Rows that are fully masked in both are left out.

    >>> float(agreement(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])))
    0.75
    """
    rows = ((a.sum(-1) > 0) | (b.sum(-1) > 0)).sum(-1)
    return np.minimum(a, b).sum((-1, -2)) / np.maximum(rows, 1)
