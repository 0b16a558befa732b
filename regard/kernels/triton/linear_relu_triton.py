"""Triton source of `linear_relu_cuda`: the backward pass of relu, which masks the gradient and sums its columns."""

import triton
import triton.language as tl


@triton.jit
def relu_backward(
    grad, out, masked_grad, partial_sums, rows, columns, grad_row, out_row, rows_per_program,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Each program handles BLOCK_C columns of `rows_per_program` rows and writes one row of `partial_sums`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    first = tl.program_id(1) * rows_per_program
    for begin in range(first, tl.minimum(first + rows_per_program, rows), BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        in_bounds = (r[:, None] < tl.minimum(first + rows_per_program, rows)) & (c[None, :] < columns)
        row = r.to(tl.int64)[:, None]
        dy = tl.load(grad + row * grad_row + c[None, :], mask=in_bounds, other=0.0)
        is_active = tl.load(out + row * out_row + c[None, :], mask=in_bounds, other=0.0) > 0
        dy = tl.where(is_active, dy, 0.0)
        tl.store(masked_grad + row * columns + c[None, :], dy, mask=in_bounds)
        total += dy.to(tl.float32)
    tl.store(partial_sums + tl.program_id(1) * columns + c, tl.sum(total, 0), mask=c < columns)
