"""L2 normalization of the rows of q and k, with a learned scale on q, in one launch (CUDA, Triton).

Reference: the last lines of `regard.attention.scores._normalize_rows`. torch needs seven or eight passes over memory
for it, and about twenty for the backward pass.

Complete rows are in registers, each read and written once. One launch handles q and k: the first programs process rows
of q, the others rows of k.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton.support import contiguous_rows, next_power_of_two, operator, tl, triton, triton_available

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
    q, k = contiguous_rows(q), contiguous_rows(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    programs, blocks = _grid(q, k)
    l2_normalize_forward_kernel[(programs,)](
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
    q_grad, k_grad, q, k = (contiguous_rows(x) for x in (q_grad, k_grad, q, k))
    dq, dk, scale_grads = torch.empty_like(q), torch.empty_like(k), _empty_scale_grads(q, log_scale)
    programs, blocks = _grid(q, k)
    l2_normalize_backward_kernel[(programs,)](
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


# These vary from batch to batch; kernels specialized for their divisibility would be no faster.
SIZES = ["q_rows", "q_size", "k_rows", "k_size"]


@triton.jit
def _element_offsets(r, heads, size, sequence_stride, head_stride, row_stride, d):
    """Offsets of the elements of rows r, which are numbered through all heads of all sequences."""
    head, row = r // size, (r % size).to(tl.int64)
    start = (head // heads).to(tl.int64) * sequence_stride + (head % heads).to(tl.int64) * head_stride
    return (start + row * row_stride)[:, None] + d[None, :]


@triton.jit
def _normalize_block(
    block, x, out, rows, heads, size, x_sequence, x_head, x_row, out_sequence, out_head, out_row,
    log_scale, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    in_bounds = (r < rows)[:, None] & (d < D)[None, :]
    values = tl.load(x + _element_offsets(r, heads, size, x_sequence, x_head, x_row, d), mask=in_bounds, other=0.0)
    values = values.to(tl.float32)
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(values * values, 1)), eps)
    if HAS_SCALE:
        factor *= tl.exp(tl.load(log_scale + r // size % heads * scale_stride, mask=r < rows, other=0.0).to(tl.float32))
    result = (values * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + _element_offsets(r, heads, size, out_sequence, out_head, out_row, d), result, mask=in_bounds)


@triton.jit(do_not_specialize=SIZES)
def l2_normalize_forward_kernel(
    q, q_out, q_rows, q_heads, q_size, q_sequence, q_head, q_row, q_out_sequence, q_out_head, q_out_row,
    k, k_out, k_rows, k_heads, k_size, k_sequence, k_head, k_row, k_out_sequence, k_out_head, k_out_row,
    log_scale, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, first_k_block = tl.program_id(0), tl.cdiv(q_rows, BLOCK_R)
    if block < first_k_block:
        _normalize_block(
            block, q, q_out, q_rows, q_heads, q_size, q_sequence, q_head, q_row, q_out_sequence, q_out_head, q_out_row,
            log_scale, scale_stride, eps, HAS_SCALE, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _normalize_block(
            block - first_k_block, k, k_out, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
            k_out_sequence, k_out_head, k_out_row, log_scale, scale_stride, eps, False, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _block_gradients(
    block, x, grad, dx, rows, heads, size, x_sequence, x_head, x_row, grad_sequence, grad_head, grad_row,
    dx_sequence, dx_head, dx_row, log_scale, scale_grads, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """With u = x / |x|, y = a·u, a = exp(l): ∂x = a / |x| (∂y − u (u·∂y)), ∂l = a u·∂y; |x| ≤ eps: ∂x = a ∂y / eps."""
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    in_bounds = (r < rows)[:, None] & (d < D)[None, :]
    values = tl.load(x + _element_offsets(r, heads, size, x_sequence, x_head, x_row, d), mask=in_bounds, other=0.0)
    grad += _element_offsets(r, heads, size, grad_sequence, grad_head, grad_row, d)
    dy = tl.load(grad, mask=in_bounds, other=0.0)
    values, dy = values.to(tl.float32), dy.to(tl.float32)
    norm = tl.sqrt(tl.sum(values * values, 1))
    factor = 1.0 / tl.maximum(norm, eps)
    unit = values * factor[:, None]
    dot = tl.sum(unit * dy, 1)
    if HAS_SCALE:
        scale = tl.exp(tl.load(log_scale + r // size % heads * scale_stride, mask=r < rows, other=0.0).to(tl.float32))
        tl.store(scale_grads + r, scale * dot, mask=r < rows)
        factor *= scale
    projection = tl.where(norm > eps, dot, 0.0)
    result = (factor[:, None] * (dy - unit * projection[:, None])).to(dx.dtype.element_ty)
    tl.store(dx + _element_offsets(r, heads, size, dx_sequence, dx_head, dx_row, d), result, mask=in_bounds)


@triton.jit(do_not_specialize=SIZES)
def l2_normalize_backward_kernel(
    q, q_grad, dq, q_rows, q_heads, q_size, q_sequence, q_head, q_row,
    q_grad_sequence, q_grad_head, q_grad_row, dq_sequence, dq_head, dq_row,
    k, k_grad, dk, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
    k_grad_sequence, k_grad_head, k_grad_row, dk_sequence, dk_head, dk_row,
    log_scale, scale_grads, scale_stride, eps,
    HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, first_k_block = tl.program_id(0), tl.cdiv(q_rows, BLOCK_R)
    if block < first_k_block:
        _block_gradients(
            block, q, q_grad, dq, q_rows, q_heads, q_size, q_sequence, q_head, q_row,
            q_grad_sequence, q_grad_head, q_grad_row, dq_sequence, dq_head, dq_row,
            log_scale, scale_grads, scale_stride, eps, HAS_SCALE, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _block_gradients(
            block - first_k_block, k, k_grad, dk, k_rows, k_heads, k_size, k_sequence, k_head, k_row,
            k_grad_sequence, k_grad_head, k_grad_row, dk_sequence, dk_head, dk_row,
            log_scale, scale_grads, scale_stride, eps, False, D, BLOCK_R, BLOCK_D,
        )  # fmt: skip
