"""x + dropout(y) and its norm, as residual connections with norms before or after them need it (CUDA, in Triton).

One pass for what products have left narrow. A compiler makes one pass of the way there too, but spends longer on random
numbers than on memory, stores the mask, and goes over everything again for the gradients of gain and bias.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import triton_here
from regard.attention.triton_here import contiguous_rows, operator, power_of_two
from regard.layers.add_up import add_up
from regard.layers.norms import RMSNorm

MAX_WIDTH = 4096
# Numbers that a program holds of each tensor, its warps, and programs of the backward pass.
CELLS, WARPS, PROGRAMS = 2048, 4, 528


def takes(x: Tensor, y: Tensor, norm: nn.Module) -> bool:
    return (
        triton_here.FOUND
        and x.is_cuda
        and x.dim() >= 2
        and y.dtype in (torch.bfloat16, torch.float16)
        and x.dtype in (torch.float32, y.dtype)
        and x.shape == y.shape
        and (isinstance(norm, RMSNorm) or (isinstance(norm, nn.LayerNorm) and norm.bias is not None))
        and x.shape[-1] <= MAX_WIDTH
    )


def run(
    x: Float[Tensor, "*n E"], y: Float[Tensor, "*n E"], norm: nn.Module, p: float
) -> tuple[Float[Tensor, "*n E"], Float[Tensor, "*n E"]]:
    """The sum x + dropout(y), as wide as x, and its norm, as wide as y; dropout's probability is p."""
    assert isinstance(norm, nn.LayerNorm | RMSNorm)
    # Drawn on the device from torch's own generator: a captured step draws anew.
    seed = torch.randint(2**31, (1,), device=x.device) if p else None
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    flat = (one.reshape(-1, one.shape[-1]) for one in (x, y))
    out, total = add_norm(*flat, norm.weight, bias, seed, p, norm.eps or torch.finfo(norm.weight.dtype).eps)
    return total.view(x.shape), out.view(x.shape)


@operator("regard::add_norm")
def add_norm(
    x: Tensor, y: Tensor, gain: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The normed sum (LayerNorm; without bias RMSNorm), and the sum."""
    from regard.gpu import add_norm_triton

    x, y = contiguous_rows(x), contiguous_rows(y)
    out, total = _fresh(y), _fresh(x)
    N, E = x.shape
    blocks = _blocks(E)
    add_norm_triton.add_norm_forward[(-(-N // blocks["BLOCK_R"]),)](
        *(x, y, gain, bias, seed, out, total, N, x.stride(0), y.stride(0), eps, *_dropping(p)),
        E=E,
        CENTRED=bias is not None,
        DROPS=seed is not None,
        **blocks,
    )
    return out, total


@operator("regard::add_norm_backward")
def add_norm_backward(
    grad: Tensor,
    sum_grad: Tensor | None,
    total: Tensor,
    gain: Tensor,
    centred: bool,
    seed: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y (empty where it is that by x), gain and bias (empty where there is none).

    `sum_grad` flows into the sum itself, if anybody but the norm has taken it.
    """
    from regard.gpu import add_norm_triton

    grad = contiguous_rows(grad)
    sum_grad = None if sum_grad is None else contiguous_rows(sum_grad)
    N, E = total.shape
    dx, dy = _fresh(total), _other_grad(grad, total, seed)
    blocks = _blocks(E)
    programs = max(1, min(PROGRAMS, -(-N // blocks["BLOCK_R"])))
    sums = torch.empty(1 + centred, programs, E, dtype=torch.float32, device=total.device)
    add_norm_triton.add_norm_backward[(programs,)](
        *(grad, sum_grad, total, gain, seed, dx, dy, sums[0], sums[-1], N),
        *(grad.stride(0), 0 if sum_grad is None else sum_grad.stride(0), eps, *_dropping(p)),
        E=E,
        CENTRED=centred,
        SUMMED=sum_grad is not None,
        DROPS=seed is not None,
        SPLIT=dy.numel() > 0,
        **blocks,
    )
    found = add_up(sums, gain.dtype)
    return dx, dy, found[0], found[1] if centred else gain.new_empty(0)


@add_norm.register_fake
def _(x, y, gain, bias, seed, p, eps):
    return _fresh(y), _fresh(x)


@add_norm_backward.register_fake
def _(grad, sum_grad, total, gain, centred, seed, p, eps):
    bias_grad = torch.empty_like(gain) if centred else gain.new_empty(0)
    return _fresh(total), _other_grad(grad, total, seed), torch.empty_like(gain), bias_grad


def _other_grad(grad: Tensor, total: Tensor, seed: Tensor | None) -> Tensor:
    """Room for the gradient by y, which is as wide as the normed sum; none where it is that by x."""
    return grad.new_empty(grad.shape if seed is not None or grad.dtype != total.dtype else (0,))


def _keep(ctx, inputs, output) -> None:
    _, _, gain, bias, seed, ctx.p, ctx.eps = inputs
    ctx.centred = bias is not None
    ctx.save_for_backward(output[1], gain, seed)
    ctx.set_materialize_grads(False)  # with norms after the sum nobody asks for the gradient by the sum itself


def _flow_back(ctx, grad: Tensor, sum_grad: Tensor | None):
    total, gain, seed = ctx.saved_tensors
    given = grad, sum_grad, total, gain, ctx.centred, seed, ctx.p, ctx.eps
    dx, dy, gain_grad, bias_grad = add_norm_backward(*given)
    return dx, dy if dy.numel() else dx, gain_grad, bias_grad if ctx.centred else None, None, None, None


add_norm.register_autograd(_flow_back, setup_context=_keep)


def _fresh(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _dropping(p: float) -> tuple[int, float]:
    """The bound below which 32 random bits mean that a number is dropped, and the factor of those that stay."""
    return round(p * 2**32), 1 / (1 - p)


def _blocks(width: int) -> dict[str, int]:
    block = power_of_two(width, 16)
    return {"BLOCK_R": max(1, CELLS // block), "BLOCK_E": block, "num_warps": WARPS}
