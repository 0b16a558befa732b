"""Additive attention, softmax(w·tanh(a + b)) v with a = q W_b and b = k W_c, fused, packed or padded (CUDA, Triton).

Plain twin: `regard.attention.reference` with the score `Concat`. Neither scores nor weights are ever in memory; the
backward pass has the output and the log-sum-exp of each query, and recomputes the rest. `concat_forward_triton`
explains how the tanh is computed. Nothing synchronizes with the device, and torch.compile sees one operator.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton_support import (
    contiguous_rows,
    is_interpreted,
    next_power_of_two,
    operator,
    triton_available,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HIDDEN = 1024
MAX_WIDTH = 256
MAX_ELEMENTS = 1 << 31  # rows × hidden width of one head: offsets have 32 bits


class ConcatTiling(NamedTuple):
    """Tile of a program: rows of the side it computes (queries or keys), columns of the other; warps and registers."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None  # per thread; None: chosen by the compiler


# By the maximum width of the values. Wider ones leave fewer registers and less shared memory (99 KiB on small GPUs) for
# tiles, as do the three-term products of the dtypes that are computed in full precision, see _constants.
FORWARD = {128: ConcatTiling(64, 128, 4), 256: ConcatTiling(64, 64, 8)}
FORWARD_PRECISE = {128: ConcatTiling(64, 64, 4), 256: ConcatTiling(64, 32, 4)}
BACKWARD = {64: ConcatTiling(64, 128, 4), 128: ConcatTiling(64, 64, 4), 256: ConcatTiling(64, 32, 4)}
BACKWARD_PRECISE = {64: ConcatTiling(64, 64, 4), 128: ConcatTiling(64, 32, 4), 256: ConcatTiling(32, 32, 4)}
# From this number of columns on, the backward pass processes them in two halves.
MIN_HALVED_COLUMNS = 128
# The smallest tile that matrix units support, and the minimum number of tile elements per warp.
MIN_TILING, ELEMENTS_PER_WARP = ConcatTiling(16, 32, 1), 1024
# Minimum width of the values in a tile. Matrix units support 16, but ptxas 12.8 then reads shared-memory descriptors
# from uninitialized registers (sm_90): wrong results, or an illegal address.
MIN_VALUE_WIDTH = 32


def supports(q: Tensor, v: Tensor, hidden: int, rows: int) -> bool:
    """Whether the kernel runs on these inputs; `rows` is the larger number of rows of queries and keys."""
    return (
        triton_available()
        and q.is_cuda
        and v.dtype in DTYPES
        and hidden <= min(MAX_HIDDEN, MAX_ELEMENTS // max(1, rows))
        and v.shape[-1] <= MAX_WIDTH
        and _has_tf32(q)
    )


def _has_tf32(x: Tensor) -> bool:
    """Whether the device multiplies TF32 and bf16 matrices: NVIDIA GPUs since Ampere."""
    return torch.version.hip is None and torch.cuda.get_device_properties(x.device).major >= 8


def project(x: Float[Tensor, "*H N D"], matrix: Float[Tensor, "*G D C"]) -> Float[Tensor, "*H C N"]:
    """(x matrix)ᵀ: the hidden axis first, so that the elements which a tile loads together are contiguous."""
    matrix = matrix.to(x.dtype).expand(*x.shape[:-2], -1, -1)
    # A plain matrix product would return the transposed layout, which would have to be copied.
    return torch.bmm(matrix.flatten(0, -3).mT, x.flatten(0, -3).mT).unflatten(0, x.shape[:-2])


@operator("regard::concat_attention")
def concat_forward(
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
    """The output, its rounding error, and the log-sum-exp, from a (B, H, C, T), b (B, G, C, S), w (H or 1, C) and v.

    v is (B, K, S, Dv). Packed tensors have no axis B: `q_starts` and `k_starts` are the offsets of the sequences, and
    max_q and max_k bound their lengths. A window of 0 means no window.
    """
    from regard.kernels.triton import concat_forward_triton

    out, rounding, lse = _empty(a, v)
    tiling = _tiling(v, max_q, max_k)
    tiles = -(-max_q // tiling.rows)
    concat_forward_triton.concat_forward[(_sequences(a, q_starts) * a.shape[-3] * tiles,)](
        *(a, b, w, v, out, rounding, lse, q_starts, k_starts, lengths, max_q, max_k, a.shape[-2], window, tiles),
        *_heads(a, b, v),
        *_strides(a, b, v, out, w, lse),
        **_constants(v, tiling, q_starts, lengths, causal, window),
    )
    return out, rounding, lse


@operator("regard::concat_attention_backward")
def concat_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    w: Tensor,
    v: Tensor,
    out: Tensor,
    rounding: Tensor,
    lse: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    lengths: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, b, w and v."""
    from regard.kernels.triton import concat_backward_triton

    grad = contiguous_rows(grad)
    B, H = _sequences(a, q_starts), a.shape[-3]
    delta = torch.empty_like(lse)
    da = torch.zeros_like(a, dtype=torch.float32)
    db = b.new_zeros(*b.shape[:-3], H, *b.shape[-2:], dtype=torch.float32)
    dv = v.new_empty(*v.shape[:-3], H, *v.shape[-2:])
    tilings = _tiling(v, max_q, max_k, backward=True), _tiling(v, max_k, max_q, backward=True)
    # The gradient of c per program, per 16 of its rows, and per 4 elements of w.
    rows = tilings[0].rows
    dc = w.new_zeros(B, H, -(-max_q // rows), rows // 16, w.shape[-1] // 4, 16)
    for is_keys, size, dx, tiling in zip((False, True), (max_q, max_k), (da, db), tilings):
        tiles = -(-size // tiling.rows)
        concat_backward_triton.concat_backward[(B * H * tiles,)](
            *(a, b, w, v, out, rounding, grad, lse, delta, dx, dc, dv, q_starts, k_starts, lengths),
            *(max_q, max_k, a.shape[-2], window, tiles),
            *_heads(a, b, v),
            *_strides(a, b, v, out, grad, dx, dv, w, lse),
            IS_KEYS=is_keys,
            SPLIT_BF16=not _is_precise(v),
            IN_HALVES=tiling.columns >= MIN_HALVED_COLUMNS,
            **_constants(v, tiling, q_starts, lengths, causal, window),
        )
    dc = dc.sum((0, 2, 3) if len(w) == H else (0, 1, 2, 3)).view(len(w), -1, 16)
    dw = (dc.unsqueeze(-2) * _signs(dc)).sum(-1).flatten(1)
    return da.to(a.dtype), _sum_groups(db, b).to(b.dtype), dw, _sum_groups(dv, v)


@concat_forward.register_fake
def _(a, b, w, v, q_starts, k_starts, lengths, max_q, max_k, causal, window):
    return _empty(a, v)


@concat_backward.register_fake
def _(grad, a, b, w, v, out, rounding, lse, q_starts, k_starts, lengths, max_q, max_k, causal, window):
    return torch.empty_like(a), torch.empty_like(b), torch.empty_like(w), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors[:4], *output, *tensors[4:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad: Tensor | None, *_):
    if grad is None:
        return (None,) * 11
    grads = concat_backward(grad, *ctx.saved_tensors, ctx.max_q, ctx.max_k, ctx.causal, ctx.window)
    return *grads, *(None,) * 7


concat_forward.register_autograd(_backward, setup_context=_setup_context)


def _empty(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized output, rounding error and log-sum-exp. The heads of a row of the output are contiguous.

    The backward pass sums products with the output that nearly cancel: it needs more digits than the dtype has.
    """
    *batch, H, _, rows = a.shape
    out, rounding = (v.new_empty(*batch, rows, H, v.shape[-1]).transpose(-2, -3) for _ in range(2))
    rounding = rounding if v.dtype != torch.float32 else v.new_empty(0)
    return out, rounding, a.new_empty(*batch, H, rows, dtype=torch.float32)


def _signs(like: Tensor) -> Float[Tensor, "4 16"]:
    """+1 where i is in the subset u of {0, 1, 2, 3}, −1 elsewhere: c_u is the sum of the w_i with these signs."""
    return (torch.arange(16, device=like.device) >> torch.arange(4, device=like.device)[:, None] & 1) * 2.0 - 1.0


def _sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Sum gradients, one per head of the queries, over the heads that share a head of the keys."""
    return x if x.shape == like.shape else x.unflatten(-3, (like.shape[-3], -1)).sum(-3)


def _sequences(a: Tensor, q_starts: Tensor | None) -> int:
    return a.shape[0] if q_starts is None else len(q_starts) - 1


def _heads(a: Tensor, b: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The number of heads, and how many of them share a head of b and of v."""
    H = a.shape[-3]
    return H, H // b.shape[-3], H // v.shape[-3]


def _strides(*tensors: Tensor) -> list[int]:
    """Stride arguments: three of each (B, H, N, D) tensor, one of w and two of the log-sum-exp, which come last.

    The last axis is contiguous. The stride of a missing axis (B of packed tensors, H of shared weights) is 0.
    """
    *tiles, w, lse = tensors
    strides = [(0, *x.stride()[:-1])[-3:] for x in tiles]
    return [*sum(strides, ()), 0 if len(w) == 1 else w.stride(0), *(0, *lse.stride()[:-1])[-2:]]


def _is_precise(v: Tensor) -> bool:
    """Whether to compute products to float32 precision."""
    return v.dtype != torch.bfloat16


def _tiling(v: Tensor, rows: int, columns: int, backward: bool = False) -> ConcatTiling:
    """The tuned tile for this width of the values, shrunk to the numbers of rows and columns."""
    tables = (FORWARD, FORWARD_PRECISE), (BACKWARD, BACKWARD_PRECISE)
    largest = next(tiling for width, tiling in tables[backward][_is_precise(v)].items() if v.shape[-1] <= width)
    rows = min(largest.rows, next_power_of_two(rows, MIN_TILING.rows))
    columns = min(largest.columns, next_power_of_two(columns, MIN_TILING.columns))
    elements = rows * max(columns, next_power_of_two(v.shape[-1], MIN_VALUE_WIDTH))
    return ConcatTiling(
        rows, columns, min(largest.warps, max(MIN_TILING.warps, elements // ELEMENTS_PER_WARP)), largest.registers
    )


def _constants(v, tiling, q_starts, lengths, causal, window) -> dict[str, Any]:
    return dict(
        WIDTH=v.shape[-1],
        IS_PACKED=q_starts is not None,
        HAS_LENGTHS=lengths is not None,
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        # Matrix units multiply float32 as TF32, precise enough for bf16 inputs; three such products approach float32.
        PRECISION="tf32x3" if _is_precise(v) else "tf32",
        USE_PTX=not is_interpreted(),
        THREADS=32 * tiling.warps,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        BLOCK_V=next_power_of_two(v.shape[-1], MIN_VALUE_WIDTH),
        num_warps=tiling.warps,
        num_stages=1,
        maxnreg=tiling.registers,
    )
