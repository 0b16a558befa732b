"""Attention, as defined. Every kernel is tested against these lines; nothing else is meant by "right"."""

from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention.bias import Bias
from regard.attention.masks import Mask
from regard.attention.offsets import Offsets
from regard.attention.scores import Score


def reference(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S C"],
    v: Float[Tensor, "B G S Dv"],
    score: Score,
    mask: Mask | None = None,
    bias: Bias | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """softmax(score(q, k) + bias, over the keys that the mask allows) v.

    >>> from regard.attention.scores import Dot
    >>> reference(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]]), Dot())
    tensor([[[[2.]]]])
    """
    (H, T), S = q.shape[1:3], k.shape[2]
    k, v = repeat_heads(k, H), repeat_heads(v, H)
    p, s = torch.arange(T, device=q.device) + (S - T), torch.arange(S, device=q.device)
    if q.dtype == torch.float16:  # ends at 65504, where scores need not
        q, k = q.float(), k.float()
    scores = score(q, k)
    if bias is not None:
        scores = scores + bias(p, s)
    return softmax(scores, None if mask is None else mask.block(p, s)).to(v.dtype) @ v


def softmax(
    scores: Float[Tensor, "*b T S"], allowed: Bool[Tensor, "*#c #T S"] | None = None
) -> Float[Tensor, "*b T S"]:
    """The softmax over the allowed keys, at least in float32: exactly 0 elsewhere, and a row of 0 where none is."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if allowed is None:
        return scores.softmax(-1)
    # The smallest finite number instead of −∞, so that a row without any key is no NaN on its way to 0.
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)


def repeat_heads(x: Float[Tensor, "B G S D"], heads: int) -> Float[Tensor, "B H S D"]:
    """Grouped heads: each head of x serves H / G heads of the queries, side by side."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def reference_packed(
    q: Float[Tensor, "N H D"],
    k: Float[Tensor, "M G C"],
    v: Float[Tensor, "M G Dv"],
    score: Score,
    mask: Mask | None,
    bias: Bias | None,
    q_offsets: Offsets,
    k_offsets: Offsets,
) -> Float[Tensor, "N H Dv"]:
    """The same for packed sequences: one by one."""
    outs = []
    borders = list(zip(q_offsets.starts.tolist(), k_offsets.starts.tolist()))
    if len(borders) == 1:  # no sequences: the same as one of no queries and no keys
        borders, mask = borders * 2, None
    for b, ((t0, s0), (t1, s1)) in enumerate(pairwise(borders)):
        one_q, one_k, one_v = (x[None].transpose(1, 2) for x in (q[t0:t1], k[s0:s1], v[s0:s1]))
        out = reference(one_q, one_k, one_v, score, mask and mask.of_batch(slice(b, b + 1)), bias)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
