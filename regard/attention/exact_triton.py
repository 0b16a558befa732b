"""Exact weights on a GPU, for scores that are dot products: nothing is written but the result, and that once.

One program makes a few rows of one head. It goes over the keys twice, first for each row's maximum and sum, then for
the weights themselves; computing a score again is faster than keeping it.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.masks import Form

BLOCK_T, BLOCK_S, WARPS = 32, 128, 4


def weights(
    q: Float[Tensor, "B H t D"],
    k: Float[Tensor, "B G S D"],
    scale: float,
    form: Form,
    rows: Int[Tensor, "t"],
    shift: int,
    q_lengths: Int[Tensor, "B"] | None,
) -> Float[Tensor, "B H t S"]:
    """The weights of queries that are rows `rows` of all, and stand `shift` further on the keys' axis.

    Of a sequence's queries those from its length on are none, and get zeros. `form.rest` must be None.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = torch.empty(B, H, T, S, dtype=torch.float32, device=q.device)
    _weights[(triton.cdiv(T, BLOCK_T), B * H)](
        *(q, k, out, rows, form.lengths if form.lengths is not None else rows),
        *(q_lengths if q_lengths is not None else rows, scale, shift, T, S),
        *q.stride()[:3], *k.stride()[:3],
        HEADS=H, GROUP=H // k.shape[1], WIDTH=D, CAUSAL=form.causal, WINDOW=form.window or 0,
        LENGTHS=form.lengths is not None, QUERY_LENGTHS=q_lengths is not None,
        BLOCK_T=BLOCK_T, BLOCK_S=BLOCK_S, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=WARPS,
    )  # fmt: skip
    return out


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
def _weights(
    q, k, out, rows, lengths, q_lengths, scale, shift, T, S,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    LENGTHS: tl.constexpr, QUERY_LENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    t, s, d = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    row = tl.load(rows + t, mask=t < T, other=-1)
    p = (row + shift).to(tl.int32)
    real = t < T
    if QUERY_LENGTHS:
        real = real & (row < tl.load(q_lengths + sequence))
    high = S
    if LENGTHS:
        high = tl.minimum(high, tl.load(lengths + sequence).to(tl.int32))
    if CAUSAL or WINDOW > 0:
        high = tl.minimum(high, tl.max(tl.where(real, p, -1), 0) + 1)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(real, p, S), 0) - WINDOW + 1, 0) // BLOCK_S * BLOCK_S
    queries = tl.load(
        q + sequence * q_batch + head * q_head + t.to(tl.int64)[:, None] * q_row + d[None, :],
        mask=(t[:, None] < T) & (d[None, :] < WIDTH),
        other=0.0,
    )
    k += sequence * k_batch + (head // GROUP) * k_head
    top, total = tl.full((BLOCK_T,), float("-inf"), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    for begin in range(first, high, BLOCK_S):
        scores = _scores(queries, k, k_row, d, begin + s, p, high, scale, WIDTH, CAUSAL, WINDOW)
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        top = higher
    # A row that may look at nothing has a sum of zero and only zeros to divide by it.
    top = tl.where(real & (top > float("-inf")), top, float("inf"))
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    out += (sequence * HEADS + head) * T * S
    for begin in range(0, S, BLOCK_S):
        at = begin + s
        tile = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
        if (begin >= first) & (begin < high):
            scores = _scores(queries, k, k_row, d, at, p, high, scale, WIDTH, CAUSAL, WINDOW)
            tile = tl.exp2(scores - top[:, None]) * share[:, None]
        tl.store(out + t.to(tl.int64)[:, None] * S + at[None, :], tile, mask=(t[:, None] < T) & (at[None, :] < S))
