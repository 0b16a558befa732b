"""Softmax over the allowed keys, in plain PyTorch."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_softmax(
    scores: Float[Tensor, "*b T S"], allowed: Bool[Tensor, "*#c #T S"] | None = None
) -> Float[Tensor, "*b T S"]:
    """Softmax over the last axis, in float32 or wider; exactly 0 where not allowed, also in rows without allowed keys.

    >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]]))
    tensor([[1., 0.],
            [0., 0.]])
    """
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if allowed is None:
        return scores.softmax(-1)
    # The smallest finite number instead of −∞: softmax of a row of −∞ would be NaN.
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
