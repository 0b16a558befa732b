"""What runs on the GPU for `unit_rows`: whole rows in registers, each read and written once."""

import triton
import triton.language as tl


@triton.jit
def _places(r, heads, size, sequence_stride, head_stride, row_stride, d):
    """Where the numbers of rows lie, these being counted through all heads of all sequences."""
    of_head, row = r // size, (r % size).to(tl.int64)
    start = (of_head // heads).to(tl.int64) * sequence_stride + (of_head % heads).to(tl.int64) * head_stride
    return (start + row * row_stride)[:, None] + d[None, :]


@triton.jit
def unit_rows_forward(
    x, out, scale, rows, heads, size, step, x_sequence, x_head, x_row, out_sequence, out_head, out_row, eps,
    SCALED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    numbers = tl.load(x + _places(r, heads, size, x_sequence, x_head, x_row, d), mask=inside, other=0.0)
    numbers = numbers.to(tl.float32)
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(numbers * numbers, 1)), eps)
    if SCALED:
        factor *= tl.load(scale + r // size % heads * step, mask=r < rows, other=0.0).to(tl.float32)
    found = (numbers * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + _places(r, heads, size, out_sequence, out_head, out_row, d), found, mask=inside)


@triton.jit
def unit_rows_backward(
    grad, x, scale, dx, dots, rows, heads, size, step, grad_sequence, grad_head, grad_row, x_sequence, x_head, x_row,
    dx_sequence, dx_head, dx_row, eps,
    SCALED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """With u = x / |x| and y = scale·u: ∂x = scale / |x| (∂y − u (u·∂y)), ∂scale = u·∂y. Short rows do not turn."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
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
        tl.store(dots + r, dot, mask=r < rows)
        factor *= tl.load(scale + r // size % heads * step, mask=r < rows, other=0.0).to(tl.float32)
    along = tl.where(length > eps, dot, 0.0)
    found = (factor[:, None] * (flow - unit * along[:, None])).to(dx.dtype.element_ty)
    tl.store(dx + _places(r, heads, size, dx_sequence, dx_head, dx_row, d), found, mask=inside)
