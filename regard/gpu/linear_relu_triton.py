"""What runs on the GPU for `linear_relu` on the way back: one pass that masks the gradient and sums its columns."""

import triton
import triton.language as tl


@triton.jit
def relu_backward(
    grad, out, masked, sums, rows, columns, grad_row, out_row, rows_each,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Each program has some columns of `rows_each` rows; its sums are a row of their own of `sums`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    first = tl.program_id(1) * rows_each
    for begin in range(first, tl.minimum(first + rows_each, rows), BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        inside = (r[:, None] < tl.minimum(first + rows_each, rows)) & (c[None, :] < columns)
        wide = r.to(tl.int64)[:, None]
        flow = tl.load(grad + wide * grad_row + c[None, :], mask=inside, other=0.0)
        lit = tl.load(out + wide * out_row + c[None, :], mask=inside, other=0.0) > 0
        flow = tl.where(lit, flow, 0.0)
        tl.store(masked + wide * columns + c[None, :], flow, mask=inside)
        total += flow.to(tl.float32)
    tl.store(sums + tl.program_id(1) * columns + c, tl.sum(total, 0), mask=c < columns)
