"""Reference implementation: the definition of attention, against which every backend is tested."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.bias import Bias
from regard.attention.masks import Mask
from regard.attention.offsets import Offsets
from regard.attention.scores import Score
from regard.kernels.masked_softmax import masked_softmax


def reference(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S C"],
    v: Float[Tensor, "B G S Dv"],
    score: Score,
    mask: Mask | None = None,
    bias: Bias | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """softmax(score(q, k) + bias) v, over the keys that the mask allows.

    >>> from regard.attention.scores import Dot
    >>> reference(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]]), Dot())
    tensor([[[[2.]]]])
    """
    (H, T), S = q.shape[1:3], k.shape[2]
    k, v = repeat_heads(k, H), repeat_heads(v, H)
    p, s = torch.arange(T, device=q.device) + (S - T), torch.arange(S, device=q.device)
    if q.dtype == torch.float16:  # scores may exceed its maximum, 65504
        q, k = q.float(), k.float()
    scores = score(q, k)
    if bias is not None:
        scores = scores + bias(p, s)
    return masked_softmax(scores, None if mask is None else mask(p, s)).to(v.dtype) @ v


def repeat_heads(x: Float[Tensor, "B G S D"], heads: int) -> Float[Tensor, "B H S D"]:
    """Repeat the heads of grouped-query attention: each head of x serves H / G consecutive heads of the queries."""
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
    """`reference` for packed sequences, one at a time."""
    outputs = []
    bounds = list(zip(q_offsets.starts.tolist(), k_offsets.starts.tolist()))
    if len(bounds) == 1:  # no sequences: equivalent to one without queries and keys
        bounds, mask = bounds * 2, None
    for b, ((t0, s0), (t1, s1)) in enumerate(pairwise(bounds)):
        sequence_q, sequence_k, sequence_v = (x[None].transpose(1, 2) for x in (q[t0:t1], k[s0:s1], v[s0:s1]))
        out = reference(
            sequence_q, sequence_k, sequence_v, score, mask and mask.select_sequences(slice(b, b + 1)), bias
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
