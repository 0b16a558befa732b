"""Exact attention weights for scores that are dot products (CUDA, Triton), without storing the scores.

Reference: the blockwise loop in `regard.attention.exact_weights`. One kernel computes the log-sum-exp of each row, a
second one the weights. Computing the scores twice is faster than storing them, and the second kernel, whose tiles are
independent of each other, fills the GPU. There is no backward pass.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.triton.support import contiguous_rows, next_power_of_two, tl, triton, triton_available

MAX_WIDTH = 256
# Rows, keys and warps per tile: of the kernel for the log-sum-exp, of the one for the weights.
LSE_TILE, WEIGHTS_TILE = (32, 128, 4), (64, 128, 8)


def supports(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel runs on these inputs. It has no backward pass."""
    return (
        triton_available()
        and q.is_cuda
        and q.dtype == k.dtype
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.shape[-1] <= MAX_WIDTH
        and q.numel() > 0
        and k.numel() > 0
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    )


def exact_weights(
    q: Float[Tensor, "B H t D"],
    k: Float[Tensor, "B G S D"],
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    rows: Int[Tensor, "t"] | None = None,
    shift: int = 0,
    q_lengths: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B H t S"]:
    """softmax(scale · q kᵀ) under a causal mask, a sliding window and lengths of the keys.

    `rows` are the indices of the queries among all queries (None: 0 to t − 1); query i is at position i + `shift` on
    the axis of the keys. Queries with indices from `q_lengths` on are padding and get zeros.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    q, k = (contiguous_rows(x) for x in (q, k))
    out = torch.empty(B, H, T, S, dtype=torch.float32, device=q.device)
    # The log-sum-exp of each row, in base 2.
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    lengths = None if lengths is None else lengths.to(q.device)
    tensors = (q, k, lse, *(out if x is None else x for x in (rows, lengths, q_lengths)))
    sizes = (scale, shift, T, S, *q.stride()[:3], *k.stride()[:3])
    constants = dict(
        HEADS=H, GROUP=H // k.shape[1], WIDTH=D, BLOCK_D=next_power_of_two(D, 16), CAUSAL=causal,
        WINDOW=window or 0, HAS_ROWS=rows is not None, HAS_LENGTHS=lengths is not None,
        HAS_Q_LENGTHS=q_lengths is not None,
    )  # fmt: skip
    t, s, warps = LSE_TILE
    row_log_sum_exp_kernel[(-(-T // t), B * H)](*tensors, *sizes, **constants, BLOCK_T=t, BLOCK_S=s, num_warps=warps)
    t, s, warps = WEIGHTS_TILE
    exact_weights_kernel[(-(-S // s), -(-T // t), B * H)](
        out, *tensors, *sizes, **constants, BLOCK_T=t, BLOCK_S=s, num_warps=warps
    )
    return out


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
def row_log_sum_exp_kernel(
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
def exact_weights_kernel(
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
