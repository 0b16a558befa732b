"""What runs on the GPU for `sentences`: one program computes one head of one sequence, all of its keys in one tile.

Since a row of weights is whole, softmax needs no running maximum, and the backward pass neither the output nor a saved
log-sum-exp: it computes the weights again from q and k, and the row sums of dO·O as those of P·dP. Each number of dq,
dk and dv is written by one program, without atomics: the same bits every time.
"""

import triton
import triton.language as tl


@triton.jit
def _load(x, first, rows, count, columns, width, row_stride):
    """Rows of x from `first` on as a tile; what lies beyond `count` rows or `width` columns is zero."""
    places = (first + rows).to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(x + places, mask=(rows[:, None] < count) & (columns[None, :] < width), other=0.0)


@triton.jit
def _store(x, tile, first, rows, count, columns, width, row_stride):
    places = (first + rows).to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(x + places, tile.to(x.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < width))


@triton.jit
def _exponentials(q, k, t, s, S, scale, CAUSAL: tl.constexpr):
    """exp(score − the row's maximum), zero where a query may not look, and the sums of rows (at least tiny)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    allowed = s[None, :] < S
    if CAUSAL:
        allowed = allowed & (s[None, :] <= t[:, None])
    scores = tl.where(allowed, scores, float("-inf"))
    top = tl.max(scores, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(scores - top[:, None])
    return p, tl.maximum(tl.sum(p, 1), 1e-30)


@triton.jit
def sentences_forward(
    q, k, v, out, q_starts, k_starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    t0 = tl.load(q_starts + sequence)
    T = tl.load(q_starts + sequence + 1) - t0
    if T == 0:
        return
    s0 = tl.load(k_starts + sequence)
    S = tl.load(k_starts + sequence + 1) - s0
    s, d, e = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = _load(k + (head // GROUP) * k_head, s0, s, S, d, WIDTH, k_row)
    values = _load(v + (head // GROUP) * v_head, s0, s, S, e, VALUE_WIDTH, v_row)
    for begin in range(0, T, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        queries = _load(q + head * q_head, t0, t, T, d, WIDTH, q_row)
        p, total = _exponentials(queries, keys, t, s, S, scale, CAUSAL)
        mean = tl.dot(p.to(values.dtype), values, input_precision="ieee") / total[:, None]
        _store(out + head * out_head, mean, t0, t, T, e, VALUE_WIDTH, out_row)


@triton.jit
def sentences_backward(
    q, k, v, grad, dq, dk, dv, q_starts, k_starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
    dq_row, dq_head, dk_row, dk_head, dv_row, dv_head,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    sequence, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    t0, s0 = tl.load(q_starts + sequence), tl.load(k_starts + sequence)
    T, S = tl.load(q_starts + sequence + 1) - t0, tl.load(k_starts + sequence + 1) - s0
    if T + S == 0:
        return
    s, d, e = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = _load(k + group * k_head, s0, s, S, d, WIDTH, k_row)
    values = _load(v + group * v_head, s0, s, S, e, VALUE_WIDTH, v_row)
    key_grad = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    value_grad = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
    for member in range(GROUP):
        head = group * GROUP + member
        for begin in range(0, T, BLOCK_T):
            t = begin + tl.arange(0, BLOCK_T)
            queries = _load(q + head * q_head, t0, t, T, d, WIDTH, q_row)
            flow = _load(grad + head * grad_head, t0, t, T, e, VALUE_WIDTH, grad_row)
            p, total = _exponentials(queries, keys, t, s, S, scale, CAUSAL)
            p = p / total[:, None]
            value_grad += tl.dot(tl.trans(p.to(flow.dtype)), flow, input_precision="ieee")
            dp = tl.dot(flow, tl.trans(values), input_precision="ieee")
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(keys.dtype)
            query_grad = tl.dot(ds, keys, input_precision="ieee") * scale
            _store(dq + head * dq_head, query_grad, t0, t, T, d, WIDTH, dq_row)
            key_grad += tl.dot(tl.trans(ds), queries, input_precision="ieee")
    _store(dk + group * dk_head, key_grad * scale, s0, s, S, d, WIDTH, dk_row)
    _store(dv + group * dv_head, value_grad, s0, s, S, e, VALUE_WIDTH, dv_row)
