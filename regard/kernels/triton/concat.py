"""Additive attention, softmax(w·tanh(a + b)) v with a = q W_b and b = k W_c, fused, packed or padded (CUDA, Triton).

Reference: `regard.attention.reference` with the score `Concat`. Neither scores nor weights are ever in memory; the
backward pass has the output and the log-sum-exp of each query, and recomputes the rest. Nothing synchronizes with the
device, and torch.compile sees one operator.

tanh(a + b) = (x − 1) / (x + 1) with x = AB, A = e^{2a}, B = e^{2b}. Four such fractions over a common denominator:

    Σ_i w_i tanh(a_i + b_i) = N / D,   D = Π_i (1 + x_i) = Σ_u x_u,   N = Σ_u c_u x_u,   c_u = Σ_i ±w_i,

where u runs over the 16 subsets of the four, x_u is the product of the x_i in u, and ± is + where i is in u. Since
x_u = A_u B_u, both N and D are products of a (queries, 16) and a (16, keys) matrix: the matrix units do nearly all of
the work, and the rest is one reciprocal and one multiply-add per four elements.

Powers of e can overflow. If the four positive a (or b) of a query (or key) sum to more than LIMIT, in base 2, its
powers become NaN, and a tile that contains a NaN is computed again with a plain tanh, which does not overflow.

The backward pass is one kernel, launched once over queries and once over keys. With G = ∂loss/∂score: ∂N = G / D,
∂D = −G N / D². Both are matrix products, and so is ∂A_u = c_u (∂N B_u) + (∂D B_u), summed over keys. a_i occurs in the
subsets u that contain i: ∂a_i = 2 Σ A_u ∂A_u. The rows of queries give ∂a and ∂w, the rows of keys ∂b and ∂v. Each
program accumulates over tiles into rows that no other program writes, so results are bitwise reproducible. Each launch
recomputes scores and weights.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton.support import (
    contiguous_rows,
    is_interpreted,
    next_power_of_two,
    operator,
    tl,
    triton,
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
    out, rounding, lse = _empty(a, v)
    tiling = _tiling(v, max_q, max_k)
    tiles = -(-max_q // tiling.rows)
    concat_forward_kernel[(_sequences(a, q_starts) * a.shape[-3] * tiles,)](
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
        concat_backward_kernel[(B * H * tiles,)](
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


LOG2E = tl.constexpr(1.4426950408889634)
# If the powers of a query and of a key are at most 2^48, D stays below 2^100, so that gradients divided by it do not
# underflow, and what underflows on one side is negligible even after multiplication by the largest power of the other.
LIMIT = tl.constexpr(48.0)


@triton.jit
def bit(u, i: tl.constexpr):
    """1 where the subset u contains i, 0 elsewhere."""
    return ((u >> i) & 1).to(tl.float32)


@triton.jit
def load_four(x, stride, valid):
    """Load four consecutive hidden rows of a (or b)."""
    x0 = tl.load(x, mask=valid, other=0.0)
    x1 = tl.load(x + stride, mask=valid, other=0.0)
    x2 = tl.load(x + 2 * stride, mask=valid, other=0.0)
    x3 = tl.load(x + 3 * stride, mask=valid, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def base2_exponents(x0, x1, x2, x3):
    """x such that e^{2a} = 2^x (or e^{2b})."""
    k: tl.constexpr = 2 * LOG2E
    return x0.to(tl.float32) * k, x1.to(tl.float32) * k, x2.to(tl.float32) * k, x3.to(tl.float32) * k


@triton.jit
def exceeds_limit(x0, x1, x2, x3):
    positive = tl.maximum(x0, 0.0) + tl.maximum(x1, 0.0) + tl.maximum(x2, 0.0) + tl.maximum(x3, 0.0)
    return positive > LIMIT


@triton.jit
def load_column_powers(x, stride, valid, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """B_u of the columns, (ROWS, 16). One thread, or two if there are enough, computes the 16 powers of a row."""
    x, valid = split_over_two_threads(x, valid, ROWS, THREADS)
    x0, x1, x2, x3 = load_four(x, stride, valid)
    return column_powers(x0, x1, x2, x3, ROWS, THREADS)


@triton.jit
def split_over_two_threads(x, valid, ROWS: tl.constexpr, THREADS: tl.constexpr):
    if ROWS < THREADS:
        return x[:, None] + tl.arange(0, 2)[None, :] * 0, valid[:, None]
    else:
        return x, valid


@triton.jit
def column_powers(x0, x1, x2, x3, ROWS: tl.constexpr, THREADS: tl.constexpr):
    x0, x1, x2, x3 = base2_exponents(x0, x1, x2, x3)
    if ROWS < THREADS:
        last = tl.arange(0, 2)[None, :]
        x3 = tl.where(exceeds_limit(x0, x1, x2, x3), float("nan"), x3 * last)
        e0, e1, e2, e3 = tl.exp2(x0), tl.exp2(x1), tl.exp2(x2), tl.exp2(x3)
        y0 = _join_four(e3, e3 * e2, e3 * e1, e3 * (e1 * e2))
        e3 *= e0
        y1 = _join_four(e3, e3 * e2, e3 * e1, e3 * (e1 * e2))
        return tl.reshape(tl.join(y0, y1), (ROWS, 16))
    else:
        x0 = tl.where(exceeds_limit(x0, x1, x2, x3), float("nan"), x0)
        e0, e1, e2, e3 = tl.exp2(x0), tl.exp2(x1), tl.exp2(x2), tl.exp2(x3)
        e01, e23 = e0 * e1, e2 * e3
        # u = 8·(3 in u) + 4·(2 in u) + 2·(1 in u) + (0 in u); the first join gives the highest bit.
        y0 = _join_four(tl.full((ROWS,), 1.0, tl.float32), e3, e2, e23)
        y1 = _join_four(e1, e1 * e3, e1 * e2, e1 * e23)
        y2 = _join_four(e0, e0 * e3, e0 * e2, e0 * e23)
        y3 = _join_four(e01, e01 * e3, e01 * e2, e01 * e23)
        return tl.reshape(_join_four(y0, y1, y2, y3), (ROWS, 16))


@triton.jit
def _join_four(p, q, r, s):
    return tl.join(tl.join(p, q), tl.join(r, s))


@triton.jit
def load_row_powers(x, stride, valid):
    """A_u of the rows, (rows, 16), from sums of exponents, in the layout that the matrix units expect.

    Overflow is not checked here: the rows are the same for all tiles, and `rows_exceed_limit` checks them once.
    """
    u = tl.arange(0, 16)
    # Each number is loaded 16 times, as a tile, so that the loads have the layout of the tile, not that of a vector.
    x = x[:, None] + u[None, :] * 0
    valid = valid[:, None]
    x0 = tl.load(x, mask=valid, other=0.0).to(tl.float32) * bit(u, 0)[None, :]
    x1 = tl.load(x + stride, mask=valid, other=0.0).to(tl.float32) * bit(u, 1)[None, :]
    x2 = tl.load(x + 2 * stride, mask=valid, other=0.0).to(tl.float32) * bit(u, 2)[None, :]
    x3 = tl.load(x + 3 * stride, mask=valid, other=0.0).to(tl.float32) * bit(u, 3)[None, :]
    return tl.exp2((x0 + x1 + x2 + x3) * (2 * LOG2E))


@triton.jit
def load_signed_weights(w):
    """c_u of four weights w, (16,)."""
    u = tl.arange(0, 16)
    w0, w1, w2, w3 = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    c = w0 * (2 * bit(u, 0) - 1) + w1 * (2 * bit(u, 1) - 1) + w2 * (2 * bit(u, 2) - 1) + w3 * (2 * bit(u, 3) - 1)
    return c


@triton.jit
def reciprocal(x, USE_PTX: tl.constexpr):
    if USE_PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit
def rows_exceed_limit(x, stride, valid, C, ROWS: tl.constexpr):
    """1 for rows of which some four of the C exponents exceed LIMIT, 0 for others."""
    exceeds = tl.zeros((ROWS,), tl.float32)
    for _ in range(0, C, 4):
        x0, x1, x2, x3 = load_four(x, stride, valid)
        x0, x1, x2, x3 = base2_exponents(x0, x1, x2, x3)
        exceeds = tl.maximum(exceeds, exceeds_limit(x0, x1, x2, x3).to(tl.float32))
        x += 4 * stride
    return exceeds


@triton.jit
def tanh(x, PRECISION: tl.constexpr, USE_PTX: tl.constexpr):
    if USE_PTX and PRECISION == "tf32":
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * (2 * LOG2E)), USE_PTX)


@triton.jit
def numerator_denominator(rows, columns, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """N and D of a tile, by one matrix product: two would synchronize the threads more often."""
    both = tl.reshape(tl.permute(tl.join(columns, columns * c), (2, 0, 1)), (2 * COLUMNS, 16))
    both = tl.dot(rows, tl.trans(both), input_precision=PRECISION)
    d, n = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return n, d


@triton.jit
def score_tile(
    x, x_stride, x_valid, x_exceeds, y, y_stride, y_valid, w, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, USE_PTX: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Σ_i w_i tanh(x_i + y_i) for a tile of rows and columns, and whether a tanh had to be computed."""
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Prefetch the columns by one step: the first use of a loaded value waits for it.
    columns_at, columns_valid = split_over_two_threads(y, y_valid, COLUMNS, THREADS)
    y0, y1, y2, y3 = load_four(columns_at, y_stride, columns_valid)
    for i in range(0, C, 4):
        rows = load_row_powers(x + i * x_stride, x_stride, x_valid)
        columns = column_powers(y0, y1, y2, y3, COLUMNS, THREADS)
        n, d = numerator_denominator(rows, columns, load_signed_weights(w + i)[None, :], ROWS, COLUMNS, PRECISION)
        columns_at += tl.where(i + 4 < C, 4 * y_stride, 0)  # the last step loads its columns again
        y0, y1, y2, y3 = load_four(columns_at, y_stride, columns_valid)
        scores += n * reciprocal(d, USE_PTX)
    # 0·x is 0 for finite x and NaN otherwise, and a sum with a NaN is NaN.
    uses_tanh = tl.sum(tl.sum(scores * 0.0, 1) + x_exceeds, 0) != 0.0
    scores = tl.where(uses_tanh, 0.0, scores)
    # A loop that rarely runs, not a branch: a branch would need the tile in more than one layout.
    for i in range(0, tl.where(uses_tanh, C, 0)):
        rows = tl.load(x + i * x_stride, mask=x_valid, other=0.0).to(tl.float32)
        columns = tl.load(y + i * y_stride, mask=y_valid, other=0.0).to(tl.float32)
        scores += tl.load(w + i) * tanh(rows[:, None] + columns[None, :], PRECISION, USE_PTX)
    return scores, uses_tanh


@triton.jit
def sequence_bounds(starts, index, size, IS_PACKED: tl.constexpr):
    """The first row and the length of a sequence."""
    if IS_PACKED:
        first = tl.load(starts + index).to(tl.int64)
        return first, (tl.load(starts + index + 1) - first).to(tl.int32)
    else:
        return 0, size


@triton.jit
def attention_mask(t, s, T, S, keys, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The mask of a tile for queries t and keys s, one of them a column vector and the other a row vector."""
    allowed = (t < T) & (s < keys)
    if CAUSAL or HAS_WINDOW:
        allowed = allowed & (s <= t + (S - T))
    if HAS_WINDOW:
        allowed = allowed & (s > t + (S - T) - window)
    return allowed


@triton.jit(do_not_specialize=["C", "window", "tiles", "heads", "b_group", "v_group"])
def concat_forward_kernel(
    a, b, w, v, out, rounding, lse, q_starts, k_starts, lengths, T, S, C, window, tiles, heads, b_group, v_group,
    a_batch, a_head, a_stride, b_batch, b_head, b_stride, v_batch, v_head, v_row, out_batch, out_head, out_row,
    w_head, lse_batch, lse_head,
    WIDTH: tl.constexpr, IS_PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, USE_PTX: tl.constexpr, THREADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The output and the log-sum-exp (in base 2) of ROWS queries of one head."""
    # The last queries first: under a causal mask they take longest.
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    t0, T = sequence_bounds(q_starts, batch, T, IS_PACKED)
    s0, S = sequence_bounds(k_starts, batch, S, IS_PACKED)
    if tile * ROWS >= T:
        return
    batch = batch.to(tl.int64)
    t = tile * ROWS + tl.arange(0, ROWS)
    a += batch * a_batch + head.to(tl.int64) * a_head + t0 + t
    b += batch * b_batch + (head // b_group).to(tl.int64) * b_head + s0
    v += batch * v_batch + (head // v_group).to(tl.int64) * v_head + s0 * v_row
    w += head * w_head
    keys = tl.minimum(S, tl.load(lengths + batch)).to(tl.int32) if HAS_LENGTHS else S
    first, last = 0, keys
    if CAUSAL or HAS_WINDOW:
        last = tl.minimum(last, tl.minimum((tile + 1) * ROWS, T) + (S - T))
    if HAS_WINDOW:
        first = tl.maximum(0, tile * ROWS + (S - T) - window + 1)
    e = tl.arange(0, BLOCK_V)
    exceeds = rows_exceed_limit(a, a_stride, t < T, C, ROWS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for begin in range(first, last, COLUMNS):
        s = begin + tl.arange(0, COLUMNS)
        scores, _ = score_tile(
            a, a_stride, t < T, exceeds, b + s, b_stride, s < keys, w, C, ROWS, COLUMNS, PRECISION, USE_PTX, THREADS
        )
        allowed = attention_mask(t[:, None], s[None, :], T, S, keys, window, CAUSAL, HAS_WINDOW)
        scores = tl.where(allowed, scores * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without an allowed key so far
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(
            v + s[:, None].to(tl.int64) * v_row + e[None, :], mask=(s < keys)[:, None] & (e < WIDTH)[None, :], other=0.0
        )
        mean = tl.dot(p.to(values.dtype), values, mean * shrink[:, None], input_precision=PRECISION)
        top = new_top
    mean = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None] * mean
    # A row without an allowed key: +∞ makes all its weights zero in the backward pass.
    log_sum_exp = tl.where(total > 0.0, top + tl.log2(total), float("inf"))
    offsets = batch * out_batch + head.to(tl.int64) * out_head + (t0 + t)[:, None] * out_row + e[None, :]
    valid = (t < T)[:, None] & (e < WIDTH)[None, :]
    rounded = mean.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask=valid)
    if rounded.dtype != tl.float32:
        tl.store(rounding + offsets, (mean - rounded.to(tl.float32)).to(rounded.dtype), mask=valid)
    tl.store(lse + batch * lse_batch + head.to(tl.int64) * lse_head + t0 + t, log_sum_exp, mask=t < T)


# Gradients are small and D may be large: scaling by a power of two keeps their quotient from underflowing.
SCALE = tl.constexpr(2.0**40)


@triton.jit
def _truncate(x):
    """x truncated to bf16, as float32. One instruction, unlike a conversion to bf16 and back."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    """x rounded to bf16, as float32."""
    return _truncate((x.to(tl.int32, bitcast=True) + 32768).to(tl.float32, bitcast=True))


@triton.jit
def _add_products(
    dn_sums, dd_sums, rows, c, columns, g, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT_BF16: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Add ∂N B_u and −∂D B_u of a block of columns.

    SPLIT_BF16: multiply in bf16. Both products use the same rounded ∂N, so that its rounding error acts like that of
    one term of the gradient. They nearly cancel, and the rounding error of ∂D would dominate the difference: ∂D is
    split into two bf16 terms.
    """
    n, d = numerator_denominator(rows, columns, c, ROWS, COLUMNS, PRECISION)
    r = reciprocal(d, USE_PTX)
    if SPLIT_BF16:
        dn = _round(g * r)
        dd = dn * (n * r)
        dd_high = _truncate(dd)
        columns = columns.to(tl.bfloat16)
        dn_sums = tl.dot(dn.to(tl.bfloat16), columns, dn_sums)
        dd_sums = tl.dot(dd_high.to(tl.bfloat16), columns, dd_sums)
        dd_sums = tl.dot((dd - dd_high).to(tl.bfloat16), columns, dd_sums)
    else:
        dn = g * r
        dn_sums = tl.dot(dn, columns, dn_sums, input_precision=PRECISION)
        dd_sums = tl.dot(dn * (n * r), columns, dd_sums, input_precision=PRECISION)
    return dn_sums, dd_sums


@triton.jit
def _matmul_gradients(
    x, x_stride, x_valid, y, y_stride, y_count, w, C, g, dx, dx_stride, dc, IS_QUERIES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_HALVES: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT_BF16: tl.constexpr, USE_PTX: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """IN_HALVES: process the columns in two halves, because the registers cannot hold d and n of all of them."""
    u, group = tl.arange(0, 16), tl.arange(0, ROWS // 16)
    PART: tl.constexpr = COLUMNS // 2 if IN_HALVES else COLUMNS
    s = tl.arange(0, PART)
    g *= SCALE
    if IN_HALVES:
        g, second_g = tl.split(tl.permute(tl.reshape(g, (ROWS, 2, PART)), (0, 2, 1)))
    for i in range(0, C, 4):
        rows = load_row_powers(x + i * x_stride, x_stride, x_valid)
        c = load_signed_weights(w + i)[None, :]
        pointers = dx[:, None] + (i + tl.arange(0, 4))[None, :] * dx_stride
        # Load the powers of both halves before the products, to wait for memory once.
        columns = load_column_powers(y + i * y_stride + s, y_stride, s < y_count, PART, THREADS)
        if IN_HALVES:
            second_columns = load_column_powers(
                y + i * y_stride + PART + s, y_stride, PART + s < y_count, PART, THREADS
            )
        dn_sums, dd_sums = tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, 16), tl.float32)
        dn_sums, dd_sums = _add_products(
            dn_sums, dd_sums, rows, c, columns, g, ROWS, PART, PRECISION, SPLIT_BF16, USE_PTX
        )
        if IN_HALVES:
            dn_sums, dd_sums = _add_products(
                dn_sums, dd_sums, rows, c, second_columns, second_g, ROWS, PART, PRECISION, SPLIT_BF16, USE_PTX
            )
        dn_sums *= rows
        du = (2 / SCALE) * (dn_sums * c - rows * dd_sums)
        d02 = tl.join(tl.sum(du * bit(u, 0)[None, :], 1), tl.sum(du * bit(u, 2)[None, :], 1))
        d13 = tl.join(tl.sum(du * bit(u, 1)[None, :], 1), tl.sum(du * bit(u, 3)[None, :], 1))
        d_four = tl.reshape(tl.join(d02, d13), (ROWS, 4))
        tl.atomic_add(pointers, d_four, mask=x_valid[:, None], sem="relaxed")
        if IS_QUERIES:
            # Sums over 16 rows belong to one warp: no warp waits for another.
            dc_sums = tl.sum(tl.reshape(dn_sums, (ROWS // 16, 16, 16)), 1) * (1 / SCALE)
            pointers = dc + group[:, None] * (C * 4) + 4 * i + u[None, :]
            tl.atomic_add(pointers, dc_sums, sem="relaxed")


@triton.jit
def _tanh_gradients(
    x, x_stride, x_valid, y, y_stride, y_valid, w, C, g, dx, dx_stride, dc, IS_QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    u = tl.arange(0, 16)
    for i in range(0, C):
        rows = tl.load(x + i * x_stride, mask=x_valid, other=0.0).to(tl.float32)
        columns = tl.load(y + i * y_stride, mask=y_valid, other=0.0).to(tl.float32)
        h = tanh(rows[:, None] + columns[None, :], PRECISION, USE_PTX)
        dx_sums = tl.sum(g * (1.0 - h * h), 1) * tl.load(w + i)
        tl.atomic_add(dx + i * dx_stride, dx_sums, mask=x_valid, sem="relaxed")
        if IS_QUERIES:
            # Write ∂w_i as a ∂c that contributes to no other w: +½ for the full subset u, −½ for the one that lacks i.
            half = 0.5 * tl.sum(tl.sum(g * h, 1), 0)
            dc_sums = tl.where(u == 15, half, tl.where(u == 15 - (1 << (i % 4)), -half, 0.0))
            tl.atomic_add(dc + i // 4 * 16 + u, dc_sums, sem="relaxed")


@triton.jit
def _load_rows(x, first, rows, count, columns, width, row_stride):
    offsets = (first + rows).to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(x + offsets, mask=(rows < count)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["C", "window", "tiles", "heads", "b_group", "v_group"])
def concat_backward_kernel(
    a, b, w, v, out, rounding, grad, lse, delta, dx, dc, dv, q_starts, k_starts, lengths, T, S, C, window, tiles,
    heads, b_group, v_group,
    a_batch, a_head, a_stride, b_batch, b_head, b_stride, v_batch, v_head, v_row, out_batch, out_head, out_row,
    grad_batch, grad_head, grad_row, dx_batch, dx_head, dx_stride, dv_batch, dv_head, dv_row,
    w_head, lse_batch, lse_head,
    IS_KEYS: tl.constexpr, WIDTH: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT_BF16: tl.constexpr, USE_PTX: tl.constexpr, THREADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_HALVES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """IS_KEYS: ∂b and ∂v of ROWS keys. Otherwise: ∂a and a partial ∂w of ROWS queries, and delta for the second launch.

    ∂a and ∂b (dx) and ∂w are initialized with zeros. ∂b and ∂v have a head per head of the queries; the launcher sums
    them over groups.
    """
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    t0, T = sequence_bounds(q_starts, batch, T, IS_PACKED)
    s0, S = sequence_bounds(k_starts, batch, S, IS_PACKED)
    if tile * ROWS >= (S if IS_KEYS else T):
        return
    batch, long_head = batch.to(tl.int64), head.to(tl.int64)
    a += batch * a_batch + long_head * a_head + t0
    b += batch * b_batch + (head // b_group).to(tl.int64) * b_head + s0
    v += batch * v_batch + (head // v_group).to(tl.int64) * v_head
    out += batch * out_batch + long_head * out_head
    rounding += batch * out_batch + long_head * out_head
    grad += batch * grad_batch + long_head * grad_head
    lse += batch * lse_batch + long_head * lse_head + t0
    delta += batch * lse_batch + long_head * lse_head + t0
    w += head * w_head
    dc += tl.program_id(0).to(tl.int64) * (ROWS // 16 * C * 4)
    keys = tl.minimum(S, tl.load(lengths + batch)).to(tl.int32) if HAS_LENGTHS else S
    e = tl.arange(0, BLOCK_V)
    begin = tile * ROWS
    rows = begin + tl.arange(0, ROWS)
    end = tl.minimum(begin + ROWS, keys if IS_KEYS else T)
    # The range of rows of the other side that these rows attend to, or are attended by.
    first, last = 0, T if IS_KEYS else keys
    if IS_KEYS:
        if CAUSAL or HAS_WINDOW:
            first = tl.maximum(0, begin - (S - T))
        if HAS_WINDOW:
            last = tl.minimum(last, end - 1 - (S - T) + window)
        last = tl.where(begin < keys, last, 0)
        x, x_stride, valid = b + rows, b_stride, rows < keys
        y, y_stride, count = a, a_stride, T
        dx += batch * dx_batch + long_head * dx_head + s0 + rows
        row_values = _load_rows(v, s0, rows, keys, e, WIDTH, v_row)
    else:
        if CAUSAL or HAS_WINDOW:
            last = tl.minimum(last, end + (S - T))
        if HAS_WINDOW:
            first = tl.maximum(0, begin + (S - T) - window + 1)
        x, x_stride, valid = a + rows, a_stride, rows < T
        y, y_stride, count = b, b_stride, keys
        dx += batch * dx_batch + long_head * dx_head + t0 + rows
        row_values = _load_rows(grad, t0, rows, T, e, WIDTH, grad_row)
        mean = _load_rows(out, t0, rows, T, e, WIDTH, out_row).to(tl.float32)
        if row_values.dtype != tl.float32:
            mean += _load_rows(rounding, t0, rows, T, e, WIDTH, out_row).to(tl.float32)
        row_delta = tl.sum(row_values.to(tl.float32) * mean, 1)
        tl.store(delta + rows, row_delta, mask=valid)
        query_lse = tl.load(lse + rows, mask=valid, other=float("inf"))
    exceeds = rows_exceed_limit(x, x_stride, valid, C, ROWS)
    dv_sums = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for other in range(first, last, COLUMNS):
        columns = other + tl.arange(0, COLUMNS)
        y_valid = columns < count
        if IS_KEYS:
            column_values = _load_rows(grad, t0, columns, T, e, WIDTH, grad_row)
        else:
            column_values = _load_rows(v, s0, columns, keys, e, WIDTH, v_row)
        scores, uses_tanh = score_tile(
            x, x_stride, valid, exceeds, y + columns, y_stride, y_valid, w, C,
            ROWS, COLUMNS, PRECISION, USE_PTX, THREADS,
        )  # fmt: skip
        g = tl.dot(row_values, tl.trans(column_values), input_precision=PRECISION)
        if IS_KEYS:
            allowed = attention_mask(columns[None, :], rows[:, None], T, S, keys, window, CAUSAL, HAS_WINDOW)
            query_lse = tl.load(lse + columns, mask=y_valid, other=float("inf"))
            p = tl.where(allowed, tl.exp2(scores * LOG2E - query_lse[None, :]), 0.0)
            dv_sums = tl.dot(p.to(column_values.dtype), column_values, dv_sums, input_precision=PRECISION)
            g = p * (g - tl.load(delta + columns, mask=y_valid, other=0.0)[None, :])
        else:
            allowed = attention_mask(rows[:, None], columns[None, :], T, S, keys, window, CAUSAL, HAS_WINDOW)
            p = tl.where(allowed, tl.exp2(scores * LOG2E - query_lse[:, None]), 0.0)
            g = p * (g - row_delta[:, None])
        if uses_tanh:
            _tanh_gradients(
                x, x_stride, valid, y + columns, y_stride, y_valid, w, C, g, dx, dx_stride, dc, not IS_KEYS,
                PRECISION, USE_PTX,
            )  # fmt: skip
        else:
            _matmul_gradients(
                x, x_stride, valid, y + other, y_stride, count - other, w, C, g, dx, dx_stride, dc, not IS_KEYS,
                ROWS, COLUMNS, IN_HALVES, PRECISION, SPLIT_BF16, USE_PTX, THREADS,
            )  # fmt: skip
    if IS_KEYS:
        offsets = (s0 + rows)[:, None] * dv_row + e[None, :]
        dv += batch * dv_batch + long_head * dv_head + offsets
        tl.store(dv, dv_sums.to(dv.dtype.element_ty), mask=(rows < S)[:, None] & (e < WIDTH)[None, :])
