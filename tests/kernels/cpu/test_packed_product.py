"""Products of packed weights against NumPy."""

import numpy as np
import pytest

from regard.kernels.cpu import packed_product as kernels

# Rows: tiles of 8, 4 and 1; 128 rows of int8, whose sums take as much memory as the last tile.
# Outputs: panels of 16 in pairs, one by one, and a part of a panel.
ROWS, OUTPUTS = (1, 3, 8, 13, 33, 128), (16, 20, 48, 131, 257)


def random_matrices(dtype, rows, outputs, inputs):
    rng = np.random.default_rng(rows * outputs)
    if dtype == np.int8:
        return (rng.integers(-127, 128, (n, inputs)).astype(np.int8) for n in (rows, outputs))
    return (rng.standard_normal((n, inputs)).astype(np.float32) for n in (rows, outputs))


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", [4, 20, 256])
def test_product(dtype, outputs, inputs):
    if not kernels.packing_available(dtype == np.int8):
        pytest.skip("this processor has no instructions for packed products")
    for rows in ROWS:
        x, weight = random_matrices(dtype, rows, outputs, inputs)
        panels = kernels.pack_weight(weight)
        y = np.full((rows, outputs), -1, np.int32 if dtype == np.int8 else np.float32)
        kernels.multiply_panels(x, panels, 0, y)
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        if dtype == np.int8:
            assert (y == expected).all()
        else:
            assert np.allclose(y, expected, atol=1e-4)
        # Some of the outputs, and each row alone: the result is the same to the last bit.
        if outputs > 48:
            part = np.empty((rows, 40), y.dtype)
            kernels.multiply_panels(x, panels, 2, part)
            assert (part == y[:, 32:72]).all()
        for r in range(rows):
            alone = np.empty((1, outputs), y.dtype)
            kernels.multiply_panels(x[r : r + 1], panels, 0, alone)
            assert (alone == y[r]).all()


def test_extreme_int8_values():
    if not kernels.packing_available(True):
        pytest.skip("this processor has no instructions for packed products")
    x, weight = np.full((9, 1024), -127, np.int8), np.full((32, 1024), -127, np.int8)
    y = np.empty((9, 32), np.int32)
    kernels.multiply_panels(x, kernels.pack_weight(weight), 0, y)
    assert (y == 1024 * 127 * 127).all()


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_panels(dtype):
    """Weights in every layout: contiguous, transposed, and at an odd address."""
    weight = np.arange(-70, 90).reshape(20, 8).astype(dtype)
    group = 4 if dtype == np.int8 else 1
    padded = np.concatenate((weight, np.zeros((12, 8), dtype)))
    expected = padded.reshape(2, 16, 8 // group, group).transpose(0, 2, 1, 3).reshape(2, 8 // group, 16 * group)
    expected = (expected.astype(np.int16) + 128).astype(np.uint8) if dtype == np.int8 else expected
    shifted = np.frombuffer(b"0" + weight.tobytes(), dtype, offset=1).reshape(20, 8)
    for layout in (weight, np.asfortranarray(weight), shifted):
        panels = kernels.pack_weight(layout)
        assert panels.dtype == expected.dtype
        assert (panels == expected).all()


def test_panels_begin_at_a_cache_line():
    assert kernels.pack_weight(np.zeros((16, 4), np.float32)).ctypes.data % 64 == 0


def test_processors_with_amx_keep_the_products_of_torch(monkeypatch):
    binding = pytest.importorskip("llvmlite.binding")
    features = {"avx512f": True, "avx512vnni": True, "amx-int8": True}
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert (kernels.packing_available(True), kernels.packing_available(False)) == (False, True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert kernels.packing_available(True)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"avx2": True})
    assert not kernels.packing_available(True)
    assert not kernels.packing_available(False)
