"""Kernels with vector code, which numba's bounds checks do not see, stay within their arrays: the memory after each of
them is protected, so that a read beyond it ends the process.
"""

import subprocess
import sys

import pytest

pytest.importorskip("numba")

GUARDED = """
import ctypes, mmap
import numpy as np
from regard.kernels.cpu import decode_attention, decode_choice, memory_hash, packed_product

mprotect = ctypes.CDLL(None, use_errno=True).mprotect
kept = []

def guard(array):
    \"\"\"A copy that ends where protected memory begins, up to the alignment of 4 bytes.\"\"\"
    size = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy

rng = np.random.default_rng(0)
for is_int8 in (False, True):
    if not packed_product.packing_available(is_int8):
        continue
    for R in (1, 3, 4, 7, 8, 9, 128):
        for N in (1, 15, 16, 17, 33, 128, 131):
            for K in (4, 20, 64):
                x, weight = rng.integers(-9, 9, (R, K)), rng.integers(-9, 9, (N, K))
                kind, result = (np.int8, np.int32) if is_int8 else (np.float32, np.float32)
                panels = guard(packed_product.pack_weight(weight.astype(kind)))
                y = guard(np.zeros((R, N), result))
                packed_product.multiply_panels(guard(x.astype(kind)), panels, 0, y)
                assert (y == x @ weight.T).all()
        kept = []
for D in (32, 64, 128):
    for count in (1, 3, 4, 5, 15, 16, 17, 33):
        H, G = 4, 2
        query, result = guard(rng.standard_normal(H * D).astype(np.float32)), guard(np.zeros(H * D, np.float32))
        keys, values = (guard(rng.standard_normal((G * count, D)).astype(np.float32)) for _ in range(2))
        scores, rows = map(guard, decode_attention.make_row_buffers(count))
        empty, factor = np.empty((0, 0), np.float32), np.float32(0.1)
        decode_attention.attend_heads(
            query, keys, values, rows, 0, count, H // G, count, factor, empty, scores, result
        )
        k, v = (np.repeat(array.reshape(G, count, D), H // G, 0) for array in (keys, values))
        weights = np.exp(0.1 * np.einsum("hd,hsd->hs", query.reshape(H, D), k))
        expected = np.einsum("hs,hsd->hd", weights / weights.sum(-1, keepdims=True), v)
        assert np.allclose(result.reshape(H, D), expected, atol=1e-5)
for V in (1, 15, 16, 17, 127, 128, 129, 300):
    logits = rng.standard_normal((3, V)).astype(np.float32)
    ones, zeros = guard(np.ones(V, np.float32)), guard(np.zeros(V, np.float32))
    top, ids, statistics = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.int64), np.zeros((3, 3), np.float32)
    decode_choice.start_rows(top, ids, statistics)
    positions, forced = np.zeros(3, np.int64), np.full(3, -1)
    decode_choice.best_tokens_rows(
        guard(logits), guard(np.ones(3, np.float32)), ones, zeros, 0, positions, 1, np.zeros((0, 0), np.bool_),
        np.zeros(0, np.int64), -1, forced, np.zeros(3, np.bool_), top, ids, statistics,
    )
    assert (ids[:, 0] == logits.argmax(1)).all()
words = guard(np.arange(1, 5000, dtype=np.uint32))
for stride in (1, 3, 65):
    address, count = np.array([words.ctypes.data]), np.array([len(words)])
    index = [i for i in range(len(words)) if i // 16 % stride == 0]
    odd = [(2 * i + 1) * 0x9E3779B1 % 2**32 for i in index]
    expected = sum(int(words[i]) * factor for i, factor in zip(index, odd)) % 2**64
    assert memory_hash.hash_memory(address, count, stride) == expected
"""


def test_vector_code_stays_within_its_arrays():
    subprocess.run([sys.executable, "-c", GUARDED], check=True)
