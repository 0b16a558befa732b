"""Measures of attention maps: entropy of rows and agreement between heads.

The page computes them in JavaScript; tests compare it with these functions.
"""

import numpy as np
from jaxtyping import Float


def entropy(rows: Float[np.ndarray, "*n S"]) -> Float[np.ndarray, "*n"]:
    """Entropy of each row in bits: 0 for one key, log2 n for n keys with equal weights. A row of zeros has 0.

    >>> entropy(np.array([[1.0, 0.0], [0.5, 0.5]]))
    array([0., 1.])
    """
    return (rows * -np.log2(rows, out=np.zeros_like(rows), where=rows > 0)).sum(-1)


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


def head_agreement(weights: Float[np.ndarray, "H T S"]) -> Float[np.ndarray, "H"]:
    """Mean agreement of each head with the other heads. A single head has 1.

    >>> head_agreement(np.stack([np.eye(2), np.eye(2), 1 - np.eye(2)]))
    array([0.5, 0.5, 0. ])
    """
    others = len(weights) - 1
    if not others:
        return np.ones(1)
    pairwise = np.array([[agreement(a, b) for b in weights] for a in weights])
    return (pairwise.sum(1) - pairwise.diagonal()) / others
