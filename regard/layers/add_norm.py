"""norm(x + dropout(y)), as a residual connection with its norm after it needs it, in one pass (CUDA, in Triton).

For sums that are kept in bf16 or f16. A compiler makes one pass of the way there too, but spends longer on random
numbers than on memory, stores the mask, and goes over everything again for the gradients of gain and bias.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import triton_here
from regard.attention.triton_here import contiguous_rows, power_of_two
from regard.layers.add_up import add_up

MAX_WIDTH = 4096
# Numbers that a program holds of each tensor, its warps, and programs of the backward pass.
CELLS, WARPS, PROGRAMS = 2048, 4, 528


def takes(x: Tensor, y: Tensor, norm: nn.Module) -> bool:
    return (
        triton_here.FOUND
        and x.is_cuda
        and x.dim() == 2
        and x.dtype in (torch.bfloat16, torch.float16)
        and y.dtype == x.dtype
        and isinstance(norm, nn.LayerNorm)
        and x.shape[-1] <= MAX_WIDTH
    )


def run(x: Float[Tensor, "N E"], y: Float[Tensor, "N E"], norm: nn.Module, p: float) -> Float[Tensor, "N E"]:
    """norm(x + dropout(y)) with dropout's probability p."""
    assert isinstance(norm, nn.LayerNorm)
    # Drawn on the device from torch's own generator: a captured step draws anew.
    seed = torch.randint(2**31, (1,), device=x.device) if p else None
    return add_norm(x, y, norm.weight, norm.bias, seed, p, norm.eps)[0]


@torch.library.custom_op("regard::add_norm", mutates_args=())
def add_norm(
    x: Tensor, y: Tensor, gain: Tensor, bias: Tensor, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The normed sum, and the sum."""
    from regard.gpu import add_norm_triton

    x, y = contiguous_rows(x), contiguous_rows(y)
    out, total = _fresh(x), _fresh(x)
    N, E = x.shape
    blocks = _blocks(E)
    add_norm_triton.add_norm_forward[(-(-N // blocks["BLOCK_R"]),)](
        *(x, y, gain, bias, seed, out, total, N, x.stride(0), y.stride(0), eps, *_dropping(p)),
        E=E,
        DROPS=seed is not None,
        **blocks,
    )
    return out, total


@torch.library.custom_op("regard::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad: Tensor, total: Tensor, gain: Tensor, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y (empty where nothing is dropped: it is that by x), gain and bias."""
    from regard.gpu import add_norm_triton

    grad = contiguous_rows(grad)
    N, E = total.shape
    dx, dy = _fresh(total), total.new_empty(total.shape if seed is not None else (0,))
    blocks = _blocks(E)
    programs = max(1, min(PROGRAMS, -(-N // blocks["BLOCK_R"])))
    sums = torch.empty(2, programs, E, dtype=torch.float32, device=total.device)
    add_norm_triton.add_norm_backward[(programs,)](
        *(grad, total, gain, seed, dx, dy, *sums, N, grad.stride(0), eps, *_dropping(p)),
        E=E,
        DROPS=seed is not None,
        **blocks,
    )
    gain_grad, bias_grad = add_up(sums, gain.dtype)
    return dx, dy, gain_grad, bias_grad


@add_norm.register_fake
def _(x, y, gain, bias, seed, p, eps):
    return _fresh(x), _fresh(x)


@add_norm_backward.register_fake
def _(grad, total, gain, seed, p, eps):
    dy = total.new_empty(total.shape if seed is not None else (0,))
    return _fresh(total), dy, torch.empty_like(gain), torch.empty_like(gain)


def _keep(ctx, inputs, output) -> None:
    _, _, gain, _, seed, ctx.p, ctx.eps = inputs
    ctx.save_for_backward(output[1], gain, seed)
    ctx.set_materialize_grads(False)  # nobody asks for the gradient by the sum itself


def _flow_back(ctx, grad: Tensor, _grad_of_sum: Tensor | None):
    total, gain, seed = ctx.saved_tensors
    dx, dy, gain_grad, bias_grad = add_norm_backward(grad, total, gain, seed, ctx.p, ctx.eps)
    return dx, dx if seed is None else dy, gain_grad, bias_grad, None, None, None


add_norm.register_autograd(_flow_back, setup_context=_keep)


def _fresh(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _dropping(p: float) -> tuple[int, float]:
    """The bound below which 32 random bits mean that a number is dropped, and the factor of those that stay."""
    return round(p * 2**32), 1 / (1 - p)


def _blocks(width: int) -> dict[str, int]:
    block = power_of_two(width, 16)
    return {"BLOCK_R": max(1, CELLS // block), "BLOCK_E": block, "num_warps": WARPS}
