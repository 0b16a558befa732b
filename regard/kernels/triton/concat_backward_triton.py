"""Triton source of `concat_cuda`, backward pass: one kernel, launched once over queries and once over keys.

With G = ∂loss/∂score, and N and D as in `concat_forward_triton`: ∂N = G / D, ∂D = −G N / D². Both are matrix products,
and so is ∂A_u = c_u (∂N B_u) + (∂D B_u), summed over keys. a_i occurs in the subsets u that contain i:
∂a_i = 2 Σ A_u ∂A_u.

The rows of queries give ∂a and ∂w, the rows of keys ∂b and ∂v. Each program accumulates over tiles into rows that no
other program writes, so results are bitwise reproducible. Each launch recomputes scores and weights.
"""

import triton
import triton.language as tl

from regard.kernels.triton.concat_forward_triton import (
    LOG2E,
    attention_mask,
    bit,
    load_column_powers,
    load_row_powers,
    load_signed_weights,
    numerator_denominator,
    reciprocal,
    rows_exceed_limit,
    score_tile,
    sequence_bounds,
    tanh,
)

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
def concat_backward(
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
