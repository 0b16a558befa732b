"""Matrix products with packed weights on a CPU with AVX-512, for any number of rows.

A weight (N, K) is packed once into panels of 16 outputs, in the order in which a product reads them: float32 (N/16, K,
16), or bytes (N/16, K/4, 64) of which each group of four belongs to one output. A tile of a product is a block of rows
times a few panels whose sums stay in registers. Libraries that take the weight in its usual layout pack it again in
every call, which costs more than the product of a few rows. Reference: x @ weight.T.
"""

import math
import os
from typing import Any

import numpy as np

from regard.kernels.cpu.support import SIZES, jit, numba_available
from regard.kernels.cpu.vector_code import LANE_BYTES, LANES, VectorCode

# Bytes are unsigned: weights are stored plus 128, and a sum starts at -128 times the sum of its row.
_SHIFT = 128
# Adds 128 to each of the four bytes of an integer.
_FLIP = np.int32(np.uint32(0x80808080).view(np.int32))


def packing_available(is_int8: bool) -> bool:
    """Whether this machine multiplies packed weights: it needs numba, AVX-512 and, for int8, VNNI.

    Processors with AMX have faster int8 products, which torch uses.

    >>> packing_available(is_int8=True) in (True, False)
    True
    """
    if not numba_available():
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if not is_int8:
        return bool(features.get("avx512f"))
    uses_amx = features.get("amx-int8") and "AMX" in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")
    return bool(features.get("avx512vnni")) and not uses_amx


def pack_weight(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The panels of a weight (N, K) of float32, or of int8 if K is a multiple of 4.

    >>> pack_weight(np.ones((20, 8), np.float32)).shape, pack_weight(np.ones((20, 8), np.int8)).shape
    ((2, 8, 16), (2, 2, 64))
    """
    is_int8 = weight.dtype == np.int8
    words = np.require(np.ascontiguousarray(weight).view(np.int32), requirements="A")
    N, steps = words.shape
    panels = _allocate_aligned(-(-N // LANES), steps, LANES)
    _copy_to_panels(words, _FLIP if is_int8 else np.int32(0), panels)
    return panels.view(np.uint8 if is_int8 else np.float32)


def _allocate_aligned(*shape: int) -> np.ndarray[Any, Any]:
    """Uninitialized 32-bit integers that begin at a cache line."""
    size = 4 * math.prod(shape)
    buffer = np.empty(size + LANE_BYTES, np.uint8)
    start = -buffer.ctypes.data % LANE_BYTES
    return buffer[start : start + size].view(np.int32).reshape(shape)


@jit
def _copy_to_panels(words, flip, panels):
    """Copy rows of 32-bit words, with the bits of `flip` inverted, to the lanes of panels; further lanes are zero."""
    for p in range(len(panels)):
        first = p * LANES
        if first + LANES <= len(words):
            block, panel = words[first : first + LANES], panels[p]
            for step in range(words.shape[1]):
                for lane in range(LANES):
                    panel[step, lane] = block[lane, step] ^ flip
        else:
            panels[p] = flip
            for lane in range(len(words) - first):
                for step in range(words.shape[1]):
                    panels[p, step, lane] = words[first + lane, step] ^ flip


def _make_tile(rows: int, panels: int) -> Any:
    """A function that computes a tile, for these numbers of rows and panels.

    Its arguments are the panels, the rows x, the initial sums of the rows (int8 only) and the result y; the first row
    and the first panel of the tile, and the first row and panel of its place in y. The type of the panels decides
    between float32 and int8.
    """
    if not numba_available():
        return None
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def tile(typing_context, weight, x, initial, y, row, panel, y_row, y_panel):  # type: ignore[no-untyped-def]
        is_int8 = weight.dtype == types.uint8

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            code = VectorCode(builder)
            vector, element = (code.ints, code.int32) if is_int8 else (code.floats, code.float32)
            arrays = [code.array(context, kind, value) for kind, value in zip(signature.args, arguments[:4])]
            (weight, shape, (panel_stride, *_)), (x, _, (x_stride, _)), (start, *_), (y, _, (y_stride, _)) = arrays
            row, panel, y_row, y_panel = arguments[4:]

            def at(address: Any, index: Any, i: int, stride: Any) -> Any:
                """The address of element index + i."""
                return builder.add(address, builder.mul(code.add(index, i), stride))

            row_starts = [at(x, row, r, x_stride) for r in range(rows)]
            panel_starts = [at(weight, panel, p, panel_stride) for p in range(panels)]
            sums = []
            for r in range(rows):
                first = code.constant(0.0, vector)
                if is_int8:
                    first = code.broadcast(code.load(at(start, row, r, code.number(4)), element))
                sums.append([code.variable(first) for _ in range(panels)])

            def multiply(step: Any) -> None:
                weights = [code.load(code.add(address, step, LANE_BYTES), vector) for address in panel_starts]
                for r in range(rows):
                    value = code.broadcast(code.load(code.add(row_starts[r], step, 4), element))
                    for p in range(panels):
                        total = builder.load(sums[r][p])
                        if is_int8:
                            total = code.call("llvm.x86.avx512.vpdpbusd.512", vector, total, weights[p], value)
                        else:
                            total = code.multiply_add(weights[p], value, total)
                        builder.store(total, sums[r][p])

            code.loop(shape[1], 1, multiply)
            for r in range(rows):
                target = code.add(at(y, y_row, r, y_stride), y_panel, LANE_BYTES)
                for p in range(panels):
                    code.store(builder.load(sums[r][p]), code.add(target, p, LANE_BYTES))
            return context.get_dummy_value()

        return types.void(weight, x, initial, y, *[types.int64] * 4), generate

    return tile


# More sums than a processor needs to hide the latency of a product, and few enough for 32 registers.
_tile_8x2, _tile_4x2, _tile_1x2 = _make_tile(8, 2), _make_tile(4, 2), _make_tile(1, 2)
_tile_1x8, _tile_8x1, _tile_1x1 = _make_tile(1, 8), _make_tile(8, 1), _make_tile(1, 1)


@jit
def multiply_panels(x, panels, first, y):
    """y = x weight^T for the outputs of the panels from `first` onwards; y has room for all or a part of them."""
    R, N = y.shape
    if len(x) != R or x.nbytes != 4 * R * panels.shape[1] or not 0 <= first <= len(panels) - -(-N // LANES):
        raise ValueError(SIZES)
    sums = np.empty(R if x.itemsize == 1 else 0, np.int32)
    if x.itemsize == 1:  # int8
        for r in range(R):
            total = np.int32(0)
            for j in range(x.shape[1]):
                total += np.int32(x[r, j])
            sums[r] = np.int32(-_SHIFT) * total
    count, p = N // LANES, 0
    if R == 1:
        while p + 8 <= count:
            _tile_1x8(panels, x, sums, y, 0, first + p, 0, p)
            p += 8
    while p + 2 <= count:
        r = 0
        while r + 8 <= R:
            _tile_8x2(panels, x, sums, y, r, first + p, r, p)
            r += 8
        if r + 4 <= R:
            _tile_4x2(panels, x, sums, y, r, first + p, r, p)
            r += 4
        while r < R:
            _tile_1x2(panels, x, sums, y, r, first + p, r, p)
            r += 1
        p += 2
    # The last panels one by one, into a buffer, since y may end within a panel.
    buffer = np.empty((8, LANES), y.dtype)
    while p * LANES < N:
        columns = min(LANES, N - p * LANES)
        for r in range(0, R, 8):
            rows = min(8, R - r)
            if rows == 8:
                _tile_8x1(panels, x, sums, buffer, r, first + p, 0, 0)
            else:
                for i in range(rows):
                    _tile_1x1(panels, x, sums, buffer, r + i, first + p, i, 0)
            for i in range(rows):
                for j in range(columns):
                    y[r + i, p * LANES + j] = buffer[i, j]
        p += 1
