"""Rows brought to length 1 and, for q, multiplied by a number: what `Cosine` does, in one pass (CUDA, in Triton).

torch takes three or four passes for it and about ten for the way back.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import triton_here
from regard.attention.triton_here import contiguous_rows, power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 1024
# Numbers that a program holds.
CELLS = 4096


def takes(x: Tensor) -> bool:
    return triton_here.FOUND and x.is_cuda and x.dtype in DTYPES and 2 <= x.dim() <= 4 and 0 < x.shape[-1] <= MAX_WIDTH


@torch.library.custom_op("regard::unit_rows", mutates_args=())
def unit_rows(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """scale · x / max(|x|, eps) for each row of x (…, H, N, D); `scale` is one number, or one for each of H heads.

    >>> if torch.cuda.is_available():
    ...     assert unit_rows(torch.ones(2, 4, device="cuda"), None, 1e-6).eq(0.5).all()
    """
    from regard.attention import unit_rows_triton

    x, out = contiguous_rows(x), torch.empty_like(x)
    rows, sizes, blocks = _sizes(x)
    unit_rows_triton.unit_rows_forward[(-(-rows // blocks["BLOCK_R"]),)](
        *(x, out, scale, rows, *sizes, _step(scale), *_strides(x), *_strides(out), eps),
        SCALED=scale is not None,
        **blocks,
    )
    return out


@torch.library.custom_op("regard::unit_rows_backward", mutates_args=())
def unit_rows_backward(grad: Tensor, x: Tensor, scale: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The gradient by x and, for each row, that by its scale (nothing where there is none)."""
    from regard.attention import unit_rows_triton

    grad, x = contiguous_rows(grad), contiguous_rows(x)
    dx, dots = torch.empty_like(x), _dots(x, scale)
    rows, sizes, blocks = _sizes(x)
    unit_rows_triton.unit_rows_backward[(-(-rows // blocks["BLOCK_R"]),)](
        *(grad, x, scale, dx, dots, rows, *sizes, _step(scale), *_strides(grad), *_strides(x), *_strides(dx), eps),
        SCALED=scale is not None,
        **blocks,
    )
    return dx, dots


@unit_rows.register_fake
def _(x, scale, eps):
    return torch.empty_like(contiguous_rows(x))


@unit_rows_backward.register_fake
def _(grad, x, scale, eps):
    return torch.empty_like(contiguous_rows(x)), _dots(x, scale)


def _keep(ctx, inputs, output) -> None:
    x, scale, ctx.eps = inputs
    ctx.save_for_backward(x, scale)


def _flow_back(ctx, grad: Tensor):
    x, scale = ctx.saved_tensors
    dx, dots = unit_rows_backward(grad, x, scale, ctx.eps)
    if scale is None:
        return dx, None, None
    return dx, dots.sum(-1).unflatten(0, (-1, scale.numel())).sum(0).view_as(scale), None


unit_rows.register_autograd(_flow_back, setup_context=_keep)


def _dots(x: Tensor, scale: Tensor | None) -> Float[Tensor, "heads N"]:
    """Room for a number a row, heads of all sequences one after another."""
    return x.new_empty(0 if scale is None else x.shape[:-2].numel(), x.shape[-2], dtype=torch.float32)


def _step(scale: Tensor | None) -> int:
    """From a head's number to the next one's."""
    return int(scale is not None and scale.numel() > 1)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of sequences, heads and rows."""
    sequence, head, row = (0, 0, *x.stride()[:-1])[-3:]
    return sequence, head, row


def _sizes(x: Tensor) -> tuple[int, tuple[int, int], dict[str, int]]:
    """How many rows there are; heads, and rows of each; what a program takes."""
    heads, rows = (1, *x.shape[:-1])[-2:]
    block = power_of_two(x.shape[-1], 16)
    return x.shape[:-1].numel(), (heads, rows), dict(D=x.shape[-1], BLOCK_R=CELLS // block, BLOCK_D=block)
