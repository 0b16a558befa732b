"""Packed sequences on torch's variable-length flash attention (CUDA, bf16 or f16).

Nothing synchronizes with the device, and no shape depends on data, so calls can be compiled and captured in a CUDA
graph.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.attention.backends.call import Call
from regard.attention.scores import DotLike, Location, is_computed_as

if torch.cuda.is_available():  # importing it takes a second
    from torch.nn.attention.varlen import varlen_attn

MAX_WIDTH = 256


def supports(call: Call) -> bool:
    if call.q_offsets is None or call.k_offsets is None or not supports_inputs(call):
        return False
    # Sequences of equal lengths are a (B, T) batch without moving data, and torch's kernels for these are faster. They
    # have no sliding window.
    has_window = call.mask_parts.window is not None or call.mask_parts.distance is not None
    return has_window or not (call.q_offsets.is_rectangular and call.k_offsets.is_rectangular)


def supports_inputs(call: Call) -> bool:
    """Whether device, dtype, score, mask and widths are supported, packed or not."""
    parts = call.mask_parts
    return (
        call.q.is_cuda
        and call.v.dtype in (torch.bfloat16, torch.float16)
        and is_computed_as(call.score, DotLike)
        and call.bias is None
        and parts.lengths is None
        and parts.rest is None
        and max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1]) <= MAX_WIDTH
    )


def run(call: Call) -> Float[Tensor, "N H Dv"]:
    q_offsets, k_offsets, parts = call.q_offsets, call.k_offsets, call.mask_parts
    assert q_offsets is not None
    assert k_offsets is not None
    H, width = call.q.shape[1], call.v.shape[-1]
    q, k, v, scale = transform_packed(call)
    q, k, v = (_align(x, H) for x in (q, k, v))
    q, k, v = (pad(x, (0, max(q.shape[-1], v.shape[-1]) - x.shape[-1])) for x in (q, k, v))
    # Numbers of keys to the left and to the right of the query's own position; −1 is all of them.
    left, right = -1 if parts.window is None else parts.window - 1, -1
    if parts.distance is not None:
        left, right = parts.distance if left < 0 else min(left, parts.distance), parts.distance
    if parts.causal or parts.window is not None:
        right = 0
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
    assert isinstance(out, Tensor)  # the log-sum-exp is returned only on request
    out = out[..., :width]
    if k_offsets is q_offsets:
        return out
    # Zeros for queries of sequences without keys, in the output and in the gradients.
    has_keys = (k_offsets.lengths > 0)[q_offsets.sequences]
    return out.masked_fill(~has_keys[:, None, None], 0.0)


def transform_packed(
    call: Call,
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "M G D"], Float[Tensor, "M G Dv"], float]:
    """q and k transformed by the score, v, all in the dtype of v, and the scale."""
    assert call.k_offsets is not None
    # Scores transform (H, N, D): heads first.
    positions = call.k_offsets.positions if isinstance(call.score, Location) else None
    q, k, scale = call.score.transform(call.q.transpose(0, 1), call.k.transpose(0, 1), positions)
    return q.transpose(0, 1).to(call.v.dtype), k.transpose(0, 1).to(call.v.dtype), call.v, scale


def _align(x: Float[Tensor, "N G D"], heads: int) -> Float[Tensor, "N H P"]:
    """x with all heads, contiguous, padded to a multiple of 8 elements, as flash attention requires."""
    x = pad(x, (0, -x.shape[-1] % 8))
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
    return x.contiguous()
