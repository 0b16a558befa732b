"""What runs on the GPU for `unit_rows`: whole rows in registers, each read and written once.

One launch serves q and k: the first programs take q's rows, the others k's.
"""

import triton
import triton.language as tl

# Batches differ in them; a kernel made for each kind of number would be no faster.
LENGTHS = ["q_rows", "q_size", "k_rows", "k_size"]


@triton.jit
def _places(r, heads, size, sequence_stride, head_stride, row_stride, d):
    """Where the numbers of rows lie, these being counted through all heads of all sequences."""
    of_head, row = r // size, (r % size).to(tl.int64)
    start = (of_head // heads).to(tl.int64) * sequence_stride + (of_head % heads).to(tl.int64) * head_stride
    return (start + row * row_stride)[:, None] + d[None, :]


@triton.jit
def _forward(
    block, x, out, rows, heads, size, x_sequence, x_head, x_row, out_sequence, out_head, out_row, log_scale, step, eps,
    SCALED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    numbers = tl.load(x + _places(r, heads, size, x_sequence, x_head, x_row, d), mask=inside, other=0.0)
    numbers = numbers.to(tl.float32)
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(numbers * numbers, 1)), eps)
    if SCALED:
        factor *= tl.exp(tl.load(log_scale + r // size % heads * step, mask=r < rows, other=0.0).to(tl.float32))
    found = (numbers * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + _places(r, heads, size, out_sequence, out_head, out_row, d), found, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def unit_rows_forward(
    q, q_out, q_rows, q_heads, q_size, q_sequence, q_head, q_row, q_out_sequence, q_out_head, q_out_row,
    k, k_out, k_rows, k_heads, k_size, k_sequence, k_head, k_row, k_out_sequence, k_out_head, k_out_row,
    log_scale, step, eps,
    SCALED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, border = tl.program_id(0), tl.cdiv(q_rows, BLOCK_R)
    if block < border:
        _forward(
            block, q, q_out, q_rows, q_heads, q_size, q_sequence, q_head, q_row, q_out_sequence, q_out_head, q_out_row,
            log_scale, step, eps, SCALED, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _forward(
            block - border, k, k_out, k_rows, k_heads, k_size, k_sequence, k_head, k_row, k_out_sequence, k_out_head,
            k_out_row, log_scale, step, eps, False, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _backward(
    block, x, grad, dx, rows, heads, size, x_sequence, x_head, x_row, grad_sequence, grad_head, grad_row,
    dx_sequence, dx_head, dx_row, log_scale, dots, step, eps,
    SCALED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """With u = x / |x|, y = a·u, a = exp(l): ∂x = a / |x| (∂y − u (u·∂y)), ∂l = a u·∂y. Short rows do not turn."""
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    numbers = tl.load(x + _places(r, heads, size, x_sequence, x_head, x_row, d), mask=inside, other=0.0)
    flow = tl.load(grad + _places(r, heads, size, grad_sequence, grad_head, grad_row, d), mask=inside, other=0.0)
    numbers, flow = numbers.to(tl.float32), flow.to(tl.float32)
    length = tl.sqrt(tl.sum(numbers * numbers, 1))
    factor = 1.0 / tl.maximum(length, eps)
    unit = numbers * factor[:, None]
    dot = tl.sum(unit * flow, 1)
    if SCALED:
        scale = tl.exp(tl.load(log_scale + r // size % heads * step, mask=r < rows, other=0.0).to(tl.float32))
        tl.store(dots + r, scale * dot, mask=r < rows)
        factor *= scale
    along = tl.where(length > eps, dot, 0.0)
    found = (factor[:, None] * (flow - unit * along[:, None])).to(dx.dtype.element_ty)
    tl.store(dx + _places(r, heads, size, dx_sequence, dx_head, dx_row, d), found, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def unit_rows_backward(
    q, q_grad, dq, q_rows, q_heads, q_size, q_sequence, q_head, q_row,
    q_grad_sequence, q_grad_head, q_grad_row, dq_sequence, dq_head, dq_row,
    k, k_grad, dk, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
    k_grad_sequence, k_grad_head, k_grad_row, dk_sequence, dk_head, dk_row,
    log_scale, dots, step, eps,
    SCALED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, border = tl.program_id(0), tl.cdiv(q_rows, BLOCK_R)
    if block < border:
        _backward(
            block, q, q_grad, dq, q_rows, q_heads, q_size, q_sequence, q_head, q_row,
            q_grad_sequence, q_grad_head, q_grad_row, dq_sequence, dq_head, dq_row,
            log_scale, dots, step, eps, SCALED, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _backward(
            block - border, k, k_grad, dk, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
            k_grad_sequence, k_grad_head, k_grad_row, dk_sequence, dk_head, dk_row,
            log_scale, dots, step, eps, False, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
