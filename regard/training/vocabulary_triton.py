"""What runs on the GPU for `vocabulary`: one program a row of logits, over which it goes two or three times.

The first time it finds the row's log-sum-exp; the last time it writes the gradient where the logits were. In between
the row, some ten thousand numbers, is still in the cache. Sums are float32.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns(row, begin, V, BLOCK: tl.constexpr):
    """Logits of a row from `begin` on; −∞ where there are none."""
    columns = begin + tl.arange(0, BLOCK)
    return tl.load(row + columns, mask=columns < V, other=-float("inf"))


@triton.jit
def _log_sum_exp(row, V, BLOCK: tl.constexpr):
    """log Σ exp of a row, and the row's mean."""
    top = -float("inf")
    # Each column of a block has its own sums until the end: to add them up, threads would wait for each other.
    total, added = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    coming = _columns(row, 0, V, BLOCK)
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = coming.to(tl.float32)
        # The next columns are on their way while these are worked on.
        coming = _columns(row, begin + BLOCK, V, BLOCK)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)
        added += tl.where(columns < V, x, 0.0)
        top = higher
    return top + tl.log(tl.sum(total, 0)), tl.sum(added, 0) / V


@triton.jit
def _add(place, number):
    tl.store(place, tl.load(place) + number)


@triton.jit
def _clear(row, V, BLOCK: tl.constexpr):
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        tl.store(row + columns, tl.zeros((BLOCK,), row.dtype.element_ty), mask=columns < V)


@triton.jit
def vocabulary_rows(
    logits, row_stride, targets, losses, nlls, V, smoothing, share,
    IGNORED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(1 − ε)·nll + ε·(lse − mean) of each row and its nll, times `share`; the gradient takes the logits' place."""
    i = tl.program_id(0)
    row = logits + i.to(tl.int64) * row_stride
    target = tl.load(targets + i)
    if target == IGNORED:
        if WANTED:
            _clear(row, V, BLOCK)
    else:
        norm, mean = _log_sum_exp(row, V, BLOCK)
        nll = norm - tl.load(row + target).to(tl.float32)
        _add(losses + i, share * ((1 - smoothing) * nll + smoothing * (norm - mean)))
        _add(nlls + i, share * nll)
        if WANTED:
            tl.debug_barrier()  # nobody may write where somebody still reads
            coming = _columns(row, 0, V, BLOCK)
            for begin in range(0, V, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                x = coming.to(tl.float32)
                coming = _columns(row, begin + BLOCK, V, BLOCK)
                wanted = tl.where(columns == target, 1 - smoothing, 0.0) + smoothing / V
                grad = share * (tl.exp2((x - norm) * LOG2E) - wanted)
                tl.store(row + columns, grad.to(row.dtype.element_ty), mask=columns < V)


@triton.jit
def vocabulary_twins(
    first, second, first_stride, second_stride, targets, losses, nlls, V, smoothing, divergence,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for two passes, each with half a share, and `divergence` times the mean of KL(p‖q) and KL(q‖p)."""
    i = tl.program_id(0)
    p_row, q_row = first + i.to(tl.int64) * first_stride, second + i.to(tl.int64) * second_stride
    target = tl.load(targets + i)
    if target == IGNORED:
        _clear(p_row, V, BLOCK)
        _clear(q_row, V, BLOCK)
    else:
        p_norm, p_mean = _log_sum_exp(p_row, V, BLOCK)
        q_norm, q_mean = _log_sum_exp(q_row, V, BLOCK)
        forth, back = 0.0, 0.0
        for begin in range(0, V, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            log_p = tl.load(p_row + columns, mask=columns < V, other=0.0).to(tl.float32) - p_norm
            log_q = tl.load(q_row + columns, mask=columns < V, other=0.0).to(tl.float32) - q_norm
            gap = tl.where(columns < V, log_p - log_q, 0.0)
            forth += tl.sum(tl.exp2(log_p * LOG2E) * gap, 0)
            back -= tl.sum(tl.exp2(log_q * LOG2E) * gap, 0)
        p_nll = p_norm - tl.load(p_row + target).to(tl.float32)
        q_nll = q_norm - tl.load(q_row + target).to(tl.float32)
        nll = 0.5 * (p_nll + q_nll)
        smooth = 0.5 * (p_norm - p_mean + q_norm - q_mean)
        _add(losses + i, (1 - smoothing) * nll + smoothing * smooth + divergence * 0.5 * (forth + back))
        _add(nlls + i, nll)
        tl.debug_barrier()  # nobody may write where somebody still reads
        for begin in range(0, V, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            log_p = tl.load(p_row + columns, mask=columns < V, other=0.0).to(tl.float32) - p_norm
            log_q = tl.load(q_row + columns, mask=columns < V, other=0.0).to(tl.float32) - q_norm
            p, q, gap = tl.exp2(log_p * LOG2E), tl.exp2(log_q * LOG2E), log_p - log_q
            wanted = tl.where(columns == target, 1 - smoothing, 0.0) + smoothing / V
            # By the logits of p: d KL(p‖q) = p (log p − log q − KL), d KL(q‖p) = p − q; by those of q likewise.
            p_grad = p - wanted + divergence * (p * (gap - forth) + p - q)
            q_grad = q - wanted + divergence * (q * (-gap - back) + q - p)
            tl.store(p_row + columns, (0.5 * p_grad).to(p_row.dtype.element_ty), mask=columns < V)
            tl.store(q_row + columns, (0.5 * q_grad).to(q_row.dtype.element_ty), mask=columns < V)
