"""Triton source of `cross_entropy_cuda`: one program per row of logits, in two or three passes over the row.

The first pass computes the log-sum-exp; the last overwrites the logits with their gradient. In between the row, some
ten thousand elements, stays in the cache. Sums are float32.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_columns(row, begin, V, BLOCK: tl.constexpr):
    """BLOCK logits of a row, starting at column `begin`; −∞ beyond the last column."""
    columns = begin + tl.arange(0, BLOCK)
    return tl.load(row + columns, mask=columns < V, other=-float("inf"))


@triton.jit
def _log_sum_exp(row, V, BLOCK: tl.constexpr):
    """The log-sum-exp and the mean of a row."""
    top = -float("inf")
    # Sums are kept per column of the block and reduced at the end: each reduction synchronizes the threads.
    total, logit_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    next_block = _load_columns(row, 0, V, BLOCK)
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = next_block.to(tl.float32)
        # Prefetch the next columns while these are processed.
        next_block = _load_columns(row, begin + BLOCK, V, BLOCK)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - new_top) * LOG2E) + tl.exp2((x - new_top) * LOG2E)
        logit_sum += tl.where(columns < V, x, 0.0)
        top = new_top
    return top + tl.log(tl.sum(total, 0)), tl.sum(logit_sum, 0) / V


@triton.jit
def _add(pointer, value):
    tl.store(pointer, tl.load(pointer) + value)


@triton.jit
def _clear(row, V, BLOCK: tl.constexpr):
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        tl.store(row + columns, tl.zeros((BLOCK,), row.dtype.element_ty), mask=columns < V)


@triton.jit
def cross_entropy_rows(
    logits, row_stride, targets, losses, nlls, V, smoothing, factor,
    IGNORE_INDEX: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(1 − ε)·nll + ε·(lse − mean) and nll of each row, times `factor`; NEEDS_GRAD: overwrite logits by gradients."""
    i = tl.program_id(0)
    row = logits + i.to(tl.int64) * row_stride
    target = tl.load(targets + i)
    if target == IGNORE_INDEX:
        if NEEDS_GRAD:
            _clear(row, V, BLOCK)
    else:
        lse, mean = _log_sum_exp(row, V, BLOCK)
        nll = lse - tl.load(row + target).to(tl.float32)
        _add(losses + i, factor * ((1 - smoothing) * nll + smoothing * (lse - mean)))
        _add(nlls + i, factor * nll)
        if NEEDS_GRAD:
            tl.debug_barrier()  # all threads have read the row before any of them overwrites it
            next_block = _load_columns(row, 0, V, BLOCK)
            for begin in range(0, V, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                x = next_block.to(tl.float32)
                next_block = _load_columns(row, begin + BLOCK, V, BLOCK)
                target_p = tl.where(columns == target, 1 - smoothing, 0.0) + smoothing / V
                grad = factor * (tl.exp2((x - lse) * LOG2E) - target_p)
                tl.store(row + columns, grad.to(row.dtype.element_ty), mask=columns < V)


@triton.jit
def r_drop_rows(
    first, second, first_stride, second_stride, targets, losses, nlls, V, smoothing, divergence,
    IGNORE_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean loss of two passes plus `divergence` times the mean of KL(p‖q) and KL(q‖p) (R-Drop)."""
    i = tl.program_id(0)
    p_row, q_row = first + i.to(tl.int64) * first_stride, second + i.to(tl.int64) * second_stride
    target = tl.load(targets + i)
    if target == IGNORE_INDEX:
        _clear(p_row, V, BLOCK)
        _clear(q_row, V, BLOCK)
    else:
        p_lse, p_mean = _log_sum_exp(p_row, V, BLOCK)
        q_lse, q_mean = _log_sum_exp(q_row, V, BLOCK)
        kl_pq, kl_qp = 0.0, 0.0
        for begin in range(0, V, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            log_p = tl.load(p_row + columns, mask=columns < V, other=0.0).to(tl.float32) - p_lse
            log_q = tl.load(q_row + columns, mask=columns < V, other=0.0).to(tl.float32) - q_lse
            gap = tl.where(columns < V, log_p - log_q, 0.0)
            kl_pq += tl.sum(tl.exp2(log_p * LOG2E) * gap, 0)
            kl_qp -= tl.sum(tl.exp2(log_q * LOG2E) * gap, 0)
        p_nll = p_lse - tl.load(p_row + target).to(tl.float32)
        q_nll = q_lse - tl.load(q_row + target).to(tl.float32)
        nll = 0.5 * (p_nll + q_nll)
        smooth = 0.5 * (p_lse - p_mean + q_lse - q_mean)
        _add(losses + i, (1 - smoothing) * nll + smoothing * smooth + divergence * 0.5 * (kl_pq + kl_qp))
        _add(nlls + i, nll)
        tl.debug_barrier()  # all threads have read the row before any of them overwrites it
        for begin in range(0, V, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            log_p = tl.load(p_row + columns, mask=columns < V, other=0.0).to(tl.float32) - p_lse
            log_q = tl.load(q_row + columns, mask=columns < V, other=0.0).to(tl.float32) - q_lse
            p, q, gap = tl.exp2(log_p * LOG2E), tl.exp2(log_q * LOG2E), log_p - log_q
            target_p = tl.where(columns == target, 1 - smoothing, 0.0) + smoothing / V
            # With respect to the logits of p: ∂KL(p‖q) = p (log p − log q − KL), ∂KL(q‖p) = p − q; those of q likewise.
            p_grad = p - target_p + divergence * (p * (gap - kl_pq) + p - q)
            q_grad = q - target_p + divergence * (q * (-gap - kl_qp) + q - p)
            tl.store(p_row + columns, (0.5 * p_grad).to(p_row.dtype.element_ty), mask=columns < V)
            tl.store(q_row + columns, (0.5 * q_grad).to(q_row.dtype.element_ty), mask=columns < V)
