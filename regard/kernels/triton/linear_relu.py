"""relu(x Wᵀ + b) with one fewer pass over memory in each direction (CUDA, bf16 or f16, Triton).

Reference: `relu(linear(x, weight, bias))`. The epilogue of the matrix product adds the bias and applies the relu. In
the backward pass one kernel masks the gradient and sums it for the bias; torch.compile needs two. In wide feed-forward
layers of narrow models these passes cost about as much as attention.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton.support import contiguous_rows, operator, tl, triton, triton_available

# Rows and columns per tile of the backward pass, and the maximum number of programs along the rows.
BLOCK_R, BLOCK_C, MAX_ROW_PROGRAMS = 16, 256, 66


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel runs on these inputs: packed rows in bf16 or f16, or under autocast to one of them."""
    return (
        triton_available()
        and x.is_cuda
        and x.dim() == 2
        and bias is not None
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and _compute_dtype(x) in (torch.bfloat16, torch.float16)
    )


def linear_relu(
    x: Float[Tensor, "N E"], weight: Float[Tensor, "F E"], bias: Float[Tensor, "F"]
) -> Float[Tensor, "N F"]:
    """relu(x Wᵀ + b), in the dtype of autocast where it is enabled."""
    dtype = _compute_dtype(x)
    return linear_relu_forward(x.to(dtype), weight.to(dtype), bias.to(dtype))


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@operator("regard::linear_relu")
def linear_relu_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.T, use_gelu=False)


@operator("regard::relu_backward")
def relu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient where `out` is positive, and its sum over the rows."""
    grad = contiguous_rows(grad)
    rows, columns = out.shape
    masked_grad = torch.empty_like(out)
    row_programs = max(1, min(MAX_ROW_PROGRAMS, -(-rows // BLOCK_R)))
    partial_sums = torch.empty(1, row_programs, columns, dtype=torch.float32, device=out.device)
    relu_backward_kernel[(-(-columns // BLOCK_C), row_programs)](
        *(grad, out, masked_grad, partial_sums, rows, columns, grad.stride(0), out.stride(0), -(-rows // row_programs)),
        BLOCK_R=BLOCK_R,
        BLOCK_C=BLOCK_C,
    )
    return masked_grad, partial_sums[0].sum(0).to(out.dtype)


@linear_relu_forward.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


@relu_backward.register_fake
def _(grad, out):
    return torch.empty_like(out), out.new_empty(out.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx, grad: Tensor):
    x, weight, out = ctx.saved_tensors
    masked_grad, bias_grad = relu_backward(grad, out)
    needs_x_grad, needs_weight_grad, _ = ctx.needs_input_grad
    return masked_grad @ weight if needs_x_grad else None, masked_grad.T @ x if needs_weight_grad else None, bias_grad


linear_relu_forward.register_autograd(_backward, setup_context=_setup_context)


@triton.jit
def relu_backward_kernel(
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
