"""Rows brought to length 1, and those of q multiplied: what `Cosine` does, in one launch (CUDA, in Triton).

torch takes seven or eight passes for it and about twenty for the way back.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import triton_here
from regard.attention.triton_here import contiguous_rows, operator, power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 1024
# Numbers that a program holds.
CELLS = 4096


def takes(q: Tensor, k: Tensor) -> bool:
    return (
        triton_here.FOUND
        and q.is_cuda
        and q.device == k.device
        and q.dtype in DTYPES
        and q.dtype == k.dtype
        and 2 <= q.dim() <= 4
        and 2 <= k.dim() <= 4
        and q.shape[-1] == k.shape[-1]
        and 0 < q.shape[-1] <= MAX_WIDTH
    )


def unit_rows(
    q: Float[Tensor, "*b T D"], k: Float[Tensor, "*g S D"], log_scale: Tensor | None, eps: float
) -> tuple[Float[Tensor, "*b T D"], Float[Tensor, "*g S D"]]:
    """exp(log_scale) · q / max(|q|, eps) and k / max(|k|, eps), row by row.

    The scale is one number, or one for each head of q (…, H, T, D).

    >>> if torch.cuda.is_available():
    ...     q, k = unit_rows(*torch.ones(2, 3, 4, device="cuda"), None, 1e-6)
    ...     assert q.eq(0.5).all() and k.eq(0.5).all()
    """
    return forward(q, k, log_scale, eps)


@operator("regard::unit_rows")
def forward(q: Tensor, k: Tensor, log_scale: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    from regard.attention import unit_rows_triton

    q, k = contiguous_rows(q), contiguous_rows(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    programs, blocks = _programs(q, k)
    unit_rows_triton.unit_rows_forward[(programs,)](
        *(*_side(q, q_out), *_side(k, k_out), log_scale, _step(log_scale), eps),
        SCALED=log_scale is not None,
        **blocks,
    )
    return q_out, k_out


@operator("regard::unit_rows_backward")
def backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, log_scale: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q and k and, for each row of q, that by its logarithm (nothing where there is none)."""
    from regard.attention import unit_rows_triton

    q_grad, k_grad, q, k = (contiguous_rows(x) for x in (q_grad, k_grad, q, k))
    dq, dk, dots = torch.empty_like(q), torch.empty_like(k), _dots(q, log_scale)
    programs, blocks = _programs(q, k)
    unit_rows_triton.unit_rows_backward[(programs,)](
        *(*_side(q, q_grad, dq), *_side(k, k_grad, dk), log_scale, dots, _step(log_scale), eps),
        SCALED=log_scale is not None,
        **blocks,
    )
    return dq, dk, dots


@forward.register_fake
def _(q, k, log_scale, eps):
    return torch.empty_like(contiguous_rows(q)), torch.empty_like(contiguous_rows(k))


@backward.register_fake
def _(q_grad, k_grad, q, k, log_scale, eps):
    return torch.empty_like(contiguous_rows(q)), torch.empty_like(contiguous_rows(k)), _dots(q, log_scale)


def _keep(ctx, inputs, output) -> None:
    q, k, log_scale, ctx.eps = inputs
    ctx.save_for_backward(q, k, log_scale)


def _flow_back(ctx, q_grad: Tensor, k_grad: Tensor):
    q, k, log_scale = ctx.saved_tensors
    dq, dk, dots = backward(q_grad, k_grad, q, k, log_scale, ctx.eps)
    if log_scale is None:
        return dq, dk, None, None
    # One sum, of all rows or of a head's.
    flow = dots.sum((0, 2)) if log_scale.numel() > 1 else dots.sum()
    return dq, dk, flow.view_as(log_scale).to(log_scale.dtype), None


forward.register_autograd(_flow_back, setup_context=_keep)


def _dots(q: Tensor, log_scale: Tensor | None) -> Float[Tensor, "B H T"]:
    """Room for a number a row."""
    shape = (1, 1, *q.shape[:-1])[-3:]
    return q.new_empty(shape if log_scale is not None else (0, 0, 0), dtype=torch.float32)


def _step(log_scale: Tensor | None) -> int:
    """From a head's number to the next one's."""
    return int(log_scale is not None and log_scale.numel() > 1)


def _programs(q: Tensor, k: Tensor) -> tuple[int, dict[str, int]]:
    """How many programs there are, and what each takes: rows of q or rows of k."""
    width = q.shape[-1]
    block = power_of_two(width, 16)
    rows = CELLS // block
    full = rows * width
    return -(-q.numel() // full) + -(-k.numel() // full), dict(D=width, BLOCK_R=rows, BLOCK_D=block)


def _side(x: Tensor, *others: Tensor) -> list[Tensor | int]:
    """What a kernel is told of q or k: tensors of its shape, all rows, heads, rows of each, each tensor's strides."""
    sequences, heads, size = (1, 1, *x.shape[:-1])[-3:]
    told = [x, *others, sequences * heads * size, heads, size]
    for one in (x, *others):
        told += (0, 0, *one.stride()[:-1])[-3:]
    return told
