"""Triton source of `concat_cuda`: scores without a tanh, and the forward pass.

tanh(a + b) = (x − 1) / (x + 1) with x = AB, A = e^{2a}, B = e^{2b}. Four such fractions over a common denominator:

    Σ_i w_i tanh(a_i + b_i) = N / D,   D = Π_i (1 + x_i) = Σ_u x_u,   N = Σ_u c_u x_u,   c_u = Σ_i ±w_i,

where u runs over the 16 subsets of the four, x_u is the product of the x_i in u, and ± is + where i is in u. Since
x_u = A_u B_u, both N and D are products of a (queries, 16) and a (16, keys) matrix: the matrix units do nearly all of
the work, and the rest is one reciprocal and one multiply-add per four elements.

Powers of e can overflow. If the four positive a (or b) of a query (or key) sum to more than LIMIT, in base 2, its
powers become NaN, and a tile that contains a NaN is computed again with a plain tanh, which does not overflow.
"""

import triton
import triton.language as tl

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
def concat_forward(
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
