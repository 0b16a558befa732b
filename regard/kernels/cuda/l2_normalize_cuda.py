"""L2 normalization of the rows of q and k, with a learned scale on q, in one launch (CUDA, Triton).

Plain twin: the last lines of `regard.attention.scores._normalize_rows`. torch needs seven or eight passes over memory
for it, and about twenty for the backward pass.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton_support import contiguous_rows, next_power_of_two, operator, triton_available

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 1024
# Elements per program.
TILE_ELEMENTS = 4096


def supports(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel runs on these inputs."""
    return (
        triton_available()
        and q.is_cuda
        and q.device == k.device
        and q.dtype in DTYPES
        and q.dtype == k.dtype
        and 2 <= q.dim() <= 4
        and 2 <= k.dim() <= 4
        and q.shape[-1] == k.shape[-1]
        and 0 < q.shape[-1] <= MAX_WIDTH
    )


def l2_normalize(
    q: Float[Tensor, "*b T D"], k: Float[Tensor, "*g S D"], log_scale: Tensor | None, eps: float
) -> tuple[Float[Tensor, "*b T D"], Float[Tensor, "*g S D"]]:
    """exp(log_scale) · q / max(|q|, eps) and k / max(|k|, eps), row by row.

    `log_scale` has one element, or one per head of q (…, H, T, D).

    >>> if torch.cuda.is_available():
    ...     q, k = l2_normalize(*torch.ones(2, 3, 4, device="cuda"), None, 1e-6)
    ...     assert q.eq(0.5).all() and k.eq(0.5).all()
    """
    return l2_normalize_forward(q, k, log_scale, eps)


@operator("regard::l2_normalize")
def l2_normalize_forward(q: Tensor, k: Tensor, log_scale: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    from regard.kernels.triton import l2_normalize_triton

    q, k = contiguous_rows(q), contiguous_rows(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    programs, blocks = _grid(q, k)
    l2_normalize_triton.l2_normalize_forward[(programs,)](
        *(*_arguments(q, q_out), *_arguments(k, k_out), log_scale, _scale_stride(log_scale), eps),
        HAS_SCALE=log_scale is not None,
        **blocks,
    )
    return q_out, k_out


@operator("regard::l2_normalize_backward")
def l2_normalize_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, log_scale: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, of k, and of log_scale per row of q (empty without a scale)."""
    from regard.kernels.triton import l2_normalize_triton

    q_grad, k_grad, q, k = (contiguous_rows(x) for x in (q_grad, k_grad, q, k))
    dq, dk, scale_grads = torch.empty_like(q), torch.empty_like(k), _empty_scale_grads(q, log_scale)
    programs, blocks = _grid(q, k)
    l2_normalize_triton.l2_normalize_backward[(programs,)](
        *(*_arguments(q, q_grad, dq), *_arguments(k, k_grad, dk)),
        *(log_scale, scale_grads, _scale_stride(log_scale), eps),
        HAS_SCALE=log_scale is not None,
        **blocks,
    )
    return dq, dk, scale_grads


@l2_normalize_forward.register_fake
def _(q, k, log_scale, eps):
    return torch.empty_like(contiguous_rows(q)), torch.empty_like(contiguous_rows(k))


@l2_normalize_backward.register_fake
def _(q_grad, k_grad, q, k, log_scale, eps):
    dq, dk = torch.empty_like(contiguous_rows(q)), torch.empty_like(contiguous_rows(k))
    return dq, dk, _empty_scale_grads(q, log_scale)


def _setup_context(ctx, inputs, output) -> None:
    q, k, log_scale, ctx.eps = inputs
    ctx.save_for_backward(q, k, log_scale)


def _backward(ctx, q_grad: Tensor, k_grad: Tensor):
    q, k, log_scale = ctx.saved_tensors
    dq, dk, scale_grads = l2_normalize_backward(q_grad, k_grad, q, k, log_scale, ctx.eps)
    if log_scale is None:
        return dq, dk, None, None
    scale_grad = scale_grads.sum((0, 2)) if log_scale.numel() > 1 else scale_grads.sum()
    return dq, dk, scale_grad.view_as(log_scale).to(log_scale.dtype), None


l2_normalize_forward.register_autograd(_backward, setup_context=_setup_context)


def _empty_scale_grads(q: Tensor, log_scale: Tensor | None) -> Float[Tensor, "B H T"]:
    """Memory for the gradient of log_scale, one number per row of q."""
    shape = (1, 1, *q.shape[:-1])[-3:]
    return q.new_empty(shape if log_scale is not None else (0, 0, 0), dtype=torch.float32)


def _scale_stride(log_scale: Tensor | None) -> int:
    """The stride of log_scale from head to head; 0 for a scale that all heads share."""
    return int(log_scale is not None and log_scale.numel() > 1)


def _grid(q: Tensor, k: Tensor) -> tuple[int, dict[str, int]]:
    """The number of programs, and the sizes of their tiles. A program handles rows of q or rows of k."""
    width = q.shape[-1]
    block = next_power_of_two(width, 16)
    rows = TILE_ELEMENTS // block
    elements = rows * width
    return -(-q.numel() // elements) + -(-k.numel() // elements), dict(D=width, BLOCK_R=rows, BLOCK_D=block)


def _arguments(x: Tensor, *others: Tensor) -> list[Tensor | int]:
    """Kernel arguments for q or k: tensors of its shape, total rows, heads, rows per head, strides of each tensor."""
    sequences, heads, size = (1, 1, *x.shape[:-1])[-3:]
    arguments = [x, *others, sequences * heads * size, heads, size]
    for tensor in (x, *others):
        arguments += (0, 0, *tensor.stride()[:-1])[-3:]
    return arguments
