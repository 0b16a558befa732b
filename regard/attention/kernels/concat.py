"""Additive attention, w·tanh(a + b) with a = W_b q and b = W_c k, fused: CUDA, in Triton, packed or padded.

Neither scores nor weights are ever in memory; the backward pass has the output and a log-sum-exp for each query, and
computes the rest again. `concat_triton` says how the tanh is done. Nothing here waits for the device, and compilers
see one operator.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.attention import triton_here
from regard.attention.kernels import Call
from regard.attention.reference import repeat_heads
from regard.attention.scores import Concat
from regard.attention.triton_here import contiguous_rows, operator, power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HIDDEN = 1024
MAX_WIDTH = 256
MAX_NUMBERS = 1 << 31  # of all rows of one head: the kernel counts them in 32 bits


class Tiling(NamedTuple):
    """How many rows of its own side a program has at once, how many of the other; its warps, registers of a thread."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None  # as many as the compiler likes


# For values up to so wide. Wider ones leave fewer registers and less shared memory (99 KiB on small GPUs) for tiles; so
# do products in three parts, which `exact` dtypes need, see _constants.
FORWARD = {128: Tiling(64, 128, 4), 256: Tiling(64, 64, 8)}
FORWARD_EXACT = {128: Tiling(64, 64, 4), 256: Tiling(64, 32, 4)}
BACKWARD = {64: Tiling(64, 128, 4), 128: Tiling(64, 64, 4), 256: Tiling(64, 32, 4)}
BACKWARD_EXACT = {64: Tiling(64, 64, 4), 128: Tiling(64, 32, 4), 256: Tiling(32, 32, 4)}
# From so many columns on a backward pass takes first one half of them, then the other.
HALVED = 128
# The least that matrix units take, and how many cells of a tile are worth a warp.
FEWEST, CELLS = Tiling(16, 32, 1), 1024
# Values are at least so wide in a tile. Matrix units take 16, but ptxas 12.8 then reads descriptors of shared memory
# from registers that nothing has written (sm_90): wrong numbers, or an illegal address.
FEWEST_VALUES = 32


def takes(call: Call) -> bool:
    if not isinstance(call.score, Concat):
        return False
    rows = max(x.shape[-2 if call.q_offsets is None else 0] for x in (call.q, call.k))
    return (
        triton_here.FOUND
        and call.q.is_cuda
        and call.bias is None
        and call.form.rest is None
        and call.v.dtype in DTYPES
        and call.score.weight_a.shape[-2] <= min(MAX_HIDDEN, MAX_NUMBERS // max(1, rows))
        and call.v.shape[-1] <= MAX_WIDTH
        and _new_enough(call.q)
    )


def _new_enough(x: Tensor) -> bool:
    """Whether the device multiplies TF32 and bf16: NVIDIA's from Ampere on. (A compiler knows this at once.)"""
    return torch.version.hip is None and torch.cuda.get_device_properties(x.device).major >= 8


def run(call: Call) -> Float[Tensor, "..."]:
    score = call.score
    assert isinstance(score, Concat)
    packed = call.q_offsets is not None
    # A score folds (…, H, N, D): heads before rows.
    q, k, v = (x.transpose(0, 1) for x in (call.q, call.k, call.v)) if packed else (call.q, call.k, call.v)
    # With shared parameters keys of a group are folded once; with a head's own, for each head.
    if score.heads is not None and k.shape[-3] != score.heads:
        k = k.repeat_interleave(score.heads // k.shape[-3], 0) if packed else repeat_heads(k, score.heads)
    w = score.weight_a.float().reshape(1 if score.heads is None else score.heads, -1)
    matrix_q, matrix_k = score.matrices
    more = -w.shape[-1] % 4  # the kernel takes hidden numbers by fours; zeros add nothing
    if more:
        w, matrix_q, matrix_k = (pad(x, (0, more)) for x in (w, matrix_q, matrix_k))
    a, b = _columns(q, matrix_q).to(v.dtype), _columns(k, matrix_k).to(v.dtype)
    v = contiguous_rows(v)
    sides = (call.q_offsets, a), (call.k_offsets, b)
    starts = [None if offsets is None else offsets.starts for offsets, _ in sides]
    bounds = [x.shape[-1] if offsets is None else offsets.max_len for offsets, x in sides]
    lengths = None if call.form.lengths is None else call.form.lengths.to(v.device)
    out, *_ = attend_concat(a, b, w, v, *starts, lengths, *bounds, call.form.causal, call.form.window or 0)
    return out.transpose(0, 1) if packed else out


def _columns(x: Float[Tensor, "*H N D"], matrix: Float[Tensor, "*G D C"]) -> Float[Tensor, "*H C N"]:
    """x times the matrix, the hidden numbers of all rows one after another: what a tile reads lies side by side."""
    matrix = matrix.to(x.dtype).expand(*x.shape[:-2], -1, -1)
    # A plain product of matrices would come out the other way round, and be copied.
    return torch.bmm(matrix.flatten(0, -3).mT, x.flatten(0, -3).mT).unflatten(0, x.shape[:-2])


@operator("regard::attend_concat")
def attend_concat(
    a: Tensor,
    b: Tensor,
    w: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    lengths: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, what its rounding took away, and the log-sum-exp of a (B, H, C, T), b (B, G, C, S), w (H or 1, C), v.

    v is (B, K, S, Dv). Packed, B is missing: starts say where sequences begin, max_q and max_k how long they may be.
    A window of 0 is none.
    """
    from regard.attention.kernels import concat_triton

    out, rest, lse = _empty(a, v)
    tiling = _tiling(v, max_q, max_k)
    tiles = -(-max_q // tiling.rows)
    concat_triton.forward[(_sequences(a, q_starts) * a.shape[-3] * tiles,)](
        *(a, b, w, v, out, rest, lse, q_starts, k_starts, lengths, max_q, max_k, a.shape[-2], window, tiles),
        *_heads(a, b, v),
        *_strides(a, b, v, out, w, lse),
        **_constants(v, tiling, q_starts, lengths, causal, window),
    )
    return out, rest, lse


@operator("regard::attend_concat_backward")
def attend_concat_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    w: Tensor,
    v: Tensor,
    out: Tensor,
    rest: Tensor,
    lse: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    lengths: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients by a, b, w and v."""
    from regard.attention.kernels import concat_backward_triton

    grad = contiguous_rows(grad)
    B, H = _sequences(a, q_starts), a.shape[-3]
    delta = torch.empty_like(lse)
    da = torch.zeros_like(a, dtype=torch.float32)
    db = b.new_zeros(*b.shape[:-3], H, *b.shape[-2:], dtype=torch.float32)
    dv = v.new_empty(*v.shape[:-3], H, *v.shape[-2:])
    tilings = _tiling(v, max_q, max_k, backward=True), _tiling(v, max_k, max_q, backward=True)
    # By c, of sixteen rows of each program, for each four of w.
    rows = tilings[0].rows
    dc = w.new_zeros(B, H, -(-max_q // rows), rows // 16, w.shape[-1] // 4, 16)
    for keys, size, dx, tiling in zip((False, True), (max_q, max_k), (da, db), tilings):
        tiles = -(-size // tiling.rows)
        concat_backward_triton.backward[(B * H * tiles,)](
            *(a, b, w, v, out, rest, grad, lse, delta, dx, dc, dv, q_starts, k_starts, lengths),
            *(max_q, max_k, a.shape[-2], window, tiles),
            *_heads(a, b, v),
            *_strides(a, b, v, out, grad, dx, dv, w, lse),
            KEYS=keys,
            SPLIT=not _exact(v),
            HALVES=tiling.columns >= HALVED,
            **_constants(v, tiling, q_starts, lengths, causal, window),
        )
    dc = dc.sum((0, 2, 3) if len(w) == H else (0, 1, 2, 3)).view(len(w), -1, 16)
    dw = (dc.unsqueeze(-2) * _signs(dc)).sum(-1).flatten(1)
    return da.to(a.dtype), _of_groups(db, b).to(b.dtype), dw, _of_groups(dv, v)


@attend_concat.register_fake
def _(a, b, w, v, q_starts, k_starts, lengths, max_q, max_k, causal, window):
    return _empty(a, v)


@attend_concat_backward.register_fake
def _(grad, a, b, w, v, out, rest, lse, q_starts, k_starts, lengths, max_q, max_k, causal, window):
    return torch.empty_like(a), torch.empty_like(b), torch.empty_like(w), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors[:4], *output, *tensors[4:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _flow_back(ctx, grad: Tensor | None, *_):
    if grad is None:
        return (None,) * 11
    grads = attend_concat_backward(grad, *ctx.saved_tensors, ctx.max_q, ctx.max_k, ctx.causal, ctx.window)
    return *grads, *(None,) * 7


attend_concat.register_autograd(_flow_back, setup_context=_keep)


def _empty(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, rest and log-sum-exp, not yet filled in; heads of a row of the output side by side, as layers like it.

    The backward pass takes sums of the output in which nearly everything cancels: it needs more digits than are given.
    """
    *batch, H, _, rows = a.shape
    out, rest = (v.new_empty(*batch, rows, H, v.shape[-1]).transpose(-2, -3) for _ in range(2))
    return out, rest if v.dtype != torch.float32 else v.new_empty(0), a.new_empty(*batch, H, rows, dtype=torch.float32)


def _signs(like: Tensor) -> Float[Tensor, "4 16"]:
    """+1 where i of four is in a subset u, −1 where not: c_u is the sum of signed w_i."""
    return (torch.arange(16, device=like.device) >> torch.arange(4, device=like.device)[:, None] & 1) * 2.0 - 1.0


def _of_groups(x: Tensor, like: Tensor) -> Tensor:
    """Gradients of every head of the queries, summed over those that share a head of the keys."""
    return x if x.shape == like.shape else x.unflatten(-3, (like.shape[-3], -1)).sum(-3)


def _sequences(a: Tensor, q_starts: Tensor | None) -> int:
    return a.shape[0] if q_starts is None else len(q_starts) - 1


def _heads(a: Tensor, b: Tensor, v: Tensor) -> tuple[int, int, int]:
    """How many there are, and how many share one of b's and one of v's."""
    H = a.shape[-3]
    return H, H // b.shape[-3], H // v.shape[-3]


def _strides(*tensors: Tensor) -> list[int]:
    """What a kernel is told: for (B, H, N, D) three strides, for w and the log-sum-exp, which come last, one and two.

    The last axis is contiguous. A packed tensor has no sequences to step over, shared weights no heads.
    """
    *tiles, w, lse = tensors
    told = [(0, *x.stride()[:-1])[-3:] for x in tiles]
    return [*sum(told, ()), 0 if len(w) == 1 else w.stride(0), *(0, *lse.stride()[:-1])[-2:]]


def _exact(v: Tensor) -> bool:
    return v.dtype != torch.bfloat16


def _tiling(v: Tensor, rows: int, columns: int, backward: bool = False) -> Tiling:
    """Tiles as large as is good for values so wide, and hardly larger than there are rows and columns."""
    tables = (FORWARD, FORWARD_EXACT), (BACKWARD, BACKWARD_EXACT)
    largest = next(tiling for width, tiling in tables[backward][_exact(v)].items() if v.shape[-1] <= width)
    rows = min(largest.rows, power_of_two(rows, FEWEST.rows))
    columns = min(largest.columns, power_of_two(columns, FEWEST.columns))
    cells = rows * max(columns, power_of_two(v.shape[-1], FEWEST_VALUES))
    return Tiling(rows, columns, min(largest.warps, max(FEWEST.warps, cells // CELLS)), largest.registers)


def _constants(v, tiling, q_starts, lengths, causal, window) -> dict[str, Any]:
    return dict(
        WIDTH=v.shape[-1],
        PACKED=q_starts is not None,
        LENGTHS=lengths is not None,
        CAUSAL=causal,
        WINDOW=window > 0,
        # Matrix units multiply float32 as TF32, exact enough beside bf16; three such products are nearly float32.
        PRECISION="tf32x3" if _exact(v) else "tf32",
        QUICK=not triton_here.INTERPRETED,
        THREADS=32 * tiling.warps,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        BLOCK_V=power_of_two(v.shape[-1], FEWEST_VALUES),
        num_warps=tiling.warps,
        num_stages=1,
        maxnreg=tiling.registers,
    )
