"""L2 normalization and its gradients against torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from torch import nn

from regard.attention import Cosine
from regard.kernels.triton import l2_normalize as kernels
from regard.kernels.triton.l2_normalize import l2_normalize
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.attention.helpers import FakeCudaTensor
from tests.kernels.triton.helpers import combine

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
# Relative errors of outputs and gradients.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def expected_results(q, k, log_scale, grads, eps=1e-6):
    inputs = [x.detach().double().requires_grad_() for x in (q, k, log_scale) if x is not None]
    q, k = (nn.functional.normalize(x, dim=-1, eps=eps) for x in inputs[:2])
    outputs = q if log_scale is None else q * inputs[2].exp(), k
    return *outputs, *torch.autograd.grad(outputs, inputs, [grad.double() for grad in grads])


def kernel_results(q, k, log_scale, grads, eps=1e-6):
    outputs = l2_normalize(q, k, log_scale, eps)
    return *outputs, *torch.autograd.grad(outputs, [x for x in (q, k, log_scale) if x is not None], grads)


# Shapes of q and k, which may differ in heads, rows and number of axes.
SHAPES = [
    ((5, 16), (7, 16)),
    ((3, 70, 8), (1, 70, 8)),
    ((2, 3, 65, 40), (2, 1, 9, 40)),
    ((2, 3, 1, 8), (2, 3, 130, 8)),
    ((2, 3, 0, 8), (2, 3, 5, 8)),
    ((2, 3, 4, 8), (2, 3, 0, 8)),
]


@pytest.mark.parametrize(
    ("shapes", "scale", "dtype"), combine(3, SHAPES, ["none", "shared", "per head"], list(TOLERANCE)), ids=str
)
def test_kernel_equals_torch(shapes, scale, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "TILE_ELEMENTS", 512)
    torch.manual_seed(0)
    q, k = (random(*shape, dtype=dtype) for shape in shapes)
    grads = [torch.randn_like(x) for x in (q, k)]
    scale_shape = (shapes[0][-3], 1, 1) if scale == "per head" and len(shapes[0]) > 2 else (1,)
    log_scale = None if scale == "none" else random(*scale_shape)
    expected = expected_results(q, k, log_scale, grads)
    for x, y in zip(kernel_results(q, k, log_scale, grads), expected, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).norm() <= TOLERANCE[dtype] * (y.norm() + 1e-9)


def test_non_contiguous_inputs():
    """Views of projections, as in layers: contiguous heads, and slices."""
    torch.manual_seed(0)
    both = torch.randn(2, 9, 2, 3, 16, device=DEVICE)
    views = both[:, :, 0].transpose(1, 2), both[..., ::2][:, :, 1], both[:, :, 1, 0]
    for q, k in ((views[0], views[2]), (views[2], views[0]), (views[1], views[1].transpose(1, 2))):
        q, k = (x.detach().requires_grad_() for x in (q, k))
        grads = [torch.randn_like(x).mT.contiguous().mT for x in (q, k)]
        for x, y in zip(kernel_results(q, k, None, grads), expected_results(q, k, None, grads), strict=True):
            torch.testing.assert_close(x, y.float(), atol=1e-6, rtol=1e-5)


def test_vectors_shorter_than_eps_are_divided_by_eps():
    x = torch.tensor([[0.0, 0.0], [3e-7, 4e-7]], device=DEVICE, requires_grad=True)
    for out in l2_normalize(x, x, None, 1e-6):
        assert out.flatten().tolist() == pytest.approx([0.0, 0.0, 0.3, 0.4])
        [dx] = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
        assert dx.flatten().tolist() == pytest.approx([1e6] * 4)


@pytest.mark.parametrize("heads", [None, 4])
def test_cosine_with_kernel_equals_cosine_without(heads, monkeypatch):
    torch.manual_seed(0)
    score = Cosine(10.0, learned=True, heads=heads).to(DEVICE)
    q, k = random(2, 4, 5, 16), random(2, 4, 6, 16)
    inputs = [q, k, *score.parameters()]
    results = []
    for supported in (True, False):
        monkeypatch.setattr(kernels, "supports", lambda q, k, supported=supported: supported)
        out = score(q, k)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_supported_inputs():
    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype).as_subclass(FakeCudaTensor)

    assert kernels.supports(zeros(2, 4, 3, 8), zeros(2, 1, 5, 8))
    assert not kernels.supports(torch.zeros(3, 8), torch.zeros(3, 8))
    assert not kernels.supports(zeros(3, 8), zeros(3, 9))
    assert not kernels.supports(zeros(3, 8), zeros(3, 8, dtype=torch.float32))
    assert not kernels.supports(zeros(3, 2000), zeros(3, 2000))


@pytest.mark.parametrize("log_scale", [None, (1,), (3, 1, 1)], ids=str)
def test_compiled_gradients_equal_torch(log_scale):
    torch.manual_seed(0)
    q, k = random(2, 3, 5, 16), random(2, 1, 4, 16)
    log_scale = None if log_scale is None else random(*log_scale)
    grads = [torch.randn_like(x) for x in (q, k)]
    function = torch.compile(l2_normalize, backend="aot_eager", fullgraph=True)
    inputs = [x for x in (q, k, log_scale) if x is not None]
    outputs = function(q, k, log_scale, 1e-6)
    actual = [*outputs, *torch.autograd.grad(outputs, inputs, grads)]
    for x, y in zip(actual, expected_results(q, k, log_scale, grads), strict=True):
        torch.testing.assert_close(x, y.float(), atol=1e-5, rtol=1e-5)


def test_opcheck():
    q, k, log_scale = torch.randn(3, 5, 16), torch.randn(5, 2, 16).transpose(0, 1), torch.zeros(3, 1, 1)
    for scale in (None, log_scale):
        q, k, scale = (None if x is None else x.to(DEVICE) for x in (q, k, scale))
        torch.library.opcheck(kernels.l2_normalize_forward.operator, (q, k, scale, 1e-6))
        torch.library.opcheck(kernels.l2_normalize_backward.operator, (q, k, q, k, scale, 1e-6))
