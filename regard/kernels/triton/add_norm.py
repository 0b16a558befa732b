"""Residual sum, dropout and norm in one pass: x + dropout(y) and its norm (CUDA, Triton; y in bf16 or f16).

Reference: `regard.layers.blocks.PreNormBlock`. torch.compile fuses the forward pass too, but it spends more
time on random numbers than on memory, stores the dropout mask, and reads everything again for the gradients of gain
and bias.

Complete rows are in registers, each read and written once. The dropout mask is never stored: both passes draw it from
the same seed, four numbers from each call of Philox, which would otherwise cost more than the memory traffic.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton.support import contiguous_rows, next_power_of_two, operator, tl, triton, triton_available

MAX_WIDTH = 4096
# Elements per program and tensor, warps per program, programs of the backward pass.
TILE_ELEMENTS, WARPS, PROGRAMS = 2048, 4, 528


def supports(x: Tensor, y: Tensor) -> bool:
    """Whether the kernel runs on these inputs."""
    return (
        triton_available()
        and x.is_cuda
        and x.dim() >= 2
        and y.dtype in (torch.bfloat16, torch.float16)
        and x.dtype in (torch.float32, y.dtype)
        and x.shape == y.shape
        and x.shape[-1] <= MAX_WIDTH
    )


def add_norm(
    x: Float[Tensor, "*n E"],
    y: Float[Tensor, "*n E"],
    gain: Float[Tensor, "E"],
    bias: Float[Tensor, "E"] | None,
    eps: float,
    p: float,
) -> tuple[Float[Tensor, "*n E"], Float[Tensor, "*n E"]]:
    """The sum x + dropout(y) in the dtype of x, and its norm in the dtype of y; p is the dropout probability.

    The norm is LayerNorm, or RMSNorm if `bias` is None.
    """
    # Drawn on the device from torch's generator, so that each replay of a CUDA graph draws a new one.
    seed = torch.randint(2**31, (1,), device=x.device) if p else None
    flat = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, y))
    out, total = add_norm_forward(*flat, gain, bias, seed, p, eps)
    return total.view(x.shape), out.view(x.shape)


@operator("regard::add_norm")
def add_norm_forward(
    x: Tensor, y: Tensor, gain: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The normalized sum (LayerNorm, or without a bias RMSNorm), and the sum."""
    x, y = contiguous_rows(x), contiguous_rows(y)
    out, total = _empty(y), _empty(x)
    N, E = x.shape
    blocks = _blocks(E)
    add_norm_forward_kernel[(-(-N // blocks["BLOCK_R"]),)](
        *(x, y, gain, bias, seed, out, total, N, x.stride(0), y.stride(0), eps, *_dropout_arguments(p)),
        E=E,
        IS_CENTERED=bias is not None,
        HAS_DROPOUT=seed is not None,
        **blocks,
    )
    return out, total


@operator("regard::add_norm_backward")
def add_norm_backward(
    grad: Tensor,
    sum_grad: Tensor | None,
    total: Tensor,
    gain: Tensor,
    is_centered: bool,
    seed: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y (empty where it equals that of x), gain and bias (empty without a bias).

    `sum_grad` is the gradient of the sum, where it has other uses than the norm.
    """
    grad = contiguous_rows(grad)
    sum_grad = None if sum_grad is None else contiguous_rows(sum_grad)
    N, E = total.shape
    dx, dy = _empty(total), _empty_y_grad(grad, total, seed)
    blocks = _blocks(E)
    programs = max(1, min(PROGRAMS, -(-N // blocks["BLOCK_R"])))
    partial_sums = torch.empty(1 + is_centered, programs, E, dtype=torch.float32, device=total.device)
    add_norm_backward_kernel[(programs,)](
        *(grad, sum_grad, total, gain, seed, dx, dy, partial_sums[0], partial_sums[-1], N),
        *(grad.stride(0), 0 if sum_grad is None else sum_grad.stride(0), eps, *_dropout_arguments(p)),
        E=E,
        IS_CENTERED=is_centered,
        HAS_SUM_GRAD=sum_grad is not None,
        HAS_DROPOUT=seed is not None,
        HAS_Y_GRAD=dy.numel() > 0,
        **blocks,
    )
    norm_grads = partial_sums.sum(1).to(gain.dtype)
    return dx, dy, norm_grads[0], norm_grads[1].clone() if is_centered else gain.new_empty(0)


@add_norm_forward.register_fake
def _(x, y, gain, bias, seed, p, eps):
    return _empty(y), _empty(x)


@add_norm_backward.register_fake
def _(grad, sum_grad, total, gain, is_centered, seed, p, eps):
    bias_grad = torch.empty_like(gain) if is_centered else gain.new_empty(0)
    return _empty(total), _empty_y_grad(grad, total, seed), torch.empty_like(gain), bias_grad


def _empty_y_grad(grad: Tensor, total: Tensor, seed: Tensor | None) -> Tensor:
    """Memory for the gradient of y, in the dtype of the normalized sum; none where it equals the gradient of x."""
    return grad.new_empty(grad.shape if seed is not None or grad.dtype != total.dtype else (0,))


def _setup_context(ctx, inputs, output) -> None:
    _, _, gain, bias, seed, ctx.p, ctx.eps = inputs
    ctx.is_centered = bias is not None
    ctx.save_for_backward(output[1], gain, seed)
    ctx.set_materialize_grads(False)  # post-norm: the sum has no gradient


def _backward(ctx, grad: Tensor, sum_grad: Tensor | None):
    total, gain, seed = ctx.saved_tensors
    dx, dy, gain_grad, bias_grad = add_norm_backward(grad, sum_grad, total, gain, ctx.is_centered, seed, ctx.p, ctx.eps)
    return dx, dy if dy.numel() else dx, gain_grad, bias_grad if ctx.is_centered else None, None, None, None


add_norm_forward.register_autograd(_backward, setup_context=_setup_context)


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _dropout_arguments(p: float) -> tuple[int, float]:
    """The threshold below which 32 random bits drop an element, and the factor of those that are kept."""
    return round(p * 2**32), 1 / (1 - p)


def _blocks(width: int) -> dict[str, int]:
    block = next_power_of_two(width, 16)
    return {"BLOCK_R": max(1, TILE_ELEMENTS // block), "BLOCK_E": block, "num_warps": WARPS}


@triton.jit
def _dropout_mask(seed, r, E: tl.constexpr, drop_threshold, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """True for elements that are kept; each is dropped with probability drop_threshold / 2^32."""
    quads = r[:, None] * (BLOCK_E // 4) + tl.arange(0, BLOCK_E // 4)[None, :]
    a, b, c, d = tl.randint4x(tl.load(seed), quads, 7)
    bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK_R, BLOCK_E))
    return bits.to(tl.uint32, bitcast=True) >= drop_threshold


@triton.jit
def _normalize(z, in_bounds, E: tl.constexpr, eps, IS_CENTERED: tl.constexpr):
    """(z − mean) / deviation and 1 / deviation; without IS_CENTERED z / root mean square and 1 / that."""
    if IS_CENTERED:
        z = tl.where(in_bounds, z - tl.sum(z, 1)[:, None] / E, 0.0)
    scale = tl.rsqrt(tl.sum(z * z, 1) / E + eps)
    return z * scale[:, None], scale


@triton.jit
def add_norm_forward_kernel(
    x, y, gain, bias, seed, out, total, N, x_row, y_row, eps, drop_threshold, keep_scale,
    E: tl.constexpr, IS_CENTERED: tl.constexpr, HAS_DROPOUT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """IS_CENTERED: LayerNorm with a bias; otherwise RMSNorm without."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    in_bounds = (r[:, None] < N) & (e[None, :] < E)
    row = r.to(tl.int64)[:, None]
    update = tl.load(y + row * y_row + e[None, :], mask=in_bounds, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        update = tl.where(_dropout_mask(seed, r, E, drop_threshold, BLOCK_R, BLOCK_E), update * keep_scale, 0.0)
    z = tl.load(x + row * x_row + e[None, :], mask=in_bounds, other=0.0).to(tl.float32) + update
    # Normalize the rounded sum, which is the one that is saved for the backward pass.
    z = z.to(total.dtype.element_ty)
    tl.store(total + row * E + e[None, :], z, mask=in_bounds)
    normalized, _ = _normalize(z.to(tl.float32), in_bounds, E, eps, IS_CENTERED)
    normalized *= tl.load(gain + e, mask=e < E, other=0.0)[None, :]
    if IS_CENTERED:
        normalized += tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    tl.store(out + row * E + e[None, :], normalized.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit
def _load_rows(grad, grad_row, sum_grad, sum_row, total, r, N, e, E: tl.constexpr, HAS_SUM_GRAD: tl.constexpr):
    """Rows of three tensors: gradient of the normalized sum, gradient of the sum, and the sum.

    Without HAS_SUM_GRAD the second is a copy of the first.
    """
    in_bounds = (r[:, None] < N) & (e[None, :] < E)
    row = r.to(tl.int64)[:, None]
    d_out = tl.load(grad + row * grad_row + e[None, :], mask=in_bounds, other=0.0)
    d_sum = d_out
    if HAS_SUM_GRAD:
        d_sum = tl.load(sum_grad + row * sum_row + e[None, :], mask=in_bounds, other=0.0)
    return d_out, d_sum, tl.load(total + row * E + e[None, :], mask=in_bounds, other=0.0)


@triton.jit
def add_norm_backward_kernel(
    grad, sum_grad, total, gain, seed, dx, dy, gain_sums, bias_sums, N, grad_row, sum_row, eps, drop_threshold,
    keep_scale,
    E: tl.constexpr, IS_CENTERED: tl.constexpr, HAS_SUM_GRAD: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_Y_GRAD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Each program strides over blocks of rows and writes one row of partial sums for gain and bias.

    HAS_Y_GRAD: the gradients of x and y differ, because of dropout or of their dtypes.
    """
    i, e = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    g = tl.load(gain + e, mask=e < E, other=0.0)
    gain_sum = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    bias_sum = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    r = tl.program_id(0) * BLOCK_R + i
    next_d_out, next_d_sum, next_z = _load_rows(grad, grad_row, sum_grad, sum_row, total, r, N, e, E, HAS_SUM_GRAD)
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK_R), tl.num_programs(0)):
        r = block * BLOCK_R + i
        in_bounds = (r[:, None] < N) & (e[None, :] < E)
        row = r.to(tl.int64)[:, None]
        dz, d_sum, z = next_d_out.to(tl.float32), next_d_sum.to(tl.float32), next_z.to(tl.float32)
        # Prefetch the next rows while these are processed.
        next_d_out, next_d_sum, next_z = _load_rows(
            grad, grad_row, sum_grad, sum_row, total, r + tl.num_programs(0) * BLOCK_R, N, e, E, HAS_SUM_GRAD
        )
        normalized, scale = _normalize(z, in_bounds, E, eps, IS_CENTERED)
        gain_sum += dz * normalized
        if IS_CENTERED:
            bias_sum += dz
        dz = dz * g[None, :]
        projection = tl.sum(dz * normalized, 1) / E
        if IS_CENTERED:
            dz -= tl.sum(dz, 1)[:, None] / E
        dz = (dz - normalized * projection[:, None]) * scale[:, None]
        if HAS_SUM_GRAD:
            dz += d_sum
        tl.store(dx + row * E + e[None, :], dz.to(dx.dtype.element_ty), mask=in_bounds)
        if HAS_DROPOUT:
            dz = tl.where(_dropout_mask(seed, r, E, drop_threshold, BLOCK_R, BLOCK_E), dz * keep_scale, 0.0)
        if HAS_Y_GRAD:
            tl.store(dy + row * E + e[None, :], dz.to(dy.dtype.element_ty), mask=in_bounds)
    tl.store(gain_sums + tl.program_id(0) * E + e, tl.sum(gain_sum, 0), mask=e < E)
    if IS_CENTERED:
        tl.store(bias_sums + tl.program_id(0) * E + e, tl.sum(bias_sum, 0), mask=e < E)
