"""What a tape has to do for pictures, besides what it does for texts: pixels, convolutions, labels of pixels.

As in `tape`, in plain NumPy; web/imagetape.js has the same.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

Array = Float[np.ndarray, "..."]


def _standardise(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """(x − μ) / σ, with a number of each for every channel."""
    return (inputs[0] - params[0]) / params[1]


def _convolve(
    inputs: Sequence[Array], params: Sequence[Array], size: Sequence[int], stride: int, padding: int
) -> Array:
    """(H·W, C), cells row by row, by filters (O, C, K, K): a row for every `stride`-th cell. Outside are zeros."""
    weight, bias = params
    pad = (padding, padding)
    cells = np.pad(inputs[0].reshape(*size, -1), (pad, pad, (0, 0)))
    around = np.lib.stride_tricks.sliding_window_view(cells, weight.shape[2:], axis=(0, 1))[::stride, ::stride]
    return (np.einsum("ijckl,ockl->ijo", around, weight) + bias).reshape(-1, len(weight))


def _norm_all(inputs: Sequence[Array], params: Sequence[Array], eps: float) -> Array:
    """Mean 0 and variance 1 over all cells and channels; then a gain and a bias for each channel."""
    x = inputs[0] - inputs[0].mean()
    return x / np.sqrt((x * x).mean() + eps) * params[0] + params[1]


def _blend(
    inputs: Sequence[Array], params: Sequence[Array], rows: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]
) -> Array:
    """Each row a mixture of some rows."""
    return np.einsum("tn,tnc->tc", np.array(shares), inputs[0][np.array(rows)])


def _match(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """The product of each row of one with each row of the other."""
    return inputs[0] @ inputs[1].T


PICTURE_OPERATIONS: dict[str, Callable[..., Array]] = {
    "standardise": _standardise,
    "convolve": _convolve,
    "norm_all": _norm_all,
    "blend": _blend,
    "match": _match,
}
