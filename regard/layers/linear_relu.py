"""relu(W x + b) in one matrix product, and one pass less in each direction (CUDA, bf16 or f16, in Triton).

The product's last step adds the bias and cuts below zero, so that nobody reads the result again for that. On the way
back one kernel masks the gradient and sums it for the bias; a compiler makes two passes of it. For wide feed-forward
layers of narrow models these passes cost about as much as the attention does.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import triton_here
from regard.attention.triton_here import contiguous_rows, operator
from regard.layers.add_up import add_up

# Rows and columns that a program of the backward pass holds at a time, and how many programs share the columns' rows.
BLOCK_R, BLOCK_C, SHARES = 16, 256, 66


def takes(x: Tensor, layer: nn.Linear) -> bool:
    """Whether this layer with this input is one: packed rows, narrow or made narrow by autocast."""
    return (
        triton_here.FOUND
        and x.is_cuda
        and x.dim() == 2
        and layer.bias is not None
        and _dtype(x) in (torch.bfloat16, torch.float16)
    )


def run(x: Float[Tensor, "N E"], layer: nn.Linear) -> Float[Tensor, "N F"]:
    dtype = _dtype(x)
    return linear_relu(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


def _dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@operator("regard::linear_relu")
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.T, use_gelu=False)


@operator("regard::relu_backward")
def relu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient where `out` is above zero, and its sum over the rows."""
    from regard.gpu import linear_relu_triton

    grad = contiguous_rows(grad)
    rows, columns = out.shape
    masked = torch.empty_like(out)
    shares = max(1, min(SHARES, -(-rows // BLOCK_R)))
    sums = torch.empty(1, shares, columns, dtype=torch.float32, device=out.device)
    linear_relu_triton.relu_backward[(-(-columns // BLOCK_C), shares)](
        *(grad, out, masked, sums, rows, columns, grad.stride(0), out.stride(0), -(-rows // shares)),
        BLOCK_R=BLOCK_R,
        BLOCK_C=BLOCK_C,
    )
    [summed] = add_up(sums, out.dtype)
    return masked, summed


@linear_relu.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


@relu_backward.register_fake
def _(grad, out):
    return torch.empty_like(out), out.new_empty(out.shape[1])


def _keep(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _flow_back(ctx, grad: Tensor):
    x, weight, out = ctx.saved_tensors
    masked, summed = relu_backward(grad, out)
    wanted_x, wanted_weight, _ = ctx.needs_input_grad
    return masked @ weight if wanted_x else None, masked.T @ x if wanted_weight else None, summed


linear_relu.register_autograd(_flow_back, setup_context=_keep)
