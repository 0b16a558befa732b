"""Norm, linear layer, activation and residual sum against torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from regard.kernels.triton import skinny_linear as kernels
from regard.kernels.triton.skinny_linear import RowNorm, reference_skinny_linear, skinny_linear
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.layers.quantized import quantize_float8
from tests.attention.helpers import FakeCudaTensor
from tests.kernels.triton.helpers import combine

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
# The interpreter cannot multiply bf16; float16 takes the same path through the kernel.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3} | ({} if is_interpreted() else {torch.bfloat16: 1e-2})


@pytest.fixture(autouse=True, params=[0, 4096], ids=["matrix units", "vectors"])
def _max_vector_results(request, monkeypatch):
    """Both ways to multiply several rows."""
    monkeypatch.setattr(kernels, "MAX_VECTOR_RESULTS", request.param)


def random(*shape, dtype):
    return torch.randn(*shape).to(DEVICE, dtype)


def make_norm(width, dtype, kind="layer", has_bias=True):
    return RowNorm(random(width, dtype=dtype), random(width, dtype=dtype) if has_bias else None, 1e-5, kind)


def to_double(value):
    if isinstance(value, RowNorm):
        return RowNorm(*(to_double(x) for x in value))
    return value.double() if isinstance(value, torch.Tensor) else value


def assert_equals_float64(x, weight, bias=None, **options):
    expected = reference_skinny_linear(
        *map(to_double, (x, weight, bias)), **{k: to_double(v) for k, v in options.items()}
    )
    out = skinny_linear(x, weight, bias, **options)
    assert out.shape == expected.shape
    product_dtype = x.dtype if "scale" in options else weight.dtype
    assert out.dtype == (product_dtype if options.get("residual") is None else options["residual"].dtype)
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= TOLERANCE[product_dtype] * expected.norm()


SIZES = [(1, 16, 1), (1, 512, 11), (2, 24, 7), (3, 1500, 13), (4, 40, 35), (5, 40, 9), (16, 600, 5)]
NORMS = [None, ("layer", True), ("rms", False)]


@pytest.mark.parametrize(("sizes", "norm", "dtype"), combine(3, SIZES, NORMS, list(TOLERANCE)), ids=str)
def test_kernel_equals_torch(sizes, norm, dtype):
    torch.manual_seed(0)
    rows, width, outputs = sizes
    norm = None if norm is None else make_norm(width, dtype, *norm)
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((rows, width), (outputs, width), (outputs,)))
    assert_equals_float64(x, weight, bias, norm=norm)
    assert_equals_float64(x + 100, weight, norm=norm)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "relu2", "silu"])
def test_activations_and_residual(activation):
    torch.manual_seed(0)
    rows = 3
    x, weight, bias, residual = (
        random(*shape, dtype=torch.float32) for shape in ((rows, 32), (9, 32), (9,), (rows, 9))
    )
    assert_equals_float64(x, weight, bias, activation=activation)
    assert_equals_float64(x, weight, bias, activation=activation, residual=residual)
    for kind, has_bias in (("layer", True), ("layer", False), ("rms", False)):
        norm = make_norm(9, torch.float32, kind, has_bias)
        assert_equals_float64(x, weight, bias, activation=activation, residual=residual, residual_norm=norm)


@pytest.mark.parametrize("rows", [1, 6])
def test_residual_stream_in_float32(rows):
    torch.manual_seed(0)
    x, weight = random(rows, 32, dtype=torch.float32), random(20, 32, dtype=torch.float16)
    residual = random(rows, 20, dtype=torch.float32)
    norm = make_norm(32, torch.float32)
    assert_equals_float64(x, weight, norm=norm, residual=residual)
    assert_equals_float64(x, weight, norm=norm)
    assert skinny_linear(x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert reference_skinny_linear(x, weight, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 40, 7), (2, 1500, 5), (5, 24, 17)])
def test_float8_weights(rows, width, outputs, dtype):
    torch.manual_seed(0)
    x, bias, residual = (random(*shape, dtype=dtype) for shape in ((rows, width), (outputs,), (rows, outputs)))
    gains = torch.logspace(-2, 1, outputs, device=DEVICE)
    weight, scale = quantize_float8(random(outputs, width, dtype=torch.float32) * gains[:, None])
    assert len(scale.unique()) > 3
    assert_equals_float64(x, weight, bias, scale=scale)
    norm = make_norm(width, dtype)
    assert_equals_float64(x, weight, bias, scale=scale, norm=norm, activation="relu", residual=residual)
    assert torch.equal(skinny_linear(x, weight, scale=scale), skinny_linear(x, weight, scale=4 * scale) / 4)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_several_tiles_per_program(rows, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_PROGRAMS", 2)
    torch.manual_seed(0)
    x, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((rows, 40), (150, 40), (150,)))
    norm, residual = make_norm(40, torch.float32), random(rows, 150, dtype=torch.float32)
    assert_equals_float64(x, weight, bias, norm=norm, residual=residual)


def test_strided_inputs():
    torch.manual_seed(0)
    x, weight = random(2, 64, dtype=torch.float32)[:, 3:35], random(20, 50, dtype=torch.float32)[:, 5:37]
    assert_equals_float64(x, weight, residual=random(2, 41, dtype=torch.float32)[:, 1::2])


def test_supported_inputs():
    x = torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(FakeCudaTensor)
    weight = torch.zeros(16, 8, dtype=torch.bfloat16)
    assert kernels.supports(x, weight)
    assert kernels.supports(x.float(), weight)
    assert kernels.supports(x, weight.to(torch.float8_e4m3fn))
    assert not kernels.supports(x, weight.to(torch.float8_e5m2))
    assert not kernels.supports(x.as_subclass(torch.Tensor), weight)
    assert not kernels.supports(x.double(), weight)
    assert not kernels.supports(x, weight.new_zeros(8, 16).T)
    assert not kernels.supports(x.new_zeros(17, 8), weight)
