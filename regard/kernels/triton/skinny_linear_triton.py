"""Triton source of `skinny_linear_cuda`: a program computes a few outputs for all rows and reads their weights once.

Statistics of norms are computed again by every program, which costs less than a launch. USE_DOT: with matrix units,
whose tiles have at least 16 outputs; fewer outputs per program read the weights of small layers faster.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _statistics(x, row_stride, r, R, KIND: tl.constexpr, eps, E: tl.constexpr, BLOCK_R: tl.constexpr):
    """Mean (0 for RMSNorm) and 1 / deviation of each row."""
    BLOCK: tl.constexpr = triton.next_power_of_2(E)
    e = tl.arange(0, BLOCK)
    in_bounds = (r < R)[:, None] & (e < E)[None, :]
    rows = tl.load(x + r[:, None] * row_stride + e[None, :], mask=in_bounds, other=0.0).to(tl.float32)
    mean = tl.zeros((BLOCK_R,), tl.float32)
    if KIND == "layer":
        mean = tl.sum(rows, 1) / E
        rows = tl.where(in_bounds, rows - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(rows * rows, 1) / E + eps)


@triton.jit
def _normalize(x, mean, scale, gain, bias, e, is_column, HAS_BIAS: tl.constexpr):
    """Normalized columns e of rows with these statistics."""
    x = (x - mean[:, None]) * scale[:, None] * tl.load(gain + e, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        x += tl.load(bias + e, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _load_rows(
    x, row_stride, r, R, begin, mean, scale, gain, bias,
    E: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Columns of input rows from `begin` on, normalized, in float32."""
    e = begin + tl.arange(0, BLOCK_E)
    in_bounds = (r < R)[:, None] & (e < E)[None, :]
    rows = tl.load(x + r[:, None] * row_stride + e[None, :], mask=in_bounds, other=0.0).to(tl.float32)
    if NORM != "none":
        rows = _normalize(rows, mean, scale, gain, bias, e, e < E, HAS_BIAS)
    return rows


@triton.jit
def _load_weights(
    weight, row_stride, begin_o, begin_e, E_IN: tl.constexpr, E_OUT: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    o, e = begin_o + tl.arange(0, BLOCK_O), begin_e + tl.arange(0, BLOCK_E)
    in_bounds = (o < E_OUT)[:, None] & (e < E_IN)[None, :]
    return tl.load(weight + o.to(tl.int64)[:, None] * row_stride + e[None, :], mask=in_bounds, other=0.0)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def skinny_linear(
    x, weight, weight_scale, bias, norm_gain, norm_bias, residual, residual_gain, residual_bias, out,
    x_row, weight_row, residual_row, eps, residual_eps, R,
    E_IN: tl.constexpr, E_OUT: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr, RESIDUAL_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_RESIDUAL_BIAS: tl.constexpr, PDL: tl.constexpr, USE_DOT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    step = tl.num_programs(0) * BLOCK_O
    first = tl.program_id(0) * BLOCK_O
    # Load the first weights, which no kernel writes, before anything that waits for memory or for the previous kernel.
    next_w = _load_weights(weight, weight_row, first, 0, E_IN, E_OUT, BLOCK_O, BLOCK_E)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mean, scale = tl.zeros((BLOCK_R,), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    if NORM != "none":
        mean, scale = _statistics(x, x_row, r, R, NORM, eps, E_IN, BLOCK_R)
    # Float8 weights are converted to the dtype of the rows, exactly, and scaled after the products.
    row_dtype = (x if HAS_SCALE else weight).dtype.element_ty if USE_DOT else tl.float32
    rows = _load_rows(x, x_row, r, R, 0, mean, scale, norm_gain, norm_bias, E_IN, NORM, HAS_NORM_BIAS, BLOCK_E)
    rows = rows.to(row_dtype)
    for begin_o in range(first, E_OUT, step):
        o = begin_o + tl.arange(0, BLOCK_O)
        if USE_DOT:
            acc = tl.zeros((BLOCK_R, BLOCK_O), tl.float32)
        else:
            products = tl.zeros((BLOCK_R, BLOCK_O, BLOCK_E), tl.float32)
        for begin in tl.static_range(0, E_IN, BLOCK_E):
            w = next_w
            # Prefetch the next columns of these weights, or the first columns of the next outputs.
            if begin + BLOCK_E < E_IN:
                next_w = _load_weights(weight, weight_row, begin_o, begin + BLOCK_E, E_IN, E_OUT, BLOCK_O, BLOCK_E)
            else:
                next_w = _load_weights(weight, weight_row, begin_o + step, 0, E_IN, E_OUT, BLOCK_O, BLOCK_E)
            if E_IN > BLOCK_E:
                rows = _load_rows(
                    x, x_row, r, R, begin, mean, scale, norm_gain, norm_bias, E_IN, NORM, HAS_NORM_BIAS, BLOCK_E
                ).to(row_dtype)
            if USE_DOT:
                acc = tl.dot(rows, tl.trans(w.to(row_dtype)), acc, input_precision="ieee")
            else:
                products += rows[:, None, :] * w.to(row_dtype)[None, :, :]
        if not USE_DOT:
            acc = tl.sum(products, 2)
        if HAS_SCALE:
            acc *= tl.load(weight_scale + o, mask=o < E_OUT, other=0.0)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + o, mask=o < E_OUT, other=0.0).to(tl.float32)[None, :]
        acc = _activate(acc, ACTIVATION)
        in_bounds = (r < R)[:, None] & (o < E_OUT)[None, :]
        if HAS_RESIDUAL:
            added = tl.load(residual + r[:, None] * residual_row + o[None, :], mask=in_bounds, other=0.0)
            added = added.to(tl.float32)
            if RESIDUAL_NORM != "none":
                res_mean, res_scale = _statistics(
                    residual, residual_row, r, R, RESIDUAL_NORM, residual_eps, E_OUT, BLOCK_R
                )
                added = _normalize(
                    added, res_mean, res_scale, residual_gain, residual_bias, o, o < E_OUT, HAS_RESIDUAL_BIAS
                )
            acc += added
        tl.store(out + r[:, None] * E_OUT + o[None, :], acc.to(out.dtype.element_ty), mask=in_bounds)
