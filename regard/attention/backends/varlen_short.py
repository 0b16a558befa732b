"""Dot-product scores over short sequences on the kernel `kernels.triton.varlen_short` (bf16 or f16).

Packed sequences of up to 128 tokens, and padded batches in which all sequences have the same 16 to 64 tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.backends import varlen
from regard.attention.backends.call import Call
from regard.attention.offsets import Offsets
from regard.kernels.triton import varlen_short
from regard.kernels.triton.support import contiguous_rows

# Length of the sequences of a padded batch: longer ones fill the tiles of torch's kernels.
MIN_PADDED_LEN, MAX_PADDED_LEN = 16, 64


def supports(call: Call) -> bool:
    if not call.q.is_cuda:
        return False
    if call.q_offsets is None or call.k_offsets is None:
        max_q, max_k = call.q.shape[2], call.k.shape[2]
        if not (min(max_q, max_k) >= MIN_PADDED_LEN and max(max_q, max_k) <= MAX_PADDED_LEN and _is_packable(call)):
            return False
    else:
        max_q, max_k = call.q_offsets.max_len, call.k_offsets.max_len
    width = max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1])
    return (
        varlen_short.supports(call.q, max_q, max_k, width)
        and varlen.supports_inputs(call)
        and call.mask_parts.window is None
        and call.mask_parts.distance is None
    )


def _is_packable(call: Call) -> bool:
    """Whether (B, H, T, D) tensors can be packed without a copy: the heads of a token are contiguous, as in layers."""
    q, k, v = call.q, call.k, call.v
    return (
        all(x.stride(0) == x.shape[2] * x.stride(2) for x in (q, k, v))
        and (q.shape[2] == k.shape[2] or not call.mask_parts.causal)
        and not call.is_padded
    )


def _pack(call: Call) -> Call:
    """(B, H, T, D) tensors as packed sequences."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v))
    q_offsets = _equal_offsets(call.q)
    k_offsets = q_offsets if call.q.shape[2] == call.k.shape[2] else _equal_offsets(call.k)
    return call._replace(q=q, k=k, v=v, q_offsets=q_offsets, k_offsets=k_offsets)


def _equal_offsets(x: Float[Tensor, "B H T D"]) -> Offsets:
    """Offsets of B sequences of length T."""
    B, T = x.shape[0], x.shape[2]
    return Offsets(torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=x.device), total=B * T, max_len=T)


def run(call: Call) -> Float[Tensor, "..."]:
    if call.q_offsets is None:
        return run(_pack(call)).unflatten(0, (call.q.shape[0], -1)).transpose(1, 2)
    q_offsets, k_offsets = call.q_offsets, call.k_offsets
    assert q_offsets is not None
    assert k_offsets is not None
    q, k, v, scale = varlen.transform_packed(call)
    if k.shape[1] != v.shape[1]:  # Location has keys for every head of q, whatever the number of heads of k
        v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
    starts = q_offsets.starts.int(), k_offsets.starts.int()
    max_lengths = q_offsets.max_len, k_offsets.max_len
    return varlen_short.varlen_short_forward(
        *(contiguous_rows(x) for x in (q, k, v)), *starts, *max_lengths, scale, call.mask_parts.causal
    )
