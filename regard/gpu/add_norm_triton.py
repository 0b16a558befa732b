"""What runs on the GPU for `add_norm`: whole rows in registers, each read and written once.

Dropout's mask is never stored: both directions draw it from the same seed, four numbers from each call of Philox, which
would otherwise cost more than the memory that the pass reads.
"""

import triton
import triton.language as tl


@triton.jit
def _kept(seed, r, E: tl.constexpr, dropped, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Which numbers of some rows stay: each is dropped with probability dropped / 2^32."""
    quads = r[:, None] * (BLOCK_E // 4) + tl.arange(0, BLOCK_E // 4)[None, :]
    a, b, c, d = tl.randint4x(tl.load(seed), quads, 7)
    bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK_R, BLOCK_E))
    return bits.to(tl.uint32, bitcast=True) >= dropped


@triton.jit
def _normed(z, inside, E: tl.constexpr, eps, CENTRED: tl.constexpr):
    """(z − mean) / deviation and 1 / deviation; not CENTRED, z / root mean square and 1 / that."""
    if CENTRED:
        z = tl.where(inside, z - tl.sum(z, 1)[:, None] / E, 0.0)
    scale = tl.rsqrt(tl.sum(z * z, 1) / E + eps)
    return z * scale[:, None], scale


@triton.jit
def add_norm_forward(
    x, y, gain, bias, seed, out, total, N, x_row, y_row, eps, dropped, factor,
    E: tl.constexpr, CENTRED: tl.constexpr, DROPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A norm that is CENTRED has a bias, another has none."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    inside = (r[:, None] < N) & (e[None, :] < E)
    wide = r.to(tl.int64)[:, None]
    added = tl.load(y + wide * y_row + e[None, :], mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        added = tl.where(_kept(seed, r, E, dropped, BLOCK_R, BLOCK_E), added * factor, 0.0)
    z = tl.load(x + wide * x_row + e[None, :], mask=inside, other=0.0).to(tl.float32) + added
    # What is kept for the way back is what is normed.
    z = z.to(total.dtype.element_ty)
    tl.store(total + wide * E + e[None, :], z, mask=inside)
    normed, _ = _normed(z.to(tl.float32), inside, E, eps, CENTRED)
    normed *= tl.load(gain + e, mask=e < E, other=0.0)[None, :]
    if CENTRED:
        normed += tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    tl.store(out + wide * E + e[None, :], normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows(grad, grad_row, sum_grad, sum_row, total, r, N, e, E: tl.constexpr, SUMMED: tl.constexpr):
    """Some rows of the gradient by the normed sum, of that by the sum itself (SUMMED; else the same) and of the sum."""
    inside = (r[:, None] < N) & (e[None, :] < E)
    wide = r.to(tl.int64)[:, None]
    flow = tl.load(grad + wide * grad_row + e[None, :], mask=inside, other=0.0)
    beside = flow
    if SUMMED:
        beside = tl.load(sum_grad + wide * sum_row + e[None, :], mask=inside, other=0.0)
    return flow, beside, tl.load(total + wide * E + e[None, :], mask=inside, other=0.0)


@triton.jit
def add_norm_backward(
    grad, sum_grad, total, gain, seed, dx, dy, gain_sums, bias_sums, N, grad_row, sum_row, eps, dropped, factor,
    E: tl.constexpr, CENTRED: tl.constexpr, SUMMED: tl.constexpr, DROPS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Each program takes every so many-th block of rows; its sums for gain and bias are a row of their own.

    SPLIT: the gradients by x and y differ, be it by what was dropped or by their dtype.
    """
    i, e = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    g = tl.load(gain + e, mask=e < E, other=0.0)
    gain_sum = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    bias_sum = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    r = tl.program_id(0) * BLOCK_R + i
    coming, beside_coming, z_coming = _rows(grad, grad_row, sum_grad, sum_row, total, r, N, e, E, SUMMED)
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK_R), tl.num_programs(0)):
        r = block * BLOCK_R + i
        inside = (r[:, None] < N) & (e[None, :] < E)
        wide = r.to(tl.int64)[:, None]
        flow, beside, z = coming.to(tl.float32), beside_coming.to(tl.float32), z_coming.to(tl.float32)
        # The next rows are on their way while these are worked on.
        coming, beside_coming, z_coming = _rows(
            grad, grad_row, sum_grad, sum_row, total, r + tl.num_programs(0) * BLOCK_R, N, e, E, SUMMED
        )
        normed, scale = _normed(z, inside, E, eps, CENTRED)
        gain_sum += flow * normed
        if CENTRED:
            bias_sum += flow
        flow = flow * g[None, :]
        along = tl.sum(flow * normed, 1) / E
        if CENTRED:
            flow -= tl.sum(flow, 1)[:, None] / E
        flow = (flow - normed * along[:, None]) * scale[:, None]
        if SUMMED:
            flow += beside
        tl.store(dx + wide * E + e[None, :], flow.to(dx.dtype.element_ty), mask=inside)
        if DROPS:
            flow = tl.where(_kept(seed, r, E, dropped, BLOCK_R, BLOCK_E), flow * factor, 0.0)
        if SPLIT:
            tl.store(dy + wide * E + e[None, :], flow.to(dy.dtype.element_ty), mask=inside)
    tl.store(gain_sums + tl.program_id(0) * E + e, tl.sum(gain_sum, 0), mask=e < E)
    if CENTRED:
        tl.store(bias_sums + tl.program_id(0) * E + e, tl.sum(bias_sum, 0), mask=e < E)
