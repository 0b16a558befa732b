"""Attention of one query of a head over a few keys, in registers. Plain twin: attend_rows in decode_attention_cpu."""

import math
from typing import Any

from regard.kernels.cpu.decode_rows_cpu import EXP2_TERMS
from regard.kernels.cpu.numba_support import numba_available
from regard.kernels.cpu.vector_code import LANE_BYTES, LANES, VectorCode

# Head widths with their own code; the result of a head stays in registers.
HEAD_WIDTHS = (32, 64, 128)
# Keys whose dot products are computed at once.
GROUP = 4


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
    """A function for heads of this width.

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
