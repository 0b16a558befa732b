"""What runs on the GPU for `concat`: scores without a tanh, and the forward pass.

tanh(a + b) = (x − 1) / (x + 1) with x = AB, A = e^{2a}, B = e^{2b}. Four such fractions brought over one denominator:

    Σ_i w_i tanh(a_i + b_i) = N / D,   D = Π_i (1 + x_i) = Σ_u x_u,   N = Σ_u c_u x_u,   c_u = Σ_i ±w_i,

u running over the 16 subsets of the four, x_u being the product of the x_i in u, and ± being + where i is in u. Since
x_u = A_u B_u, both N and D are products of a (queries, 16) and a (16, keys) matrix: the matrix units do nearly all of
the work, and the rest is one reciprocal and one multiply-add for each four elements.

Powers of e can overflow. A query or key whose four positive a (or b) sum to more than LIMIT, in powers of two, is made
NaN, and a tile in which there is any NaN is computed once more with a plain tanh, however large its numbers.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# With 2^48 for the powers of a query and of a key D stays below 2^100, and gradients that are divided by it are still
# numbers; and what underflows on one side is nothing even after multiplication with the largest of the other.
LIMIT = tl.constexpr(48.0)


@triton.jit
def bit(u, i: tl.constexpr):
    """1 where i is in u, 0 elsewhere."""
    return ((u >> i) & 1).to(tl.float32)


@triton.jit
def four(x, stride, valid):
    """Four rows of a (or b)."""
    x0 = tl.load(x, mask=valid, other=0.0)
    x1 = tl.load(x + stride, mask=valid, other=0.0)
    x2 = tl.load(x + 2 * stride, mask=valid, other=0.0)
    x3 = tl.load(x + 3 * stride, mask=valid, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def exponents(x0, x1, x2, x3):
    """Of 2a (or 2b) in powers of two: e^{2a} = 2^x."""
    k: tl.constexpr = 2 * LOG2E
    return x0.to(tl.float32) * k, x1.to(tl.float32) * k, x2.to(tl.float32) * k, x3.to(tl.float32) * k


@triton.jit
def too_large(x0, x1, x2, x3):
    positive = tl.maximum(x0, 0.0) + tl.maximum(x1, 0.0) + tl.maximum(x2, 0.0) + tl.maximum(x3, 0.0)
    return positive > LIMIT


@triton.jit
def expand(x, stride, valid, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """B_u of the columns' side, (ROWS, 16): one thread (or two, where there are more) makes the sixteen of a row."""
    x, valid = shared_by_two(x, valid, ROWS, THREADS)
    x0, x1, x2, x3 = four(x, stride, valid)
    return powers(x0, x1, x2, x3, ROWS, THREADS)


@triton.jit
def shared_by_two(x, valid, ROWS: tl.constexpr, THREADS: tl.constexpr):
    if ROWS < THREADS:
        return x[:, None] + tl.arange(0, 2)[None, :] * 0, valid[:, None]
    else:
        return x, valid


@triton.jit
def powers(x0, x1, x2, x3, ROWS: tl.constexpr, THREADS: tl.constexpr):
    x0, x1, x2, x3 = exponents(x0, x1, x2, x3)
    if ROWS < THREADS:
        last = tl.arange(0, 2)[None, :]
        x3 = tl.where(too_large(x0, x1, x2, x3), float("nan"), x3 * last)
        e0, e1, e2, e3 = tl.exp2(x0), tl.exp2(x1), tl.exp2(x2), tl.exp2(x3)
        y0 = _four_joined(e3, e3 * e2, e3 * e1, e3 * (e1 * e2))
        e3 *= e0
        y1 = _four_joined(e3, e3 * e2, e3 * e1, e3 * (e1 * e2))
        return tl.reshape(tl.join(y0, y1), (ROWS, 16))
    else:
        x0 = tl.where(too_large(x0, x1, x2, x3), float("nan"), x0)
        e0, e1, e2, e3 = tl.exp2(x0), tl.exp2(x1), tl.exp2(x2), tl.exp2(x3)
        e01, e23 = e0 * e1, e2 * e3
        # u = 8·(3 in u) + 4·(2 in u) + 2·(1 in u) + (0 in u); what is joined first is the highest bit.
        y0 = _four_joined(tl.full((ROWS,), 1.0, tl.float32), e3, e2, e23)
        y1 = _four_joined(e1, e1 * e3, e1 * e2, e1 * e23)
        y2 = _four_joined(e0, e0 * e3, e0 * e2, e0 * e23)
        y3 = _four_joined(e01, e01 * e3, e01 * e2, e01 * e23)
        return tl.reshape(_four_joined(y0, y1, y2, y3), (ROWS, 16))


@triton.jit
def _four_joined(p, q, r, s):
    return tl.join(tl.join(p, q), tl.join(r, s))


@triton.jit
def spread(x, stride, valid):
    """A_u of the rows' side, (rows, 16), from logarithms: in the layout in which the matrix units take it.

    A row of it is not tested for size here: it is the same for all tiles, and `rows_too_large` has tested it once.
    """
    u = tl.arange(0, 16)
    # Loaded as a tile, sixteen times the same number: so that the tile's layout, not a vector's, is that of the loads.
    x = x[:, None] + u[None, :] * 0
    valid = valid[:, None]
    x0 = tl.load(x, mask=valid, other=0.0).to(tl.float32) * bit(u, 0)[None, :]
    x1 = tl.load(x + stride, mask=valid, other=0.0).to(tl.float32) * bit(u, 1)[None, :]
    x2 = tl.load(x + 2 * stride, mask=valid, other=0.0).to(tl.float32) * bit(u, 2)[None, :]
    x3 = tl.load(x + 3 * stride, mask=valid, other=0.0).to(tl.float32) * bit(u, 3)[None, :]
    return tl.exp2((x0 + x1 + x2 + x3) * (2 * LOG2E))


@triton.jit
def signed(w):
    """c_u of four weights, (16,)."""
    u = tl.arange(0, 16)
    w0, w1, w2, w3 = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    c = w0 * (2 * bit(u, 0) - 1) + w1 * (2 * bit(u, 1) - 1) + w2 * (2 * bit(u, 2) - 1) + w3 * (2 * bit(u, 3) - 1)
    return c


@triton.jit
def reciprocal(x, QUICK: tl.constexpr):
    if QUICK:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit
def rows_too_large(x, stride, valid, C, ROWS: tl.constexpr):
    """1 for rows that have, in some four of their C numbers, more than LIMIT; 0 for others."""
    large = tl.zeros((ROWS,), tl.float32)
    for _ in range(0, C, 4):
        x0, x1, x2, x3 = four(x, stride, valid)
        x0, x1, x2, x3 = exponents(x0, x1, x2, x3)
        large = tl.maximum(large, too_large(x0, x1, x2, x3).to(tl.float32))
        x += 4 * stride
    return large


@triton.jit
def tanh(x, PRECISION: tl.constexpr, QUICK: tl.constexpr):
    if QUICK and PRECISION == "tf32":
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * (2 * LOG2E)), QUICK)


@triton.jit
def fraction(rows, columns, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """N and D of a tile: by one product, since with two of them threads wait for each other more often."""
    both = tl.reshape(tl.permute(tl.join(columns, columns * c), (2, 0, 1)), (2 * COLUMNS, 16))
    both = tl.dot(rows, tl.trans(both), input_precision=PRECISION)
    d, n = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return n, d


@triton.jit
def score_tile(
    x, x_stride, x_valid, x_large, y, y_stride, y_valid, w, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, QUICK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Σ_i w_i tanh(x_i + y_i) for the tile's rows and columns, and whether it had to be computed plainly."""
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Columns are loaded one step ahead: the first to read them waits for them.
    to, to_valid = shared_by_two(y, y_valid, COLUMNS, THREADS)
    y0, y1, y2, y3 = four(to, y_stride, to_valid)
    for i in range(0, C, 4):
        rows = spread(x + i * x_stride, x_stride, x_valid)
        columns = powers(y0, y1, y2, y3, COLUMNS, THREADS)
        n, d = fraction(rows, columns, signed(w + i)[None, :], ROWS, COLUMNS, PRECISION)
        to += tl.where(i + 4 < C, 4 * y_stride, 0)  # the last step loads its own once more
        y0, y1, y2, y3 = four(to, y_stride, to_valid)
        scores += n * reciprocal(d, QUICK)
    # 0x is 0 for all numbers but infinities and NaN, and a sum with NaN is NaN.
    plainly = tl.sum(tl.sum(scores * 0.0, 1) + x_large, 0) != 0.0
    scores = tl.where(plainly, 0.0, scores)
    # A loop that is hardly ever run, rather than a branch: a branch would have the tile in more than one layout.
    for i in range(0, tl.where(plainly, C, 0)):
        rows = tl.load(x + i * x_stride, mask=x_valid, other=0.0).to(tl.float32)
        columns = tl.load(y + i * y_stride, mask=y_valid, other=0.0).to(tl.float32)
        scores += tl.load(w + i) * tanh(rows[:, None] + columns[None, :], PRECISION, QUICK)
    return scores, plainly


@triton.jit
def sequence(starts, number, size, PACKED: tl.constexpr):
    """The first row and the length of a sequence."""
    if PACKED:
        first = tl.load(starts + number).to(tl.int64)
        return first, (tl.load(starts + number + 1) - first).to(tl.int32)
    else:
        return 0, size


@triton.jit
def may_look(t, s, T, S, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The mask of a tile, t being queries and s keys, one of them a column and the other a row."""
    allowed = (t < T) & (s < keys)
    if CAUSAL or WINDOW:
        allowed = allowed & (s <= t + (S - T))
    if WINDOW:
        allowed = allowed & (s > t + (S - T) - window)
    return allowed


@triton.jit(do_not_specialize=["C", "window", "tiles", "heads", "b_group", "v_group"])
def forward(
    a, b, w, v, out, rest, lse, q_starts, k_starts, lengths, T, S, C, window, tiles, heads, b_group, v_group,
    a_batch, a_head, a_stride, b_batch, b_head, b_stride, v_batch, v_head, v_row, out_batch, out_head, out_row,
    w_head, lse_batch, lse_head,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, QUICK: tl.constexpr, THREADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The output and the log-sum-exp (in powers of two) of ROWS queries of one head."""
    # The last queries first: under a causal mask they have the most to do.
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    t0, T = sequence(q_starts, batch, T, PACKED)
    s0, S = sequence(k_starts, batch, S, PACKED)
    if tile * ROWS >= T:
        return
    batch = batch.to(tl.int64)
    t = tile * ROWS + tl.arange(0, ROWS)
    a += batch * a_batch + head.to(tl.int64) * a_head + t0 + t
    b += batch * b_batch + (head // b_group).to(tl.int64) * b_head + s0
    v += batch * v_batch + (head // v_group).to(tl.int64) * v_head + s0 * v_row
    w += head * w_head
    keys = tl.minimum(S, tl.load(lengths + batch)).to(tl.int32) if LENGTHS else S
    first, last = 0, keys
    if CAUSAL or WINDOW:
        last = tl.minimum(last, tl.minimum((tile + 1) * ROWS, T) + (S - T))
    if WINDOW:
        first = tl.maximum(0, tile * ROWS + (S - T) - window + 1)
    e = tl.arange(0, BLOCK_V)
    large = rows_too_large(a, a_stride, t < T, C, ROWS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for begin in range(first, last, COLUMNS):
        s = begin + tl.arange(0, COLUMNS)
        scores, _ = score_tile(
            a, a_stride, t < T, large, b + s, b_stride, s < keys, w, C, ROWS, COLUMNS, PRECISION, QUICK, THREADS
        )
        allowed = may_look(t[:, None], s[None, :], T, S, keys, window, CAUSAL, WINDOW)
        scores = tl.where(allowed, scores * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row without any key so far
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(
            v + s[:, None].to(tl.int64) * v_row + e[None, :], mask=(s < keys)[:, None] & (e < WIDTH)[None, :], other=0.0
        )
        mean = tl.dot(p.to(values.dtype), values, mean * shrink[:, None], input_precision=PRECISION)
        top = higher
    mean = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None] * mean
    # A row without any key: +∞ makes all its weights zero in the backward pass.
    sum_of_powers = tl.where(total > 0.0, top + tl.log2(total), float("inf"))
    places = batch * out_batch + head.to(tl.int64) * out_head + (t0 + t)[:, None] * out_row + e[None, :]
    valid = (t < T)[:, None] & (e < WIDTH)[None, :]
    rounded = mean.to(out.dtype.element_ty)
    tl.store(out + places, rounded, mask=valid)
    if rounded.dtype != tl.float32:
        tl.store(rest + places, (mean - rounded.to(tl.float32)).to(rounded.dtype), mask=valid)
    tl.store(lse + batch * lse_batch + head.to(tl.int64) * lse_head + t0 + t, sum_of_powers, mask=t < T)
