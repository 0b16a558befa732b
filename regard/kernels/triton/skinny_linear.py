"""Norm, linear layer, activation and residual sum of up to 16 rows in one launch (CUDA, Triton; inference only).

Reference: `reference_skinny_linear`. With so few rows a linear layer takes as long as reading its weights, and a
sublayer takes as long as its launches. Nothing synchronizes with the host, and launches depend on shapes only, so calls
can be captured in a CUDA graph.

A program computes a few outputs for all rows and reads their weights once. Statistics of norms are computed again by
every program, which costs less than a launch. USE_DOT: with matrix units, whose tiles have at least 16 outputs; fewer
outputs per program read the weights of small layers faster.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.kernels.triton.support import (
    contiguous_rows,
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    next_power_of_two,
    tl,
    triton,
    triton_available,
)

MAX_ROWS, MAX_NORM_WIDTH = 16, 4096
# More results than this, of rows that are not wider than MAX_DOT_WIDTH, are computed by matrix units.
MAX_VECTOR_RESULTS, MAX_DOT_WIDTH = 4096, 1024
# Programs along the outputs: as many as run at once. With more outputs, each program loops over several tiles.
MAX_PROGRAMS = 1320

LinearActivation = Literal["none", "relu", "gelu", "gelu_tanh", "relu2", "silu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu2": lambda x: nn.functional.relu(x).square(),
    "silu": nn.functional.silu,
}


class RowNorm(NamedTuple):
    """LayerNorm ("layer") or RMSNorm ("rms") over the last axis."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    kind: Literal["layer", "rms"]


def is_faster(rows: int, width: int) -> bool:
    """Whether the kernel is faster than cuBLAS with separate norms and sums, for a model of this width (measured)."""
    return rows <= MAX_ROWS and (width <= 512 or rows <= 2)


def supports_float8(device: torch.device) -> bool:
    """Whether the kernel reads float8 weights: on GPUs with compute capability 8.9 and later."""
    return is_interpreted() or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel runs on rows x and a weight."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return (
        triton_available()
        and x.is_cuda
        and x.dim() == 2
        and 1 <= len(x) <= MAX_ROWS
        and x.dtype in dtypes
        and (weight.dtype in dtypes or (weight.dtype == torch.float8_e4m3fn and supports_float8(x.device)))
        and weight.stride(1) == 1
        and x.shape[1] <= MAX_NORM_WIDTH
    )


def skinny_linear(
    x: Float[Tensor, "R E_in"],
    weight: Float[Tensor, "E_out E_in"],
    bias: Float[Tensor, "E_out"] | None = None,
    *,
    scale: Float[Tensor, "E_out"] | None = None,
    norm: RowNorm | None = None,
    activation: LinearActivation = "none",
    residual: Float[Tensor, "R E_out"] | None = None,
    residual_norm: RowNorm | None = None,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "R E_out"]:
    """residual_norm(residual) + activation(norm(x) Wᵀ + b); each part is optional.

    With `residual_norm` (post-norm) the residual is the sum before the norm of the previous sublayer. The result has
    the dtype of the residual or, without one, of the weight, unless `out_dtype` is given. The weight must not be the
    result of another kernel of the same CUDA graph: it is read before previous kernels end. A float8 weight has a
    float32 `scale` per output, W = scale * weight; the result then has the dtype of x instead of the weight.
    """
    x = contiguous_rows(x)
    R, E_out = len(x), len(weight)
    out = torch.empty(R, E_out, dtype=out_dtype or _result_dtype(x, weight, residual), device=x.device)
    residual = None if residual is None else contiguous_rows(residual)
    no_norm = None, None, 0.0, "none"
    gain, norm_bias, eps, kind = norm or no_norm
    residual_gain, residual_bias, residual_eps, residual_kind = residual_norm or no_norm
    blocks = _blocks(R, x.shape[1], E_out, _product_dtype(x, weight))
    grid = min(MAX_PROGRAMS, -(-E_out // blocks["BLOCK_O"])), -(-R // blocks["BLOCK_R"])
    skinny_linear_kernel[grid](
        *(x, weight, scale, bias, gain, norm_bias, residual, residual_gain, residual_bias, out),
        *(x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), eps, residual_eps, R),
        E_IN=x.shape[1],
        E_OUT=E_out,
        ACTIVATION=activation,
        NORM=kind,
        RESIDUAL_NORM=residual_kind,
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        HAS_NORM_BIAS=norm_bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_RESIDUAL_BIAS=residual_bias is not None,
        **dependent_launch(x),
        **blocks,
    )
    return out


def reference_skinny_linear(
    x: Float[Tensor, "R E_in"],
    weight: Float[Tensor, "E_out E_in"],
    bias: Float[Tensor, "E_out"] | None = None,
    *,
    scale: Float[Tensor, "E_out"] | None = None,
    norm: RowNorm | None = None,
    activation: LinearActivation = "none",
    residual: Float[Tensor, "R E_out"] | None = None,
    residual_norm: RowNorm | None = None,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "R E_out"]:
    """`skinny_linear` in torch operations.

    >>> reference_skinny_linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [-1.0, 0.0]]), activation="relu")
    tensor([[3., 0.]])
    """
    dtype = out_dtype or _result_dtype(x, weight, residual)
    x, weight = _apply_norm(x, norm).to(_product_dtype(x, weight)), weight.to(_product_dtype(x, weight))
    if scale is not None:
        weight = weight * scale.to(weight.dtype)[:, None]
    y = _ACTIVATIONS[activation](nn.functional.linear(x, weight, bias))
    return (y if residual is None else _apply_norm(residual, residual_norm) + y).to(dtype)


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which rows and weights are multiplied."""
    return x.dtype if weight.dtype == torch.float8_e4m3fn else weight.dtype


def _result_dtype(x: Tensor, weight: Tensor, residual: Tensor | None) -> torch.dtype:
    return _product_dtype(x, weight) if residual is None else residual.dtype


def _apply_norm(x: Tensor, norm: RowNorm | None) -> Tensor:
    if norm is None:
        return x
    gain, bias = norm.weight.to(x.dtype), None if norm.bias is None else norm.bias.to(x.dtype)
    if norm.kind == "layer":
        return nn.functional.layer_norm(x, x.shape[-1:], gain, bias, norm.eps)
    x = nn.functional.rms_norm(x, x.shape[-1:], gain, norm.eps)
    return x if bias is None else x + bias


def _blocks(rows: int, width: int, outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and compiler options: the fastest on an H200 with bf16 weights."""
    use_dot = rows > 1 and rows * outputs > MAX_VECTOR_RESULTS and width <= MAX_DOT_WIDTH
    if use_dot:
        block_r, block_o = 16, 16 if width <= 512 else 32
        block_e = min(next_power_of_two(width, 16), 128 if dtype == torch.float32 else 512)
        warps = 2 if width <= 512 and outputs > 8192 else 4
    else:
        block_r = min(4, next_power_of_two(rows))
        block_e = min(next_power_of_two(width, 16), 2048)
        if block_e > 1024:
            block_o, warps = 4, 4 if rows == 1 and width <= 2048 else 8
        else:
            block_o = min(4096 // max(512, block_e), max(2, next_power_of_two(outputs // 512)))
            warps = min(8, max(1, block_r * block_o * block_e // 4096))
    blocks = {"BLOCK_R": block_r, "BLOCK_O": block_o, "BLOCK_E": block_e}
    return blocks | {"USE_DOT": use_dot, "num_warps": warps, "num_stages": 1}


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
def skinny_linear_kernel(
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
