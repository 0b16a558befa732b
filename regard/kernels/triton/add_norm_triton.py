"""Triton source of `add_norm_cuda`: complete rows in registers, each read and written once.

The dropout mask is never stored: both passes draw it from the same seed, four numbers from each call of Philox, which
would otherwise cost more than the memory traffic.
"""

import triton
import triton.language as tl


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
def add_norm_forward(
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
def add_norm_backward(
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
