"""Numbers beside a map: how widely a row looks, and how much the heads of an attention agree.

The page computes them itself; these are what it is tested against.
"""

import math

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


def agreement(weights: Float[np.ndarray, "H T S"]) -> float:
    """How much heads look alike: 1 if all do, 0 if no two look at the same key.

    It is 1 less the Jensen-Shannon divergence of all heads at once (Lin 1991: the entropy of the mean row, less the
    mean entropy of the rows), by log2 H, which is its greatest value; the mean over rows. Of two heads it is what is
    commonly meant by that divergence; of many it needs no pairs.

    >>> agreement(np.eye(2)[None].repeat(3, axis=0)), agreement(np.stack([np.eye(2), 1 - np.eye(2)]))
    (1.0, 0.0)
    """
    looking = weights.sum((0, 2)) > 0
    if len(weights) == 1 or not looking.any():
        return 1.0
    apart = entropy(weights.mean(0)) - entropy(weights).mean(0)
    return float(1 - apart[looking].mean() / math.log2(len(weights)))
