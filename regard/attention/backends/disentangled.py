"""Backend "disentangled": the score `Disentangled` without gradients, on torch's fused attention.

The products with relative positions are computed for a block of queries at a time and passed as a mask of floats, so
that scores, softmax and the sum of the values are one kernel. Memory is that of the inputs and of one block.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.attention.backends.call import Call
from regard.attention.reference import repeat_heads
from regard.attention.scores import Disentangled
from regard.kernels.score_blocks import score_blocks


def supports(call: Call) -> bool:
    if type(call.score) is not Disentangled or call.bias is not None:
        return False
    tensors = (call.q, call.k, call.v, call.score.keys, call.score.queries)
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    score, parts = call.score, call.mask_parts
    assert isinstance(score, Disentangled)
    q, v = call.q, repeat_heads(call.v, call.q.shape[1])
    k = repeat_heads(call.k, q.shape[1])
    (B, H, T, _), S, scale = q.shape, k.shape[2], score.scale
    of_query, of_key = q @ (score.keys * scale).mT.to(q.dtype), k @ (score.queries * scale).mT.to(k.dtype)
    out = v.new_empty(B, H, T, v.shape[-1])
    for b, t, s in score_blocks((B, H, T, S), q.device.type, 3):
        p = torch.arange(t.start, min(t.stop, T), device=q.device) + (S - T)
        keys = torch.arange(s.start, s.stop, device=q.device)
        rows, columns = score.select_positions(of_query[b, :, t], of_key[b, :, s], p, keys)
        positions = rows.add_(columns)
        allowed = None if parts.mask is None else parts.select_sequences(b).mask(p, keys)  # type: ignore[union-attr]
        if allowed is not None:
            positions.masked_fill_(~allowed, torch.finfo(positions.dtype).min / 2)
        block = scaled_dot_product_attention(q[b, :, t], k[b, :, s], v[b, :, s], attn_mask=positions, scale=scale)
        # Zeros for queries without an allowed key.
        out[b, :, t] = block if allowed is None else block * allowed.any(-1, keepdim=True)
    return out
