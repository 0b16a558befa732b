"""Backend "concat": the score `Concat` on the fused kernel `kernels.triton.concat`, packed or padded."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.attention.backends.call import Call
from regard.attention.reference import repeat_heads
from regard.attention.scores import Concat
from regard.kernels.triton import concat
from regard.kernels.triton.support import contiguous_rows


def supports(call: Call) -> bool:
    parts = call.mask_parts
    if type(call.score) is not Concat or call.bias is not None:
        return False
    if parts.rest is not None or parts.distance is not None:
        return False
    rows = max(x.shape[-2 if call.q_offsets is None else 0] for x in (call.q, call.k))
    return concat.supports(call.q, call.v, call.score.weight_a.shape[-2], rows)


def run(call: Call) -> Float[Tensor, "..."]:
    score = call.score
    assert isinstance(score, Concat)
    is_packed = call.q_offsets is not None
    # Scores transform (…, H, N, D): heads before rows.
    q, k, v = (x.transpose(0, 1) for x in (call.q, call.k, call.v)) if is_packed else (call.q, call.k, call.v)
    # Keys of grouped heads are projected once with shared parameters, and once per head with parameters per head.
    if score.heads is not None and k.shape[-3] != score.heads:
        k = k.repeat_interleave(score.heads // k.shape[-3], 0) if is_packed else repeat_heads(k, score.heads)
    w = score.weight_a.float().reshape(1 if score.heads is None else score.heads, -1)
    matrix_q, matrix_k = score.matrices
    padding = -w.shape[-1] % 4  # the kernel processes four hidden elements at a time; zeros add nothing
    if padding:
        w, matrix_q, matrix_k = (pad(x, (0, padding)) for x in (w, matrix_q, matrix_k))
    a, b = concat.project(q, matrix_q).to(v.dtype), concat.project(k, matrix_k).to(v.dtype)
    v = contiguous_rows(v)
    sides = (call.q_offsets, a), (call.k_offsets, b)
    starts = [None if offsets is None else offsets.starts for offsets, _ in sides]
    # Rows are the last axis of the projections a and b.
    max_lengths = [x.shape[-1] if offsets is None else offsets.max_len for offsets, x in sides]
    parts = call.mask_parts
    lengths = None if parts.lengths is None else parts.lengths.to(v.device)
    out, *_ = concat.concat_forward(a, b, w, v, *starts, lengths, *max_lengths, parts.causal, parts.window or 0)
    return out.transpose(0, 1) if is_packed else out
