"""What runs on the GPU for `concat` backward: two passes of one kernel, each over the rows of its own side.

With G = ∂loss/∂score, N and D as in `concat_triton`: ∂N = G / D, ∂D = −G N / D². Both are products of matrices, so
∂A_u = c_u (∂N B_u) + (∂D B_u), summed over keys, is one too; a_i is in the subsets u that hold i: ∂a_i = 2 Σ A_u ∂A_u.

Queries' rows give ∂a and ∂w, keys' rows ∂b and ∂v. A program adds to rows that no other program writes, tile after
tile: no atomics, so that the same numbers give the same bits. Scores and weights are computed again in each pass.
"""

import triton
import triton.language as tl

from regard.attention.kernels.concat_triton import (
    LOG2E,
    bit,
    expand,
    fraction,
    may_look,
    reciprocal,
    rows_too_large,
    score_tile,
    sequence,
    signed,
    spread,
    tanh,
)

# Gradients are small and D may be large: a power of two keeps their quotient a number.
SCALE = tl.constexpr(2.0**40)


@triton.jit
def _cut(x):
    """x without the bits that bf16 has no place for. One instruction, which a conversion there and back is not."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """x to the nearest number of bf16, as float32."""
    return _cut((x.to(tl.int32, bitcast=True) + 32768).to(tl.float32, bitcast=True))


@triton.jit
def _add_products(
    by_n, by_d, rows, c, columns, g, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Adds ∂N B_u and −∂D B_u of some columns.

    SPLIT: as bf16. Both products see the same rounded ∂N, so that its rounding is that of a gradient's term. They
    nearly cancel, and ∂D rounded would be what is left of them: it comes in two parts.
    """
    n, d = fraction(rows, columns, c, ROWS, COLUMNS, PRECISION)
    r = reciprocal(d, QUICK)
    if SPLIT:
        dn = _rounded(g * r)
        dd = dn * (n * r)
        high = _cut(dd)
        columns = columns.to(tl.bfloat16)
        by_n = tl.dot(dn.to(tl.bfloat16), columns, by_n)
        by_d = tl.dot(high.to(tl.bfloat16), columns, by_d)
        by_d = tl.dot((dd - high).to(tl.bfloat16), columns, by_d)
    else:
        dn = g * r
        by_n = tl.dot(dn, columns, by_n, input_precision=PRECISION)
        by_d = tl.dot(dn * (n * r), columns, by_d, input_precision=PRECISION)
    return by_n, by_d


@triton.jit
def _quick_gradients(
    x, x_stride, x_valid, y, y_stride, y_count, w, C, g, dx, dx_stride, dc, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr, QUICK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """HALVES: one half of the columns after the other, since the registers do not hold d and n of all."""
    u, group = tl.arange(0, 16), tl.arange(0, ROWS // 16)
    PART: tl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    s = tl.arange(0, PART)
    g *= SCALE
    if HALVES:
        g, g_more = tl.split(tl.permute(tl.reshape(g, (ROWS, 2, PART)), (0, 2, 1)))
    for i in range(0, C, 4):
        rows = spread(x + i * x_stride, x_stride, x_valid)
        c = signed(w + i)[None, :]
        to = dx[:, None] + (i + tl.arange(0, 4))[None, :] * dx_stride
        # Both halves' powers before all products: their loads are waited for once.
        columns = expand(y + i * y_stride + s, y_stride, s < y_count, PART, THREADS)
        if HALVES:
            more = expand(y + i * y_stride + PART + s, y_stride, PART + s < y_count, PART, THREADS)
        by_n, by_d = tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, 16), tl.float32)
        by_n, by_d = _add_products(by_n, by_d, rows, c, columns, g, ROWS, PART, PRECISION, SPLIT, QUICK)
        if HALVES:
            by_n, by_d = _add_products(by_n, by_d, rows, c, more, g_more, ROWS, PART, PRECISION, SPLIT, QUICK)
        by_n *= rows
        by_u = (2 / SCALE) * (by_n * c - rows * by_d)
        by_02 = tl.join(tl.sum(by_u * bit(u, 0)[None, :], 1), tl.sum(by_u * bit(u, 2)[None, :], 1))
        by_13 = tl.join(tl.sum(by_u * bit(u, 1)[None, :], 1), tl.sum(by_u * bit(u, 3)[None, :], 1))
        by_four = tl.reshape(tl.join(by_02, by_13), (ROWS, 4))
        tl.atomic_add(to, by_four, mask=x_valid[:, None], sem="relaxed")
        if WEIGHTS:
            # Of each sixteen rows by themselves: those are one warp's, and no warp waits for another.
            by_c = tl.sum(tl.reshape(by_n, (ROWS // 16, 16, 16)), 1) * (1 / SCALE)
            to = dc + group[:, None] * (C * 4) + 4 * i + u[None, :]
            tl.atomic_add(to, by_c, sem="relaxed")


@triton.jit
def _plain_gradients(
    x, x_stride, x_valid, y, y_stride, y_valid, w, C, g, dx, dx_stride, dc, WEIGHTS: tl.constexpr,
    PRECISION: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    u = tl.arange(0, 16)
    for i in range(0, C):
        rows = tl.load(x + i * x_stride, mask=x_valid, other=0.0).to(tl.float32)
        columns = tl.load(y + i * y_stride, mask=y_valid, other=0.0).to(tl.float32)
        h = tanh(rows[:, None] + columns[None, :], PRECISION, QUICK)
        by_x = tl.sum(g * (1.0 - h * h), 1) * tl.load(w + i)
        tl.atomic_add(dx + i * dx_stride, by_x, mask=x_valid, sem="relaxed")
        if WEIGHTS:
            # As ∂c that comes to this ∂w_i and no other: half with all signs +, less half with the sign of i alone −.
            half = 0.5 * tl.sum(tl.sum(g * h, 1), 0)
            by_c = tl.where(u == 15, half, tl.where(u == 15 - (1 << (i % 4)), -half, 0.0))
            tl.atomic_add(dc + i // 4 * 16 + u, by_c, sem="relaxed")


@triton.jit
def _rows(x, first, rows, count, columns, width, row_stride):
    places = (first + rows).to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(x + places, mask=(rows < count)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["C", "window", "tiles", "heads", "b_group", "v_group"])
def backward(
    a, b, w, v, out, rest, grad, lse, delta, dx, dc, dv, q_starts, k_starts, lengths, T, S, C, window, tiles,
    heads, b_group, v_group,
    a_batch, a_head, a_stride, b_batch, b_head, b_stride, v_batch, v_head, v_row, out_batch, out_head, out_row,
    grad_batch, grad_head, grad_row, dx_batch, dx_head, dx_stride, dv_batch, dv_head, dv_row,
    w_head, lse_batch, lse_head,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr, QUICK: tl.constexpr, THREADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """KEYS: ∂b and ∂v of ROWS keys; otherwise ∂a and a part of ∂w from ROWS queries, and delta for the other pass.

    ∂a and ∂b (dx) and ∂w begin at zero. Each head of the queries has its own ∂b and ∂v, summed over groups by others.
    """
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    t0, T = sequence(q_starts, batch, T, PACKED)
    s0, S = sequence(k_starts, batch, S, PACKED)
    if tile * ROWS >= (S if KEYS else T):
        return
    batch, long_head = batch.to(tl.int64), head.to(tl.int64)
    a += batch * a_batch + long_head * a_head + t0
    b += batch * b_batch + (head // b_group).to(tl.int64) * b_head + s0
    v += batch * v_batch + (head // v_group).to(tl.int64) * v_head
    out += batch * out_batch + long_head * out_head
    rest += batch * out_batch + long_head * out_head
    grad += batch * grad_batch + long_head * grad_head
    lse += batch * lse_batch + long_head * lse_head + t0
    delta += batch * lse_batch + long_head * lse_head + t0
    w += head * w_head
    dc += tl.program_id(0).to(tl.int64) * (ROWS // 16 * C * 4)
    keys = tl.minimum(S, tl.load(lengths + batch)).to(tl.int32) if LENGTHS else S
    e = tl.arange(0, BLOCK_V)
    begin = tile * ROWS
    rows = begin + tl.arange(0, ROWS)
    end = tl.minimum(begin + ROWS, keys if KEYS else T)
    # Which rows of the other side there are for these, from first to last.
    first, last = 0, T if KEYS else keys
    if KEYS:
        if CAUSAL or WINDOW:
            first = tl.maximum(0, begin - (S - T))
        if WINDOW:
            last = tl.minimum(last, end - 1 - (S - T) + window)
        last = tl.where(begin < keys, last, 0)
        x, x_stride, valid = b + rows, b_stride, rows < keys
        y, y_stride, count = a, a_stride, T
        dx += batch * dx_batch + long_head * dx_head + s0 + rows
        mine = _rows(v, s0, rows, keys, e, WIDTH, v_row)
    else:
        if CAUSAL or WINDOW:
            last = tl.minimum(last, end + (S - T))
        if WINDOW:
            first = tl.maximum(0, begin + (S - T) - window + 1)
        x, x_stride, valid = a + rows, a_stride, rows < T
        y, y_stride, count = b, b_stride, keys
        dx += batch * dx_batch + long_head * dx_head + t0 + rows
        mine = _rows(grad, t0, rows, T, e, WIDTH, grad_row)
        mean = _rows(out, t0, rows, T, e, WIDTH, out_row).to(tl.float32)
        if mine.dtype != tl.float32:
            mean += _rows(rest, t0, rows, T, e, WIDTH, out_row).to(tl.float32)
        whole = tl.sum(mine.to(tl.float32) * mean, 1)
        tl.store(delta + rows, whole, mask=valid)
        power = tl.load(lse + rows, mask=valid, other=float("inf"))
    large = rows_too_large(x, x_stride, valid, C, ROWS)
    by_values = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for other in range(first, last, COLUMNS):
        columns = other + tl.arange(0, COLUMNS)
        y_valid = columns < count
        if KEYS:
            theirs = _rows(grad, t0, columns, T, e, WIDTH, grad_row)
        else:
            theirs = _rows(v, s0, columns, keys, e, WIDTH, v_row)
        scores, plainly = score_tile(
            x, x_stride, valid, large, y + columns, y_stride, y_valid, w, C, ROWS, COLUMNS, PRECISION, QUICK, THREADS
        )
        g = tl.dot(mine, tl.trans(theirs), input_precision=PRECISION)
        if KEYS:
            allowed = may_look(columns[None, :], rows[:, None], T, S, keys, window, CAUSAL, WINDOW)
            power = tl.load(lse + columns, mask=y_valid, other=float("inf"))
            p = tl.where(allowed, tl.exp2(scores * LOG2E - power[None, :]), 0.0)
            by_values = tl.dot(p.to(theirs.dtype), theirs, by_values, input_precision=PRECISION)
            g = p * (g - tl.load(delta + columns, mask=y_valid, other=0.0)[None, :])
        else:
            allowed = may_look(rows[:, None], columns[None, :], T, S, keys, window, CAUSAL, WINDOW)
            p = tl.where(allowed, tl.exp2(scores * LOG2E - power[:, None]), 0.0)
            g = p * (g - whole[:, None])
        if plainly:
            _plain_gradients(
                x, x_stride, valid, y + columns, y_stride, y_valid, w, C, g, dx, dx_stride, dc, not KEYS,
                PRECISION, QUICK,
            )  # fmt: skip
        else:
            _quick_gradients(
                x, x_stride, valid, y + other, y_stride, count - other, w, C, g, dx, dx_stride, dc, not KEYS,
                ROWS, COLUMNS, HALVES, PRECISION, SPLIT, QUICK, THREADS,
            )  # fmt: skip
    if KEYS:
        places = (s0 + rows)[:, None] * dv_row + e[None, :]
        dv += batch * dv_batch + long_head * dv_head + places
        tl.store(dv, by_values.to(dv.dtype.element_ty), mask=(rows < S)[:, None] & (e < WIDTH)[None, :])
