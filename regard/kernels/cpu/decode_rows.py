"""Rows of activations between the matrix products of a decoding step on a CPU: norms, activations, int8 rounding.

A matrix product gives `y`: int32 sums of int8 products, whose value is y * row_scale * scale + bias, or float32 (with
scales of 1). The input of the next one is `out`: int8 with one scale per row, or float32. Every function computes a row
from this row alone, so that results do not depend on the batch. References: tests/kernels/cpu/test_decode_rows.py.
"""

import math

import numpy as np

from regard.kernels.cpu.support import SIZES, jit

ACTIVATIONS = ("none", "relu", "relu2", "silu", "gelu", "gelu_tanh", "swiglu", "geglu")
_LOG2_E = np.float32(1 / math.log(2))
# 2^f for |f| <= 1/2 as a polynomial, lowest power first: relative error 8e-8 (Remez algorithm).
EXP2_TERMS = (1.00000007656634, 0.693146946, 0.240221147, 0.0555070978, 0.00967575812, 0.00132779394)
_TERMS = tuple(np.float32(term) for term in EXP2_TERMS)
_MIN_SCALE = np.float32(1e-30)
_LEVELS = np.float32(1 / 127)
_SQRT_HALF = np.float32(math.sqrt(0.5))
_SQRT_2_PI = np.float32(math.sqrt(2 / math.pi))
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1), np.float32(0)


@jit
def exp_float(x):
    """exp(x) of a float32 in a form that compilers vectorize: relative error 1e-6; 1e-38 below -87."""
    power = min(max(x * _LOG2_E, np.float32(-126.0)), np.float32(126.0))
    whole = np.rint(power)
    f, t = power - whole, _TERMS
    p = t[0] + f * (t[1] + f * (t[2] + f * (t[3] + f * (t[4] + f * t[5]))))
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@jit
def largest_value(row, count):
    """The maximum of the first `count` values of a float32 row.

    It is taken from their bits: compilers vectorize maxima of integers. Among bits as signed integers, the largest
    non-negative float is the maximum, the largest negative one the minimum.
    """
    bits = row.view(np.int32)
    highest, lowest = bits[0], bits[0]
    for j in range(count):
        if bits[j] > highest:
            highest = bits[j]
        if bits[j] < lowest:
            lowest = bits[j]
    return np.int32(highest).view(np.float32) if highest >= 0 else np.int32(lowest).view(np.float32)


@jit
def read_row(y, r, start, row_scale, scale, bias, row):
    """Put columns `start` onwards of row r of a matrix product into `row`, as float32."""
    end = start + len(row)
    if r >= min(len(y), len(row_scale)) or end > min(y.shape[1], min(len(scale), len(bias))):
        raise ValueError(SIZES)
    factor = row_scale[r]
    # Slices: compilers do not vectorize loops over indices that might be negative.
    sums, scales, biases = y[r, start:end], scale[start:end], bias[start:end]
    for j in range(len(row)):
        row[j] = np.float32(sums[j]) * factor * scales[j] + biases[j]


@jit
def write_row(row, out, out_scale, r):
    """Store a row as the input of a matrix product, rounded to int8 if `out` is int8."""
    if r >= min(len(out), len(out_scale)) or len(row) > out.shape[1]:
        raise ValueError(SIZES)
    if out.itemsize == 1:  # int8
        bits, largest = row.view(np.int32), np.int32(0)
        for j in range(len(row)):
            magnitude = np.int32(bits[j] & np.int32(0x7FFFFFFF))  # the bits of |row[j]|
            if magnitude > largest:
                largest = magnitude
        scale = max(np.int32(largest).view(np.float32) * _LEVELS, _MIN_SCALE)
        out_scale[r] = scale
        inverse = _ONE / scale
        for j in range(len(row)):
            out[r, j] = np.int8(np.rint(row[j] * inverse))
    else:
        for j in range(len(row)):
            out[r, j] = row[j]


@jit
def normalize_row(row, gain, bias, eps, is_rms):
    """LayerNorm or RMSNorm of a row, in place."""
    if len(row) > min(len(gain), len(bias)):
        raise ValueError(SIZES)
    count = np.float32(len(row))
    mean = _ZERO
    if not is_rms:
        for j in range(len(row)):
            mean += row[j]
        mean /= count
    square = _ZERO
    for j in range(len(row)):
        square += (row[j] - mean) * (row[j] - mean)
    factor = _ONE / np.sqrt(square / count + eps)
    for j in range(len(row)):
        row[j] = (row[j] - mean) * factor * gain[j] + bias[j]


@jit
def multiply_few_rows(x, weight, y):
    """y = x weight^T for a few rows of float32 or int8: reads the weight once, at the speed of memory."""
    if x.shape[1] != weight.shape[1] or len(x) > len(y) or len(weight) > y.shape[1]:
        raise ValueError(SIZES)
    if x.itemsize == 1:  # int8
        for n in range(len(weight)):
            for r in range(len(x)):
                count = np.int32(0)
                for j in range(x.shape[1]):
                    count += np.int32(np.int16(x[r, j]) * np.int16(weight[n, j]))
                y[r, n] = count
    else:
        for n in range(len(weight)):
            for r in range(len(x)):
                total = _ZERO
                for j in range(x.shape[1]):
                    total += x[r, j] * weight[n, j]
                y[r, n] = total


@jit
def quantize_rows(x, out, out_scale):
    """Store the rows of x as the input of a matrix product."""
    for r in range(len(x)):
        write_row(x[r], out, out_scale, r)


@jit
def norm_rows(x, gain, bias, eps, is_rms, out, out_scale):
    """norm(x) as the input of a matrix product."""
    row = np.empty(x.shape[1], np.float32)
    for r in range(len(x)):
        for j in range(len(row)):
            row[j] = x[r, j]
        normalize_row(row, gain, bias, eps, is_rms)
        write_row(row, out, out_scale, r)


@jit
def add_norm_rows(x, y, row_scale, scale, y_bias, gain, bias, eps, is_rms, norm_first, out, out_scale):
    """Add the output y of a sublayer to the residual stream x. norm(x) is the input of the next matrix product; in
    post-norm models it is the new residual stream, too.
    """
    row = np.empty(x.shape[1], np.float32)
    for r in range(len(x)):
        read_row(y, r, 0, row_scale, scale, y_bias, row)
        for j in range(len(row)):
            row[j] += x[r, j]
        if norm_first:
            for j in range(len(row)):
                x[r, j] = row[j]
            normalize_row(row, gain, bias, eps, is_rms)
        else:
            normalize_row(row, gain, bias, eps, is_rms)
            for j in range(len(row)):
                x[r, j] = row[j]
        write_row(row, out, out_scale, r)


@jit
def activate_row(row, kind):
    """Apply an activation function in place, given its index in ACTIVATIONS."""
    if kind == 1:
        for j in range(len(row)):
            row[j] = max(row[j], _ZERO)
    elif kind == 2:
        for j in range(len(row)):
            row[j] = max(row[j], _ZERO) * max(row[j], _ZERO)
    elif kind == 3:
        for j in range(len(row)):
            row[j] = row[j] / (_ONE + exp_float(-row[j]))
    elif kind == 4:
        for j in range(len(row)):
            row[j] = _HALF * row[j] * (_ONE + np.float32(math.erf(row[j] * _SQRT_HALF)))
    elif kind == 5:
        for j in range(len(row)):
            x = row[j]
            inner = _SQRT_2_PI * (x + np.float32(0.044715) * x * x * x)
            row[j] = x / (_ONE + exp_float(np.float32(-2) * inner))


@jit
def activate_rows(y, row_scale, scale, bias, kind, out, out_scale):
    """The activation of a feed-forward network, plain or gated, as the input of its second matrix product."""
    is_gated = kind >= 6
    row = np.empty(y.shape[1] // 2 if is_gated else y.shape[1], np.float32)
    gate = np.empty(len(row) if is_gated else 0, np.float32)
    for r in range(len(y)):
        read_row(y, r, 0, row_scale, scale, bias, row)
        if is_gated:
            read_row(y, r, len(row), row_scale, scale, bias, gate)
            activate_row(gate, 3 if kind == 6 else 5)
            for j in range(len(row)):
                row[j] *= gate[j]
        else:
            activate_row(row, kind)
        write_row(row, out, out_scale, r)


@jit
def embed_rows(ids, positions, tokens, scale, table, offset, x):
    """Embeddings of (B, K) tokens at the positions of their slots, plus positional encodings unless the table is empty.
    A slot whose position is negative is empty: its rows are 0.
    """
    columns = ids.shape[1]
    if len(positions) < len(ids) or len(x) < ids.size or x.shape[1] != tokens.shape[1]:
        raise ValueError(SIZES)
    for b in range(len(ids)):
        p = positions[b]
        for k in range(columns):
            r = b * columns + k
            if p < 0:
                x[r] = _ZERO
                continue
            token = ids[b, k]
            if not 0 <= token < len(tokens) or (len(table) and p + offset >= len(table)):
                raise ValueError(SIZES)
            for j in range(x.shape[1]):
                x[r, j] = tokens[token, j] * scale
            if len(table):
                for j in range(x.shape[1]):
                    x[r, j] += table[p + offset, j]
