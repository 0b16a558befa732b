"""Exact weights on a GPU, for scores that are dot products: nothing is written but the result, and that once.

Two kernels compute every score: one for each row's maximum and sum, one for the weights themselves. To compute a score
again is faster than to keep it; and the second kernel, which has no order to keep, can be as wide as the GPU.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.masks import Form
from regard.attention.triton_here import contiguous_rows, power_of_two

# Rows and keys of a tile, and the warps that share it: of the sums, of the weights.
SUMS, WEIGHTS = (32, 128, 4), (64, 128, 8)


def weights(
    q: Float[Tensor, "B H t D"],
    k: Float[Tensor, "B G S D"],
    scale: float,
    form: Form,
    rows: Int[Tensor, "t"] | None,
    shift: int,
    q_lengths: Int[Tensor, "B"] | None,
) -> Float[Tensor, "B H t S"]:
    """The weights of queries that are rows `rows` of all (None: all), and stand `shift` further on the keys' axis.

    Of a sequence's queries those from its length on are none, and get zeros. `form.rest` must be None.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    q, k = (contiguous_rows(x) for x in (q, k))
    out = torch.empty(B, H, T, S, dtype=torch.float32, device=q.device)
    # Of each row the score, in units of log 2, from which its weights are counted.
    base = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    lengths = None if form.lengths is None else form.lengths.to(q.device)
    tensors = (q, k, base, *(out if x is None else x for x in (rows, lengths, q_lengths)))
    sizes = (scale, shift, T, S, *q.stride()[:3], *k.stride()[:3])
    given = dict(
        HEADS=H, GROUP=H // k.shape[1], WIDTH=D, BLOCK_D=power_of_two(D, 16), CAUSAL=form.causal,
        WINDOW=form.window or 0, ROWS=rows is not None, LENGTHS=lengths is not None,
        QUERY_LENGTHS=q_lengths is not None,
    )  # fmt: skip
    t, s, warps = SUMS
    _sums[(triton.cdiv(T, t), B * H)](*tensors, *sizes, **given, BLOCK_T=t, BLOCK_S=s, num_warps=warps)
    t, s, warps = WEIGHTS
    grid = (triton.cdiv(S, s), triton.cdiv(T, t), B * H)
    _weights[grid](out, *tensors, *sizes, **given, BLOCK_T=t, BLOCK_S=s, num_warps=warps)
    return out


@triton.jit
def _places(
    rows, lengths, q_lengths, t, sequence, shift, T, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, LENGTHS: tl.constexpr, QUERY_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Where the queries stand among the keys, which of them are there, and the end of the keys that any may see."""
    row = t
    if ROWS:
        row = tl.load(rows + t, mask=t < T, other=0).to(tl.int32)
    real = t < T
    if QUERY_LENGTHS:
        real = real & (row < tl.load(q_lengths + sequence))
    p = row + shift
    high = S
    if LENGTHS:
        high = tl.minimum(high, tl.load(lengths + sequence).to(tl.int32))
    if CAUSAL or WINDOW > 0:
        high = tl.minimum(high, tl.max(tl.where(real, p, -1), 0) + 1)
    return p, real, high


@triton.jit
def _queries(q, t, d, T, q_row, WIDTH: tl.constexpr):
    places = t.to(tl.int64)[:, None] * q_row + d[None, :]
    return tl.load(q + places, mask=(t[:, None] < T) & (d[None, :] < WIDTH), other=0.0)


@triton.jit
def _scores(q, k, k_row, d, s, p, high, scale, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Scores in units of log 2, −∞ where a query may not look."""
    places = s.to(tl.int64)[None, :] * k_row + d[:, None]
    keys = tl.load(k + places, mask=(s[None, :] < high) & (d[:, None] < WIDTH), other=0.0)
    scores = tl.dot(q, keys, input_precision="ieee") * (scale * 1.4426950408889634)
    allowed = s[None, :] < high
    if CAUSAL or WINDOW > 0:
        allowed = allowed & (s[None, :] <= p[:, None])
    if WINDOW > 0:
        allowed = allowed & (s[None, :] > p[:, None] - WINDOW)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def _sums(
    q, k, base, rows, lengths, q_lengths, scale, shift, T, S, q_batch, q_head, q_row, k_batch, k_head, k_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, LENGTHS: tl.constexpr, QUERY_LENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """For each row the score that its weights are counted from: log Σ exp; ∞ where there is nothing to look at."""
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    t, s, d = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    p, real, high = _places(
        rows, lengths, q_lengths, t, sequence, shift, T, S, CAUSAL, WINDOW, ROWS, LENGTHS, QUERY_LENGTHS
    )
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(real, p, S), 0) - WINDOW + 1, 0)
    queries = _queries(q + sequence * q_batch + head * q_head, t, d, T, q_row, WIDTH)
    k += sequence * k_batch + (head // GROUP) * k_head
    top, total = tl.full((BLOCK_T,), float("-inf"), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    for begin in range(first, high, BLOCK_S):
        scores = _scores(queries, k, k_row, d, begin + s, p, high, scale, WIDTH, CAUSAL, WINDOW)
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(scores - finite[:, None]), 1)
        top = higher
    seeing = real & (total > 0.0)
    result = tl.where(seeing, top + tl.log2(tl.where(seeing, total, 1.0)), float("inf"))
    tl.store(base + (sequence * HEADS + head) * T + t, result, mask=t < T)


@triton.jit
def _weights(
    out, q, k, base, rows, lengths, q_lengths, scale, shift, T, S, q_batch, q_head, q_row, k_batch, k_head, k_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, LENGTHS: tl.constexpr, QUERY_LENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A tile of the result."""
    sequence, head = (tl.program_id(2) // HEADS).to(tl.int64), tl.program_id(2) % HEADS
    t, d = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    begin = tl.program_id(0) * BLOCK_S
    s = begin + tl.arange(0, BLOCK_S)
    p, _, high = _places(
        rows, lengths, q_lengths, t, sequence, shift, T, S, CAUSAL, WINDOW, ROWS, LENGTHS, QUERY_LENGTHS
    )
    tile = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    if begin < high:
        queries = _queries(q + sequence * q_batch + head * q_head, t, d, T, q_row, WIDTH)
        keys = k + sequence * k_batch + (head // GROUP) * k_head
        scores = _scores(queries, keys, k_row, d, s, p, high, scale, WIDTH, CAUSAL, WINDOW)
        from_here = tl.load(base + (sequence * HEADS + head) * T + t, mask=t < T, other=float("inf"))
        tile = tl.exp2(scores - from_here[:, None])
    places = (sequence * HEADS + head) * T * S + t.to(tl.int64)[:, None] * S + s[None, :]
    tl.store(out + places, tile, mask=(t[:, None] < T) & (s[None, :] < S))
