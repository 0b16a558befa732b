"""Attention of one decoding step, and of the encoder, on a CPU: queries of a row over cached keys and values.

References: tests/kernels/cpu/test_decode_attention.py.
"""

import math
from typing import Any

import numpy as np

from regard.kernels.cpu.decode_rows import EXP2_TERMS, exp_float, largest_value, read_row, write_row
from regard.kernels.cpu.support import SIZES, jit, numba_available
from regard.kernels.cpu.vector_code import LANE_BYTES, LANES, VectorCode

# Head widths with their own code; the result of a head stays in registers.
HEAD_WIDTHS = (32, 64, 128)
# Keys whose dot products are computed at once.
GROUP = 4
_HAS_VECTOR_CODE = numba_available()


@jit
def make_row_buffers(capacity):
    """Buffers for the scores and the row numbers of at most `capacity` keys: 0, 1, 2, … and, as padding, the last."""
    padded = -(-capacity // LANES) * LANES
    return np.empty(padded, np.float32), np.minimum(np.arange(padded), capacity - 1)


@jit
def attend_rows(query, start, keys, values, rows, shift, count, factor, bias, bias_row, scores, result):
    """Attention of one head: its query begins at `start` of `query`, its output at `start` of `result`.

    Its keys and values are rows[s] + shift of (N, D) matrices, for s < count. Row `bias_row` of `bias`, unless that is
    empty, is added to the scores by distance from the last key. `rows` and `scores` are made by `make_row_buffers`.
    """
    D = keys.shape[1]
    q, head = query[start : start + D], result[start : start + D]
    s = 0
    while s + 4 <= count:  # four keys at once: one load of the query
        # Unsigned: compilers do not vectorize loops over indices that might be negative.
        a, b = np.uint64(rows[s] + shift), np.uint64(rows[s + 1] + shift)
        c, e = np.uint64(rows[s + 2] + shift), np.uint64(rows[s + 3] + shift)
        t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for d in range(D):
            t0 += q[d] * keys[a, d]
            t1 += q[d] * keys[b, d]
            t2 += q[d] * keys[c, d]
            t3 += q[d] * keys[e, d]
        scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = t0, t1, t2, t3
        s += 4
    while s < count:
        a, t0 = np.uint64(rows[s] + shift), np.float32(0)
        for d in range(D):
            t0 += q[d] * keys[a, d]
        scores[s] = t0
        s += 1
    for s in range(count):
        scores[s] *= factor
    if len(bias):
        for s in range(count):
            scores[s] += bias[bias_row, count - 1 - s]
    highest, total = largest_value(scores, count), np.float32(0)
    for s in range(count):
        e = exp_float(scores[s] - highest)
        scores[s] = e
        total += e
    inverse = np.float32(1) / total
    head[:] = np.float32(0)
    s = 0
    while s + 4 <= count:
        a, b = np.uint64(rows[s] + shift), np.uint64(rows[s + 1] + shift)
        c, e = np.uint64(rows[s + 2] + shift), np.uint64(rows[s + 3] + shift)
        t0, t1 = scores[s] * inverse, scores[s + 1] * inverse
        t2, t3 = scores[s + 2] * inverse, scores[s + 3] * inverse
        for d in range(D):
            head[d] += (t0 * values[a, d] + t1 * values[b, d]) + (t2 * values[c, d] + t3 * values[e, d])
        s += 4
    while s < count:
        a, t0 = np.uint64(rows[s] + shift), scores[s] * inverse
        for d in range(D):
            head[d] += t0 * values[a, d]
        s += 1


def _dot_products(code: VectorCode, query: list[Any], keys: list[Any]) -> Any:
    """The dot products of a query, in registers, and the keys at four addresses."""
    builder = code.builder
    parts = []
    for key in keys:
        total = builder.fmul(query[0], code.load(key, code.floats))
        for i in range(1, len(query)):
            total = code.multiply_add(query[i], code.load(code.add(key, i, LANE_BYTES), code.floats), total)
        while total.type.count > 4:
            half = total.type.count // 2
            lanes = list(range(2 * half))
            total = builder.fadd(code.shuffle(total, total, lanes[:half]), code.shuffle(total, total, lanes[half:]))
        parts.append(total)
    # From four vectors of four lanes to a vector of their sums.
    a, b = (
        builder.fadd(code.shuffle(x, y, [0, 1, 4, 5]), code.shuffle(x, y, [2, 3, 6, 7]))
        for x, y in (parts[:2], parts[2:])
    )
    return builder.fadd(code.shuffle(a, b, [0, 2, 4, 6]), code.shuffle(a, b, [1, 3, 5, 7]))


def _exp(code: VectorCode, x: Any) -> Any:
    """exp(x) as in `exp_float`."""
    builder, floats = code.builder, code.floats
    limits = code.constant(-126.0, floats), code.constant(126.0, floats)
    power = builder.fmul(x, code.constant(1 / math.log(2), floats))
    power = code.call(f"llvm.maxnum.v{LANES}f32", floats, power, limits[0])
    power = code.call(f"llvm.minnum.v{LANES}f32", floats, power, limits[1])
    whole = code.call(f"llvm.rint.v{LANES}f32", floats, power)
    f = builder.fsub(power, whole)
    p = code.constant(EXP2_TERMS[-1], floats)
    for term in reversed(EXP2_TERMS[:-1]):
        p = code.multiply_add(p, f, code.constant(term, floats))
    exponent = builder.add(builder.fptosi(whole, code.ints), code.constant(127, code.ints))
    scale = builder.bitcast(builder.shl(exponent, code.constant(23, code.ints)), floats)
    return builder.fmul(p, scale)


def _make_attend_head(width: int) -> Any:
    """A function that attends as `attend_rows`, for heads of this width, in registers.

    Its arguments are the query, keys, values, row numbers (padded to a multiple of GROUP with numbers of rows that
    exist), a buffer for scores (padded to a multiple of LANES) and the result; the index of the head's first element in
    query and result, that of its first row in keys and values, the number of keys and the factor of the scores. All
    arrays are contiguous; those of row numbers are int64, the others float32.
    """
    if not numba_available():
        return None
    from numba import types
    from numba.extending import intrinsic

    registers = width // LANES

    @intrinsic
    def attend_head(typing_context, query, keys, values, rows, scores, result, element, first, count, factor):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            code = VectorCode(builder)
            ir, floats = code.ir, code.floats
            arrays = [code.array(context, kind, value) for kind, value in zip(signature.args, arguments[:6])]
            query, keys, values, rows, scores, result = (address for address, *_ in arrays)
            element, first, count, factor = arguments[6:]
            query, result = code.add(query, element, 4), code.add(result, element, 4)
            keys, values = code.add(keys, first, 4 * width), code.add(values, first, 4 * width)
            parts = [code.load(code.add(query, i, LANE_BYTES), floats) for i in range(registers)]

            def score(s: Any) -> None:
                numbers = [code.load(code.add(rows, code.add(s, i), 8), code.int64) for i in range(GROUP)]
                addresses = [code.add(keys, number, 4 * width) for number in numbers]
                code.store(_dot_products(code, parts, addresses), code.add(scores, s, 4))

            code.loop(count, GROUP, score)

            factors, lane_numbers = code.broadcast(factor), ir.Constant(code.ints, list(range(LANES)))
            lowest = code.constant(float("-inf"), floats)
            highest = code.variable(lowest)

            def find_highest(s: Any) -> None:
                left = builder.trunc(builder.sub(count, s), code.int32)
                is_key = builder.icmp_signed("<", lane_numbers, code.broadcast(left))
                address = code.add(scores, s, 4)
                scaled = builder.select(is_key, builder.fmul(code.load(address, floats), factors), lowest)
                code.store(scaled, address)
                builder.store(code.call(f"llvm.maxnum.v{LANES}f32", floats, builder.load(highest), scaled), highest)

            code.loop(count, LANES, find_highest)
            largest = code.broadcast(
                code.call(f"llvm.vector.reduce.fmax.v{LANES}f32", code.float32, builder.load(highest))
            )
            total = code.variable(code.constant(0.0, floats))

            def exponentiate(s: Any) -> None:
                address = code.add(scores, s, 4)
                shifted = builder.fsub(code.load(address, floats), largest)
                value = _exp(code, shifted)
                is_key = builder.fcmp_unordered("!=", shifted, lowest)
                value = builder.select(is_key, value, code.constant(0.0, floats))
                code.store(value, address)
                builder.store(builder.fadd(builder.load(total), value), total)

            code.loop(count, LANES, exponentiate)
            sums = [code.variable(code.constant(0.0, floats)) for _ in range(registers)]

            def add_value(s: Any) -> None:
                weight = code.broadcast(code.load(code.add(scores, s, 4), code.float32))
                row = code.add(values, code.load(code.add(rows, s, 8), code.int64), 4 * width)
                for i in range(registers):
                    value = code.load(code.add(row, i, LANE_BYTES), floats)
                    builder.store(code.multiply_add(weight, value, builder.load(sums[i])), sums[i])

            code.loop(count, 1, add_value)
            denominator = code.sum_lanes(builder.load(total))
            inverse = code.broadcast(builder.fdiv(code.constant(1.0, code.float32), denominator))
            for i in range(registers):
                code.store(builder.fmul(builder.load(sums[i]), inverse), code.add(result, i, LANE_BYTES))
            return context.get_dummy_value()

        arrays = query, keys, values, rows, scores, result
        return types.void(*arrays, *[types.int64] * 3, types.float32), generate

    return attend_head


attend_head_32, attend_head_64, attend_head_128 = map(_make_attend_head, HEAD_WIDTHS)


@jit
def attend_heads(query, keys, values, rows, shift, head_rows, group, count, factor, bias, scores, result):
    """Attention of all heads of a query: see `attend_rows`. The rows of a group of heads begin at `shift`, those of the
    next group `head_rows` later.
    """
    D = keys.shape[1]
    H = len(result) // D
    if count > min(len(rows), len(scores)) or (len(bias) and (len(bias) < H or count > bias.shape[1])):
        raise ValueError(SIZES)
    if not (_HAS_VECTOR_CODE and len(bias) == 0 and (D == 32 or D == 64 or D == 128)):
        for h in range(H):
            attend_rows(
                query, h * D, keys, values, rows, shift + h // group * head_rows, count, factor, bias, h, scores, result
            )  # fmt: skip
        return
    # The code of these widths has no bounds checks. Row numbers are less than `head_rows`.
    last = shift + (H - 1) // group * head_rows + head_rows
    padded = -(-count // LANES) * LANES
    is_contiguous = keys.strides[0] == 4 * D and values.strides[0] == 4 * D
    if shift < 0 or last > min(len(keys), len(values)) or padded > min(len(rows), len(scores)) or not is_contiguous:
        raise ValueError(SIZES)
    if len(query) < H * D or values.shape[1] != D:
        raise ValueError(SIZES)
    for h in range(H):
        first = shift + h // group * head_rows
        if D == 32:
            attend_head_32(query, keys, values, rows, scores, result, h * D, first, count, factor)
        elif D == 64:
            attend_head_64(query, keys, values, rows, scores, result, h * D, first, count, factor)
        else:
            attend_head_128(query, keys, values, rows, scores, result, h * D, first, count, factor)


@jit
def copy_head(row, start, target):
    """Copy the key or value at `start` of a row."""
    source = row[start : start + len(target)]
    if len(source) < len(target):
        raise ValueError(SIZES)
    for d in range(len(target)):
        target[d] = source[d]


@jit
def transform_head(row, start, width, gain, eps, rotary, p):
    """Change the query or key at `start` of a row: RMSNorm, unless `gain` is empty, and rotation by the angles of
    position p, unless `rotary` is empty.
    """
    if start + width > len(row) or (len(gain) and len(gain) < width) or (len(rotary) and p >= len(rotary)):
        raise ValueError(SIZES)
    if len(gain):
        head, square = row[start : start + width], np.float32(0)
        for d in range(width):
            square += head[d] * head[d]
        factor = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        for d in range(width):
            head[d] *= factor * gain[d]
    if len(rotary):
        half = width // 2
        first, second = row[start : start + half], row[start + half : start + width]
        cos, sin = rotary[p, :half], rotary[p, half:]
        for d in range(half):
            a, b = first[d], second[d]
            first[d], second[d] = a * cos[d] - b * sin[d], b * cos[d] + a * sin[d]


@jit
def self_attention(
    y,
    row_scale,
    scale,
    bias,
    keys,
    values,
    ancestors,
    positions,
    query_factor,
    distance_bias,
    q_gain,
    k_gain,
    eps,
    rotary,
    out,
    out_scale,
):
    """Self-attention of the last token of every hypothesis, whose key and value enter the caches (B, G, S, K, D).

    `y` holds queries, keys and values side by side. The key of position s of hypothesis k is in column
    ancestors[b, k, s]; with one hypothesis per slot `ancestors` is not read.
    """
    B, G, capacity, K, D = keys.shape
    H = y.shape[1] // D - 2 * G
    group = H // G
    flat_keys, flat_values = keys.reshape(-1, D), values.reshape(-1, D)
    row, result = np.empty(y.shape[1], np.float32), np.empty(H * D, np.float32)
    scores, rows = make_row_buffers(capacity)
    for b in range(B):
        p = positions[b]
        if p < 0:
            continue
        if p >= capacity or (K > 1 and p >= ancestors.shape[2]):
            raise ValueError(SIZES)
        for k in range(K):
            r = b * K + k
            read_row(y, r, 0, row_scale, scale, bias, row)
            for g in range(G):
                transform_head(row, (H + g) * D, D, k_gain, eps, rotary, p)
                i = ((b * G + g) * capacity + p) * K + k
                copy_head(row, (H + g) * D, flat_keys[i])
                copy_head(row, (H + G + g) * D, flat_values[i])
            for s in range(p + 1):
                rows[s] = s * K + (ancestors[b, k, s] if K > 1 else 0)
            for h in range(H):
                transform_head(row, h * D, D, q_gain, eps, rotary, p)
            attend_heads(
                row, flat_keys, flat_values, rows, b * G * capacity * K, capacity * K, group, p + 1, query_factor,
                distance_bias, scores, result,
            )  # fmt: skip
            write_row(result, out, out_scale, r)


@jit
def cross_attention(
    y, row_scale, scale, bias, keys, values, lengths, positions, query_factor, q_gain, eps, out, out_scale
):
    """Attention of every hypothesis over the source: caches (B, G, S, D), of which `lengths` are in use."""
    B, G, capacity, D = keys.shape
    H, K = y.shape[1] // D, len(y) // B
    group = H // G
    flat_keys, flat_values = keys.reshape(-1, D), values.reshape(-1, D)
    row, result = np.empty(H * D, np.float32), np.empty(H * D, np.float32)
    (scores, rows), empty = make_row_buffers(capacity), np.empty((0, 0), np.float32)
    for b in range(B):
        if positions[b] < 0:
            continue
        if not 0 < lengths[b] <= capacity:
            raise ValueError(SIZES)
        for k in range(K):
            r = b * K + k
            read_row(y, r, 0, row_scale, scale, bias, row)
            for h in range(H):
                transform_head(row, h * D, D, q_gain, eps, empty, 0)
            attend_heads(
                row, flat_keys, flat_values, rows, b * G * capacity, capacity, group, lengths[b], query_factor,
                empty, scores, result,
            )  # fmt: skip
            write_row(result, out, out_scale, r)


@jit
def encoder_attention(y, row_scale, scale, bias, starts, heads, kv_heads, query_factor, out, out_scale):
    """Self-attention within packed sequences: sequence b is rows starts[b] to starts[b + 1]."""
    D = y.shape[1] // (heads + 2 * kv_heads)
    longest = 0
    for b in range(len(starts) - 1):
        longest = max(longest, starts[b + 1] - starts[b])
    row, result = np.empty(y.shape[1], np.float32), np.empty(heads * D, np.float32)
    (scores, rows), empty = make_row_buffers(longest), np.empty((0, 0), np.float32)
    keys, values = np.empty((kv_heads * longest, D), np.float32), np.empty((kv_heads * longest, D), np.float32)
    group = heads // kv_heads
    for b in range(len(starts) - 1):
        first, count = starts[b], starts[b + 1] - starts[b]
        for s in range(count):
            read_row(y, first + s, 0, row_scale, scale, bias, row)
            for g in range(kv_heads):
                copy_head(row, (heads + g) * D, keys[g * longest + s])
                copy_head(row, (heads + kv_heads + g) * D, values[g * longest + s])
        for s in range(count):
            read_row(y, first + s, 0, row_scale, scale, bias, row)
            attend_heads(row, keys, values, rows, 0, longest, group, count, query_factor, empty, scores, result)
            write_row(result, out, out_scale, first + s)


@jit
def store_keys_values(y, row_scale, scale, bias, starts, slots, k_gain, eps, keys, values):
    """Store the keys and values of packed source sentences in their slots of the caches (B, G, S, D)."""
    G, D = keys.shape[1], keys.shape[3]
    row, no_rotary = np.empty(2 * G * D, np.float32), np.empty((0, 0), np.float32)
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(keys) or starts[i + 1] - starts[i] > keys.shape[2]:
            raise ValueError(SIZES)
        for s in range(starts[i + 1] - starts[i]):
            read_row(y, starts[i] + s, 0, row_scale, scale, bias, row)
            for g in range(G):
                transform_head(row, g * D, D, k_gain, eps, no_rotary, 0)
                copy_head(row, g * D, keys[slots[i], g, s])
                copy_head(row, (G + g) * D, values[slots[i], g, s])
