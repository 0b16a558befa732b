"""Cross-entropy over the vocabulary in chunks of rows: a kernel replaces the logits by their gradient (CUDA, Triton).

Reference: the chunked loss in `regard.training.losses`. A matrix product computes a chunk of low-precision logits, one
kernel reads each row and overwrites it with its gradient, and two products propagate that to features and weights. The
full logits never exist in memory, and no logits are stored in float32.

One program handles one row of logits, in two or three passes over it. The first computes the log-sum-exp; the last
overwrites the logits with their gradient. In between the row, some ten thousand elements, stays in the cache. Sums are
float32.
"""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.triton.support import next_power_of_two, tl, triton, triton_available

# Maximum logits per chunk. Larger chunks accumulate the gradient of the weights less often.
CHUNK_ELEMENTS = 2**28
# Columns per tile of a program, and its warps.
BLOCK, WARPS = 4096, 4


def supports(features: Float[Tensor, "N E"]) -> bool:
    """Whether the kernel runs on these inputs."""
    return features.is_cuda and triton_available() and features.dtype != torch.float64


def cross_entropy(
    passes: list[Float[Tensor, "N E"]],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float,
    divergence: float,
    bias: Float[Tensor, "V"] | None,
    dtype: torch.dtype,
    needs_grad: bool,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Sums of the loss and of the negative log-likelihood; with `needs_grad`, gradients of weight, bias and features.

    `passes` are the features of one forward pass, or of two for R-Drop. Matrix products run in `dtype`. Targets equal
    to `ignore_index` do not count.
    """
    V, N = len(weight), len(targets)
    cast_weight = weight.to(dtype)
    cast_bias = None if bias is None else bias.to(dtype)
    inputs = [x.to(dtype) for x in passes]
    feature_grads = [torch.empty_like(x) for x in passes] if needs_grad else []
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
    bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs_grad and bias is not None else None
    losses, nlls = targets.new_zeros((2, N), dtype=torch.float32)
    rows = rows_per_chunk(N, V)
    # Rows are aligned to 16 bytes; otherwise the matrix units would load element by element.
    logits = [x.new_empty(rows, -(-V // 8) * 8) for x in inputs]
    for begin in range(0, N, rows):
        part = slice(begin, min(begin + rows, N))
        chunks = [buffer[: part.stop - begin, :V] for buffer in logits]
        for x, chunk in zip(inputs, chunks):
            if cast_bias is None:
                torch.mm(x[part], cast_weight.T, out=chunk)
            else:
                torch.addmm(cast_bias, x[part], cast_weight.T, out=chunk)
        row_tensors = targets[part], losses[part], nlls[part]
        if divergence and needs_grad:
            r_drop_rows(*chunks, *row_tensors, smoothing, divergence, ignore_index)
        else:
            for chunk in chunks:
                cross_entropy_rows(chunk, *row_tensors, smoothing, 1 / len(chunks), needs_grad, ignore_index)
        if weight_grad is None:
            continue
        for x, grad, feature_grad in zip(inputs, chunks, feature_grads):
            if feature_grad.dtype == dtype:
                torch.mm(grad, cast_weight, out=feature_grad[part])
            else:
                feature_grad[part] = grad @ cast_weight
            _add_product(weight_grad, grad.T, x[part])
            if bias_grad is not None:
                bias_grad += grad.sum(dim=0, dtype=torch.float32)
    if weight_grad is not None:
        weight_grad = weight_grad.to(weight.dtype)
    if bias is not None and bias_grad is not None:
        bias_grad = bias_grad.to(bias.dtype)
    return losses.sum(), nlls.sum(), weight_grad, bias_grad, feature_grads


def rows_per_chunk(count: int, vocab: int) -> int:
    """Rows per chunk, a multiple of 128, such that all chunks have about the same size.

    >>> rows_per_chunk(25_600, 32_000)
    6400
    """
    chunks = max(1, -(-count * vocab // CHUNK_ELEMENTS))
    return -(-count // chunks // 128) * 128


@torch.library.custom_op("regard::cross_entropy_rows", mutates_args=("logits", "losses", "nlls"))
def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    nlls: Tensor,
    smoothing: float,
    factor: float,
    needs_grad: bool,
    ignore_index: int,
) -> None:
    """Add loss and negative log-likelihood of each row, times `factor`; with `needs_grad` overwrite the logits with
    their gradient."""
    cross_entropy_rows_kernel[(len(targets),)](
        *(logits, logits.stride(0), targets, losses, nlls, logits.shape[1], smoothing, factor),
        IGNORE_INDEX=ignore_index,
        NEEDS_GRAD=needs_grad,
        BLOCK=_block(logits.shape[1]),
        num_warps=WARPS,
    )


@torch.library.custom_op("regard::r_drop_rows", mutates_args=("first", "second", "losses", "nlls"))
def r_drop_rows(
    first: Tensor,
    second: Tensor,
    targets: Tensor,
    losses: Tensor,
    nlls: Tensor,
    smoothing: float,
    divergence: float,
    ignore_index: int,
) -> None:
    """The same for the logits of two passes, plus `divergence` times the divergence between them (R-Drop)."""
    r_drop_rows_kernel[(len(targets),)](
        *(first, second, first.stride(0), second.stride(0)),
        *(targets, losses, nlls, first.shape[1], smoothing, divergence),
        IGNORE_INDEX=ignore_index,
        BLOCK=_block(first.shape[1]),
        num_warps=WARPS,
    )


@cross_entropy_rows.register_fake
def _(logits, targets, losses, nlls, smoothing, factor, needs_grad, ignore_index):
    return None


@r_drop_rows.register_fake
def _(first, second, targets, losses, nlls, smoothing, divergence, ignore_index):
    return None


def _block(vocab: int) -> int:
    return min(BLOCK, next_power_of_two(vocab, 32))


def _add_product(total: Float[Tensor, "V E"], a: Float[Tensor, "V n"], b: Float[Tensor, "n E"]) -> None:
    """total += a @ b, accumulated in float32 where torch supports it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif not a.is_cuda:
        total += a @ b
    elif _accumulates_in_float32():
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


@functools.cache
def _accumulates_in_float32() -> bool:
    """Whether this version of torch can add a product of bf16 matrices to a float32 matrix."""
    total, a = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, a, total.dtype, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


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
def cross_entropy_rows_kernel(
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
def r_drop_rows_kernel(
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
