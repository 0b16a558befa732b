"""Triton source of `l2_normalize_cuda`: complete rows in registers, each read and written once.

One launch handles q and k: the first programs process rows of q, the others rows of k.
"""

import triton
import triton.language as tl

# These vary from batch to batch; kernels specialized for their divisibility would be no faster.
SIZES = ["q_rows", "q_size", "k_rows", "k_size"]


@triton.jit
def _element_offsets(r, heads, size, sequence_stride, head_stride, row_stride, d):
    """Offsets of the elements of rows r, which are numbered through all heads of all sequences."""
    head, row = r // size, (r % size).to(tl.int64)
    start = (head // heads).to(tl.int64) * sequence_stride + (head % heads).to(tl.int64) * head_stride
    return (start + row * row_stride)[:, None] + d[None, :]


@triton.jit
def _normalize_block(
    block, x, out, rows, heads, size, x_sequence, x_head, x_row, out_sequence, out_head, out_row,
    log_scale, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    in_bounds = (r < rows)[:, None] & (d < D)[None, :]
    values = tl.load(x + _element_offsets(r, heads, size, x_sequence, x_head, x_row, d), mask=in_bounds, other=0.0)
    values = values.to(tl.float32)
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(values * values, 1)), eps)
    if HAS_SCALE:
        factor *= tl.exp(tl.load(log_scale + r // size % heads * scale_stride, mask=r < rows, other=0.0).to(tl.float32))
    result = (values * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + _element_offsets(r, heads, size, out_sequence, out_head, out_row, d), result, mask=in_bounds)


@triton.jit(do_not_specialize=SIZES)
def l2_normalize_forward(
    q, q_out, q_rows, q_heads, q_size, q_sequence, q_head, q_row, q_out_sequence, q_out_head, q_out_row,
    k, k_out, k_rows, k_heads, k_size, k_sequence, k_head, k_row, k_out_sequence, k_out_head, k_out_row,
    log_scale, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, first_k_block = tl.program_id(0), tl.cdiv(q_rows, BLOCK_R)
    if block < first_k_block:
        _normalize_block(
            block, q, q_out, q_rows, q_heads, q_size, q_sequence, q_head, q_row, q_out_sequence, q_out_head, q_out_row,
            log_scale, scale_stride, eps, HAS_SCALE, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _normalize_block(
            block - first_k_block, k, k_out, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
            k_out_sequence, k_out_head, k_out_row, log_scale, scale_stride, eps, False, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _block_gradients(
    block, x, grad, dx, rows, heads, size, x_sequence, x_head, x_row, grad_sequence, grad_head, grad_row,
    dx_sequence, dx_head, dx_row, log_scale, scale_grads, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """With u = x / |x|, y = a·u, a = exp(l): ∂x = a / |x| (∂y − u (u·∂y)), ∂l = a u·∂y; |x| ≤ eps: ∂x = a ∂y / eps."""
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    in_bounds = (r < rows)[:, None] & (d < D)[None, :]
    values = tl.load(x + _element_offsets(r, heads, size, x_sequence, x_head, x_row, d), mask=in_bounds, other=0.0)
    grad += _element_offsets(r, heads, size, grad_sequence, grad_head, grad_row, d)
    dy = tl.load(grad, mask=in_bounds, other=0.0)
    values, dy = values.to(tl.float32), dy.to(tl.float32)
    norm = tl.sqrt(tl.sum(values * values, 1))
    factor = 1.0 / tl.maximum(norm, eps)
    unit = values * factor[:, None]
    dot = tl.sum(unit * dy, 1)
    if HAS_SCALE:
        scale = tl.exp(tl.load(log_scale + r // size % heads * scale_stride, mask=r < rows, other=0.0).to(tl.float32))
        tl.store(scale_grads + r, scale * dot, mask=r < rows)
        factor *= scale
    projection = tl.where(norm > eps, dot, 0.0)
    result = (factor[:, None] * (dy - unit * projection[:, None])).to(dx.dtype.element_ty)
    tl.store(dx + _element_offsets(r, heads, size, dx_sequence, dx_head, dx_row, d), result, mask=in_bounds)


@triton.jit(do_not_specialize=SIZES)
def l2_normalize_backward(
    q, q_grad, dq, q_rows, q_heads, q_size, q_sequence, q_head, q_row,
    q_grad_sequence, q_grad_head, q_grad_row, dq_sequence, dq_head, dq_row,
    k, k_grad, dk, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
    k_grad_sequence, k_grad_head, k_grad_row, dk_sequence, dk_head, dk_row,
    log_scale, scale_grads, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, first_k_block = tl.program_id(0), tl.cdiv(q_rows, BLOCK_R)
    if block < first_k_block:
        _block_gradients(
            block, q, q_grad, dq, q_rows, q_heads, q_size, q_sequence, q_head, q_row,
            q_grad_sequence, q_grad_head, q_grad_row, dq_sequence, dq_head, dq_row,
            log_scale, scale_grads, scale_stride, eps, HAS_SCALE, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _block_gradients(
            block - first_k_block, k, k_grad, dk, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
            k_grad_sequence, k_grad_head, k_grad_row, dk_sequence, dk_head, dk_row,
            log_scale, scale_grads, scale_stride, eps, False, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
