"""What runs on the GPU for `sentences`: a program has one head of one sequence at a time, all its keys in one tile.

There are as many programs as run at once; each goes on to the next head or sequence until only empty ones are left.
Since a row of weights is whole, softmax needs no running maximum, and the backward pass neither the output nor a saved
log-sum-exp: it computes the weights again from q and k, and the row sums of dO·O as those of P·dP. Each number of dq,
dk and dv is written by one program, without atomics: the same bits every time.
"""

import triton
import triton.language as tl


@triton.jit
def _load(x, rows, count, columns, width, row_stride):
    """Rows of x as a tile; what lies beyond `count` rows or `width` columns is zero."""
    places = rows[:, None] * row_stride + columns[None, :]
    return tl.load(x + places, mask=(rows[:, None] < count) & (columns[None, :] < width), other=0.0)


@triton.jit
def _store(x, tile, rows, count, columns, width, row_stride):
    places = rows[:, None] * row_stride + columns[None, :]
    tl.store(x + places, tile.to(x.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < width))


@triton.jit
def _at(x, row, row_stride, head, head_stride):
    """Where a row and head of x begins."""
    return x + row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride


@triton.jit
def _borders(starts, sequence, sequences):
    """Where a sequence begins and ends; one beyond the last is empty, at the end."""
    first = tl.load(starts + tl.minimum(sequence, sequences))
    return first, tl.load(starts + tl.minimum(sequence + 1, sequences))


@triton.jit
def _weights(q, k, t, s, S, scale, CAUSAL: tl.constexpr):
    """What each query makes of each key; zeros for a query that may look at none."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    last = tl.minimum(t, S - 1)[:, None] if CAUSAL else S - 1
    scores = tl.where(s[None, :] <= last, scores, float("-inf"))
    top = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return p * (1.0 / tl.maximum(tl.sum(p, 1), 1e-30))[:, None]


@triton.jit(do_not_specialize=["sequences"])
def sentences_forward(
    q, k, v, out, q_starts, k_starts, sequences, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    SEVERAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i, s, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    place, end = tl.program_id(0), tl.load(q_starts + sequences)
    t0, t1 = _borders(q_starts, place // HEADS, sequences)
    s0, s1 = _borders(k_starts, place // HEADS, sequences)
    while t0 < end:
        head, T, S = place % HEADS, t1 - t0, s1 - s0
        keys = _load(_at(k, s0, k_row, head // GROUP, k_head), s, S, d, WIDTH, k_row)
        values = _load(_at(v, s0, v_row, head // GROUP, v_head), s, S, e, VALUE_WIDTH, v_row)
        row = t0
        # The next borders are asked for before anybody waits for these tiles.
        place += tl.num_programs(0)
        t0, t1 = _borders(q_starts, place // HEADS, sequences)
        s0, s1 = _borders(k_starts, place // HEADS, sequences)
        for begin in range(0, T if SEVERAL else BLOCK_T, BLOCK_T):
            queries = _load(_at(q, row + begin, q_row, head, q_head), i, T - begin, d, WIDTH, q_row)
            p = _weights(queries, keys, begin + i, s, S, scale, CAUSAL)
            mean = tl.dot(p.to(values.dtype), values, input_precision="ieee")
            _store(_at(out, row + begin, out_row, head, out_head), mean, i, T - begin, e, VALUE_WIDTH, out_row)


@triton.jit(do_not_specialize=["sequences"])
def sentences_backward(
    q, k, v, grad, dq, dk, dv, q_starts, k_starts, sequences, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
    dq_row, dq_head, dk_row, dk_head, dv_row, dv_head,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    SEVERAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i, s, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    place, t_end, s_end = tl.program_id(0), tl.load(q_starts + sequences), tl.load(k_starts + sequences)
    t0, t1 = _borders(q_starts, place // GROUPS, sequences)
    s0, s1 = _borders(k_starts, place // GROUPS, sequences)
    while (t0 < t_end) | (s0 < s_end):
        group, T, S = place % GROUPS, t1 - t0, s1 - s0
        keys = _load(_at(k, s0, k_row, group, k_head), s, S, d, WIDTH, k_row)
        values = _load(_at(v, s0, v_row, group, v_head), s, S, e, VALUE_WIDTH, v_row)
        row, key = t0, s0
        place += tl.num_programs(0)
        t0, t1 = _borders(q_starts, place // GROUPS, sequences)
        s0, s1 = _borders(k_starts, place // GROUPS, sequences)
        key_grad = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
        value_grad = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
        for member in range(GROUP):
            head = group * GROUP + member
            for begin in range(0, T if SEVERAL else BLOCK_T, BLOCK_T):
                queries = _load(_at(q, row + begin, q_row, head, q_head), i, T - begin, d, WIDTH, q_row)
                flow = _load(_at(grad, row + begin, grad_row, head, grad_head), i, T - begin, e, VALUE_WIDTH, grad_row)
                p = _weights(queries, keys, begin + i, s, S, scale, CAUSAL)
                value_grad += tl.dot(tl.trans(p.to(flow.dtype)), flow, input_precision="ieee")
                dp = tl.dot(flow, tl.trans(values), input_precision="ieee")
                ds = (p * scale * (dp - tl.sum(p * dp, 1)[:, None])).to(keys.dtype)
                query_grad = tl.dot(ds, keys, input_precision="ieee")
                _store(_at(dq, row + begin, dq_row, head, dq_head), query_grad, i, T - begin, d, WIDTH, dq_row)
                key_grad += tl.dot(tl.trans(ds), queries, input_precision="ieee")
        _store(_at(dk, key, dk_row, group, dk_head), key_grad, s, S, d, WIDTH, dk_row)
        _store(_at(dv, key, dv_row, group, dv_head), value_grad, s, S, e, VALUE_WIDTH, dv_row)
