"""A hash of the memory of many arrays, at the speed of memory. Reference: tests/kernels/cpu."""

from typing import Any

import numpy as np

from regard.kernels.cpu.support import jit, numba_available

# Words of 32 bits in a cache line.
_LINE = 16
_ODD = np.uint32(0x9E3779B1)


def _make_words_at() -> Any:
    """A function of an address: a pointer to 32-bit words."""
    if not numba_available():
        return None
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def words_at(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())

        return types.CPointer(types.uint32)(types.int64), generate

    return words_at


_words_at = _make_words_at()
if numba_available():
    from numba import carray


@jit
def hash_memory(addresses, words, stride):
    """Σ word * odd(index) modulo 2^64 of blocks of 32-bit words at these addresses: changes with any single word, and
    with the order of words. With a stride above 1, of one cache line in `stride`.
    """
    total = np.uint64(0)
    for block in range(len(addresses)):
        count = words[block]
        values = carray(_words_at(addresses[block]), count)
        seed = np.uint32(2 * block + 1) * _ODD
        if stride == 1:
            for i in range(count):
                total += np.uint64(values[i]) * np.uint64(np.uint32(np.uint32(2 * i + 1) * seed))
        else:
            for line in range(0, count, stride * _LINE):
                for i in range(line, min(line + _LINE, count)):
                    total += np.uint64(values[i]) * np.uint64(np.uint32(np.uint32(2 * i + 1) * seed))
    return total
