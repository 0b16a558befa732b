"""Triton source of `exact_weights_cuda`: the log-sum-exp of each row, and the weights tile by tile."""

import triton
import triton.language as tl


@triton.jit
def _query_positions(
    rows, lengths, q_lengths, t, batch, shift, T, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_Q_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Positions of the queries on the axis of the keys, which queries are valid, and the end of their allowed keys."""
    row = t
    if HAS_ROWS:
        row = tl.load(rows + t, mask=t < T, other=0).to(tl.int32)
    is_valid = t < T
    if HAS_Q_LENGTHS:
        is_valid = is_valid & (row < tl.load(q_lengths + batch))
    p = row + shift
    key_end = S
    if HAS_LENGTHS:
        key_end = tl.minimum(key_end, tl.load(lengths + batch).to(tl.int32))
    if CAUSAL or WINDOW > 0:
        key_end = tl.minimum(key_end, tl.max(tl.where(is_valid, p, -1), 0) + 1)
    return p, is_valid, key_end


@triton.jit
def _load_queries(q, t, d, T, q_row, WIDTH: tl.constexpr):
    offsets = t.to(tl.int64)[:, None] * q_row + d[None, :]
    return tl.load(q + offsets, mask=(t[:, None] < T) & (d[None, :] < WIDTH), other=0.0)


@triton.jit
def _scores(q, k, k_row, d, s, p, key_end, scale, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Scores in base 2, −∞ where masked."""
    offsets = s.to(tl.int64)[None, :] * k_row + d[:, None]
    keys = tl.load(k + offsets, mask=(s[None, :] < key_end) & (d[:, None] < WIDTH), other=0.0)
    scores = tl.dot(q, keys, input_precision="ieee") * (scale * 1.4426950408889634)
    allowed = s[None, :] < key_end
    if CAUSAL or WINDOW > 0:
        allowed = allowed & (s[None, :] <= p[:, None])
    if WINDOW > 0:
        allowed = allowed & (s[None, :] > p[:, None] - WINDOW)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def row_log_sum_exp(
    q, k, lse, rows, lengths, q_lengths, scale, shift, T, S, q_batch, q_head, q_row, k_batch, k_head, k_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_Q_LENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each row in base 2; ∞ for a row without an allowed key."""
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    t, s, d = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    p, is_valid, key_end = _query_positions(
        rows, lengths, q_lengths, t, batch, shift, T, S, CAUSAL, WINDOW, HAS_ROWS, HAS_LENGTHS, HAS_Q_LENGTHS
    )
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(is_valid, p, S), 0) - WINDOW + 1, 0)
    queries = _load_queries(q + batch * q_batch + head * q_head, t, d, T, q_row, WIDTH)
    k += batch * k_batch + (head // GROUP) * k_head
    top, total = tl.full((BLOCK_T,), float("-inf"), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    for begin in range(first, key_end, BLOCK_S):
        scores = _scores(queries, k, k_row, d, begin + s, p, key_end, scale, WIDTH, CAUSAL, WINDOW)
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(scores - finite[:, None]), 1)
        top = new_top
    has_keys = is_valid & (total > 0.0)
    result = tl.where(has_keys, top + tl.log2(tl.where(has_keys, total, 1.0)), float("inf"))
    tl.store(lse + (batch * HEADS + head) * T + t, result, mask=t < T)


@triton.jit
def exact_weights(
    out, q, k, lse, rows, lengths, q_lengths, scale, shift, T, S, q_batch, q_head, q_row, k_batch, k_head, k_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_Q_LENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One tile of the weights."""
    batch, head = (tl.program_id(2) // HEADS).to(tl.int64), tl.program_id(2) % HEADS
    t, d = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    begin = tl.program_id(0) * BLOCK_S
    s = begin + tl.arange(0, BLOCK_S)
    p, _, key_end = _query_positions(
        rows, lengths, q_lengths, t, batch, shift, T, S, CAUSAL, WINDOW, HAS_ROWS, HAS_LENGTHS, HAS_Q_LENGTHS
    )
    tile = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    if begin < key_end:
        queries = _load_queries(q + batch * q_batch + head * q_head, t, d, T, q_row, WIDTH)
        keys = k + batch * k_batch + (head // GROUP) * k_head
        scores = _scores(queries, keys, k_row, d, s, p, key_end, scale, WIDTH, CAUSAL, WINDOW)
        row_lse = tl.load(lse + (batch * HEADS + head) * T + t, mask=t < T, other=float("inf"))
        tile = tl.exp2(scores - row_lse[:, None])
    offsets = (batch * HEADS + head) * T * S + t.to(tl.int64)[:, None] * S + s[None, :]
    tl.store(out + offsets, tile, mask=(t[:, None] < T) & (s[None, :] < S))
