"""Packed sequences as they are, with torch's variable-length flash attention (CUDA, bf16 or f16).

Nothing here waits for the device or depends on data in its shapes, so it can be compiled and captured in a graph.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.attention.kernels import Call
from regard.attention.scores import DotLike, Location

if torch.cuda.is_available():  # otherwise nobody asks for it, and it takes a second to import
    from torch.nn.attention.varlen import varlen_attn

MAX_WIDTH = 256


def takes(call: Call) -> bool:
    if call.q_offsets is None or call.k_offsets is None or not suits(call):
        return False
    # Sequences of one length are a rectangle as they lie, and torch's kernels for these are faster. None has a window.
    return call.form.window is not None or not (call.q_offsets.even and call.k_offsets.even)


def suits(call: Call) -> bool:
    """Whether device, dtype, score, mask and widths are right, packed or not."""
    form = call.form
    return (
        call.q.is_cuda
        and call.v.dtype in (torch.bfloat16, torch.float16)
        and isinstance(call.score, DotLike)
        and call.bias is None
        and form.lengths is None
        and form.rest is None
        and max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1]) <= MAX_WIDTH
    )


def run(call: Call) -> Float[Tensor, "N H Dv"]:
    q_offsets, k_offsets, form = call.q_offsets, call.k_offsets, call.form
    assert q_offsets is not None
    assert k_offsets is not None
    H, width = call.q.shape[1], call.v.shape[-1]
    q, k, v, scale = folded(call)
    q, k, v = (_flash(x, H) for x in (q, k, v))
    q, k, v = (pad(x, (0, max(q.shape[-1], v.shape[-1]) - x.shape[-1])) for x in (q, k, v))
    # Flash attention counts the keys to the left and to the right of the query's own; −1 is all of them.
    left = -1 if form.window is None else form.window - 1
    right = 0 if form.causal or form.window is not None else -1
    out = varlen_attn(
        q,
        k,
        v,
        q_offsets.starts.int(),
        k_offsets.starts.int(),
        q_offsets.max_len,
        k_offsets.max_len,
        scale=scale,
        window_size=(left, right),
    )
    assert isinstance(out, Tensor)  # only the output was asked for
    out = out[..., :width]
    if k_offsets is q_offsets:
        return out
    # A query whose sequence has no keys gets zeros, in the output and in what flows back.
    seeing = (k_offsets.lengths > 0)[q_offsets.sequences]
    return out.masked_fill(~seeing[:, None, None], 0.0)


def folded(call: Call) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "M G D"], Float[Tensor, "M G Dv"], float]:
    """q and k as the score changes them, v, all in its dtype; and the scale."""
    assert call.k_offsets is not None
    # A score folds (H, N, D): heads first.
    places = call.k_offsets.places if isinstance(call.score, Location) else None
    q, k, scale = call.score.fold(call.q.transpose(0, 1), call.k.transpose(0, 1), places)
    return q.transpose(0, 1).to(call.v.dtype), k.transpose(0, 1).to(call.v.dtype), call.v, scale


def _flash(x: Float[Tensor, "N G D"], heads: int) -> Float[Tensor, "N H P"]:
    """All heads, a multiple of 8 wide, rows contiguous."""
    x = pad(x, (0, -x.shape[-1] % 8))
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
    return x.contiguous()
