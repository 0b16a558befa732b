"""Float8 weights: rounding, exactness in bfloat16, and the layers of a converted model."""

import pytest
import torch
from torch import nn

from regard.kernels.triton import linear_relu
from regard.layers.quantized import Float8Linear, quantize_float8
from tests.attention.helpers import FakeCudaTensor


def random_weight(outputs=40, width=64):
    """Channels of very different sizes, one of them zero."""
    weight = torch.randn(outputs, width, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-20, 20, outputs)[:, None]
    weight[5] = 0
    return weight


def test_rounding_error_is_that_of_three_bits():
    weight = random_weight()
    q, scale = quantize_float8(weight)
    restored = q.float() * scale[:, None]
    amax = weight.abs().amax(1, keepdim=True)
    # Half a unit in the last of four significant bits; below the normal range, half of the smallest step.
    assert ((restored - weight).abs() <= (weight.abs() / 16).maximum(amax / 224 / 2**10)).all()
    assert (restored[5] == 0).all()


@pytest.mark.parametrize("amax", [448.0, 448.1, 464.0, 479.0, 1.75, 1.7500001, 1e-38, 3e38])
def test_largest_weight_is_finite(amax):
    q, scale = quantize_float8(torch.tensor([[amax, -amax]]))
    torch.testing.assert_close(q.float() * scale[:, None], torch.tensor([[amax, -amax]]), rtol=1 / 15, atol=1e-30)


def test_weights_are_exact_in_bfloat16():
    layer = Float8Linear.from_linear(nn.Linear(64, 40, dtype=torch.bfloat16))
    layer.weight, layer.scale = quantize_float8(random_weight())
    assert layer.dequantize().dtype == torch.bfloat16
    assert torch.equal(layer.dequantize().double(), layer.weight.double() * layer.scale.double()[:, None])


def test_layer_equals_linear_of_rounded_weights():
    torch.manual_seed(0)
    linear, x = nn.Linear(24, 7), torch.randn(2, 3, 24)
    layer = Float8Linear.from_linear(linear)
    expected = nn.functional.linear(x, layer.weight.float() * layer.scale[:, None], linear.bias)
    torch.testing.assert_close(layer(x), expected)
    error = (layer(x) - linear(x)).norm() / linear(x).norm()
    assert 0 < error < 0.05


def test_fused_relu_does_not_read_float8_weights():
    x, bias = torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(FakeCudaTensor), torch.zeros(16)
    weight = torch.zeros(16, 8)
    supported = linear_relu.supports(x, weight, bias)
    assert supported == linear_relu.triton_available()
    assert not linear_relu.supports(x, weight.to(torch.float8_e4m3fn), bias)
