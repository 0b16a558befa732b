"""Compiled kernels between matrix products against torch."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from regard.kernels.cpu import decode_rows as kernels
from regard.kernels.cpu.int8_linear import quantize_rows
from regard.layers.feedforward import activate

R, E = 5, 37


@pytest.fixture
def product():
    """An int32 matrix product with its scales and bias, and its value."""
    generator = np.random.default_rng(0)
    y = generator.integers(-5000, 5000, (R, E)).astype(np.int32)
    row_scale, scale, bias = (generator.random(n).astype(np.float32) / 30 for n in (R, E, E))
    return (y, row_scale, scale, bias), torch.from_numpy(y.astype(np.float32) * row_scale[:, None] * scale + bias)


def outputs(is_int8, columns=E):
    return np.zeros((R, columns), np.int8 if is_int8 else np.float32), np.ones(R, np.float32)


def assert_written(out, scale, expected):
    """`out` is the expected matrix, rounded to int8 or not."""
    if out.dtype == np.int8:
        q, s = quantize_rows(expected)
        assert_close(torch.from_numpy(scale)[:, None], s)
        assert int((torch.from_numpy(out).int() - q.int()).abs().max()) <= 1
        assert float((torch.from_numpy(out) == q).float().mean()) > 0.98
    else:
        assert_close(torch.from_numpy(out), expected)


def test_exp_float():
    x = np.linspace(-87, 80, 1001).astype(np.float32)
    assert np.allclose([kernels.exp_float(value) for value in x], np.exp(x), rtol=1e-5)
    assert kernels.exp_float(np.float32(-np.inf)) < 1e-37


@pytest.mark.parametrize("values", [[-3.0, -1.0, -2.0], [0.0, -1.0], [5.0, -9.0, 4.0], [-np.inf, -1e30], [1.0, np.inf]])
def test_largest_value(values):
    row = np.array(values, np.float32)
    assert kernels.largest_value(row, len(row)) == row.max()


def test_multiply_few_rows():
    x, weight, y = torch.randn(3, E), torch.randn(50, E), np.zeros((3, 50), np.float32)
    kernels.multiply_few_rows(x.numpy(), weight.numpy(), y)
    assert_close(torch.from_numpy(y), x @ weight.t())


@pytest.mark.parametrize("is_int8", [True, False])
def test_quantize_rows(is_int8):
    x = torch.randn(R, E)
    x[1] = 0
    out, scale = outputs(is_int8)
    kernels.quantize_rows(x.numpy(), out, scale)
    if is_int8:
        q, s = quantize_rows(x)
        assert_close(torch.from_numpy(out), q)
        assert_close(torch.from_numpy(scale), s[:, 0], rtol=0, atol=0)
    else:
        assert_written(out, scale, x)


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_add_norm_rows(product, is_int8, is_rms, norm_first):
    y, value = product
    x, gain, bias = torch.randn(R, E), torch.rand(E), torch.zeros(E) if is_rms else torch.randn(E)
    norm = torch.nn.functional.rms_norm if is_rms else torch.nn.functional.layer_norm
    total = x + value
    expected = norm(total, (E,), gain, eps=1e-5) if is_rms else norm(total, (E,), gain, bias, eps=1e-5)
    residual, (out, scale) = x.numpy().copy(), outputs(is_int8)
    options = gain.numpy(), bias.numpy(), np.float32(1e-5), is_rms
    kernels.add_norm_rows(residual, *y, *options, norm_first, out, scale)
    assert_written(out, scale, expected)
    assert_close(torch.from_numpy(residual), total if norm_first else expected)
    kernels.norm_rows(total.numpy(), *options, out, scale)
    assert_written(out, scale, expected)


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("name", ["relu", "relu2", "silu", "gelu", "gelu_tanh"])
def test_activate_rows(product, is_int8, name):
    y, value = product
    out, scale = outputs(is_int8)
    kernels.activate_rows(*y, kernels.ACTIVATIONS.index(name), out, scale)
    assert_written(out, scale, activate(name, value))


@pytest.mark.parametrize(("name", "gate"), [("swiglu", "silu"), ("geglu", "gelu_tanh")])
def test_gated_rows(name, gate):
    y = torch.randn(R, 2 * E)
    ones, zeros = np.ones(2 * E, np.float32), np.zeros(2 * E, np.float32)
    out, scale = outputs(False)
    arguments = y.numpy(), np.ones(R, np.float32), ones, zeros
    kernels.activate_rows(*arguments, kernels.ACTIVATIONS.index(name), out, scale)
    assert_written(out, scale, y[:, :E] * activate(gate, y[:, E:]))


def test_embed_rows():
    tokens, table, ids = torch.randn(9, E), torch.randn(8, E), torch.tensor([[1, 2], [3, 4], [5, 6]])
    x = np.full((6, E), np.nan, np.float32)
    positions = np.array([0, -1, 5])
    kernels.embed_rows(ids.numpy(), positions, tokens.numpy(), np.float32(3), table.numpy(), 2, x)
    expected = tokens[ids] * 3 + table[torch.tensor([2, 0, 7])][:, None]
    expected[1] = 0
    assert_close(torch.from_numpy(x), expected.flatten(0, 1))
    kernels.embed_rows(ids.numpy(), positions, tokens.numpy(), np.float32(1), np.empty((0, 0), np.float32), 0, x)
    assert_close(torch.from_numpy(x[:2]), tokens[ids[0]])
