"""Numbers beside a map: how widely a row looks, and how much the heads of an attention agree.

The page computes them itself; these are what it is tested against.
"""

import numpy as np
from jaxtyping import Float


def entropy(rows: Float[np.ndarray, "*n S"]) -> Float[np.ndarray, "*n"]:
    """How widely each row looks, in bits: 0 at one key alone, log2 n at n keys alike. A row of zeros has 0.

    >>> entropy(np.array([[1.0, 0.0], [0.5, 0.5]]))
    array([0., 1.])
    """
    return (rows * -np.log2(rows, out=np.zeros_like(rows), where=rows > 0)).sum(-1)


def mean_entropy(weights: Float[np.ndarray, "H T S"]) -> Float[np.ndarray, "H"]:
    """For each head the mean entropy of its rows; those that may look at nothing are left out.

    >>> mean_entropy(np.array([[[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]]))
    array([0.5])
    """
    looking = weights.sum(-1) > 0
    return entropy(weights).sum(-1) / np.maximum(looking.sum(-1), 1)


def agreement(a: Float[np.ndarray, "*n T S"], b: Float[np.ndarray, "*n T S"]) -> Float[np.ndarray, "*n"]:
    """How much of their weight two heads put on the same keys, on average over rows: 1 if they look alike, 0 if no two
    rows share a key. It is 1 less the total variation distance of the rows.

    >>> float(agreement(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])))
    0.75
    """
    rows = ((a.sum(-1) > 0) | (b.sum(-1) > 0)).sum(-1)
    return np.minimum(a, b).sum((-1, -2)) / np.maximum(rows, 1)


def agreement_of_heads(weights: Float[np.ndarray, "H T S"]) -> Float[np.ndarray, "H"]:
    """For each head how much it agrees with the others, on average over them. One head alone has 1.

    >>> agreement_of_heads(np.stack([np.eye(2), np.eye(2), 1 - np.eye(2)]))
    array([0.5, 0.5, 0. ])
    """
    others = len(weights) - 1
    if not others:
        return np.ones(1)
    whole = np.array([[agreement(a, b) for b in weights] for a in weights])
    return (whole.sum(1) - whole.diagonal()) / others
