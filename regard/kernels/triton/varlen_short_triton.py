"""Triton source of `varlen_short_cuda`: a program handles one head of one sequence at a time, all keys in one tile.

There are as many programs as the GPU runs at once; each continues with its next head or sequence until only empty
sequences are left. Since a tile contains complete rows of weights, softmax needs no running maximum, and the backward
pass neither the output nor a saved log-sum-exp: it recomputes the weights from q and k, and the row sums of dO·O as
those of P·dP. Each element of dq, dk and dv is written by one program, without atomics, so results are bitwise
reproducible.
"""

import triton
import triton.language as tl


@triton.jit
def _load(x, rows, count, columns, width, row_stride):
    """Load rows of x as a tile, with zeros beyond `count` rows or `width` columns."""
    offsets = rows[:, None] * row_stride + columns[None, :]
    return tl.load(x + offsets, mask=(rows[:, None] < count) & (columns[None, :] < width), other=0.0)


@triton.jit
def _store(x, tile, rows, count, columns, width, row_stride):
    offsets = rows[:, None] * row_stride + columns[None, :]
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < width))


@triton.jit
def _row_pointer(x, row, row_stride, head, head_stride):
    """Pointer to a row and head of x."""
    return x + row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride


@triton.jit
def _sequence_bounds(starts, sequence, sequences):
    """Start and end of a sequence; both are the end of the data for indices beyond the last sequence."""
    first = tl.load(starts + tl.minimum(sequence, sequences))
    return first, tl.load(starts + tl.minimum(sequence + 1, sequences))


@triton.jit
def _weights(q, k, t, s, S, scale, CAUSAL: tl.constexpr):
    """The weights of a tile of queries; zeros for a query without an allowed key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    last = tl.minimum(t, S - 1)[:, None] if CAUSAL else S - 1
    scores = tl.where(s[None, :] <= last, scores, float("-inf"))
    top = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return p * (1.0 / tl.maximum(tl.sum(p, 1), 1e-30))[:, None]


@triton.jit(do_not_specialize=["sequences"])
def varlen_short_forward(
    q, k, v, out, q_starts, k_starts, sequences, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SEVERAL_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i, s, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    task, end = tl.program_id(0), tl.load(q_starts + sequences)
    t0, t1 = _sequence_bounds(q_starts, task // HEADS, sequences)
    s0, s1 = _sequence_bounds(k_starts, task // HEADS, sequences)
    while t0 < end:
        head, T, S = task % HEADS, t1 - t0, s1 - s0
        keys = _load(_row_pointer(k, s0, k_row, head // GROUP, k_head), s, S, d, WIDTH, k_row)
        values = _load(_row_pointer(v, s0, v_row, head // GROUP, v_head), s, S, e, VALUE_WIDTH, v_row)
        row = t0
        # Load the bounds of the next sequence before the first use of these tiles, which waits for memory.
        task += tl.num_programs(0)
        t0, t1 = _sequence_bounds(q_starts, task // HEADS, sequences)
        s0, s1 = _sequence_bounds(k_starts, task // HEADS, sequences)
        for begin in range(0, T if HAS_SEVERAL_TILES else BLOCK_T, BLOCK_T):
            queries = _load(_row_pointer(q, row + begin, q_row, head, q_head), i, T - begin, d, WIDTH, q_row)
            p = _weights(queries, keys, begin + i, s, S, scale, CAUSAL)
            output = tl.dot(p.to(values.dtype), values, input_precision="ieee")
            _store(
                _row_pointer(out, row + begin, out_row, head, out_head), output, i, T - begin, e, VALUE_WIDTH, out_row
            )


@triton.jit(do_not_specialize=["sequences"])
def varlen_short_backward(
    q, k, v, grad, dq, dk, dv, q_starts, k_starts, sequences, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
    dq_row, dq_head, dk_row, dk_head, dv_row, dv_head,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SEVERAL_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i, s, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    task, t_end, s_end = tl.program_id(0), tl.load(q_starts + sequences), tl.load(k_starts + sequences)
    t0, t1 = _sequence_bounds(q_starts, task // GROUPS, sequences)
    s0, s1 = _sequence_bounds(k_starts, task // GROUPS, sequences)
    while (t0 < t_end) | (s0 < s_end):
        group, T, S = task % GROUPS, t1 - t0, s1 - s0
        keys = _load(_row_pointer(k, s0, k_row, group, k_head), s, S, d, WIDTH, k_row)
        values = _load(_row_pointer(v, s0, v_row, group, v_head), s, S, e, VALUE_WIDTH, v_row)
        row, key = t0, s0
        task += tl.num_programs(0)
        t0, t1 = _sequence_bounds(q_starts, task // GROUPS, sequences)
        s0, s1 = _sequence_bounds(k_starts, task // GROUPS, sequences)
        key_grad = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
        value_grad = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
        for head_in_group in range(GROUP):
            head = group * GROUP + head_in_group
            for begin in range(0, T if HAS_SEVERAL_TILES else BLOCK_T, BLOCK_T):
                queries = _load(_row_pointer(q, row + begin, q_row, head, q_head), i, T - begin, d, WIDTH, q_row)
                out_grad = _load(
                    _row_pointer(grad, row + begin, grad_row, head, grad_head), i, T - begin, e, VALUE_WIDTH, grad_row
                )
                p = _weights(queries, keys, begin + i, s, S, scale, CAUSAL)
                value_grad += tl.dot(tl.trans(p.to(out_grad.dtype)), out_grad, input_precision="ieee")
                dp = tl.dot(out_grad, tl.trans(values), input_precision="ieee")
                ds = (p * scale * (dp - tl.sum(p * dp, 1)[:, None])).to(keys.dtype)
                query_grad = tl.dot(ds, keys, input_precision="ieee")
                _store(_row_pointer(dq, row + begin, dq_row, head, dq_head), query_grad, i, T - begin, d, WIDTH, dq_row)
                key_grad += tl.dot(tl.trans(ds), queries, input_precision="ieee")
        _store(_row_pointer(dk, key, dk_row, group, dk_head), key_grad, s, S, d, WIDTH, dk_row)
        _store(_row_pointer(dv, key, dv_row, group, dv_head), value_grad, s, S, e, VALUE_WIDTH, dv_row)
