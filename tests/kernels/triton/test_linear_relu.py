"""relu(x Wᵀ + b) and its gradients against torch: on a GPU, or in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from torch import nn

from regard.kernels.triton import linear_relu
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.layers.feedforward import FeedForward
from tests.attention.helpers import FakeCudaTensor

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"


def run_both(rows, width, hidden, dtype=torch.float32):
    """Outputs and gradients of the kernel, and of torch in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(width, hidden).to(DEVICE, dtype)
    x, grad = (
        torch.randn(rows, width, device=DEVICE, dtype=dtype),
        torch.randn(rows, hidden, device=DEVICE, dtype=dtype),
    )
    results = []
    plain = lambda x, w, b: (x @ w.T + b).relu()  # noqa: E731
    for function, run_dtype in ((linear_relu.linear_relu_forward, dtype), (plain, torch.float64)):
        inputs = [tensor.detach().to(run_dtype).requires_grad_() for tensor in (x, layer.weight, layer.bias)]
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(run_dtype))])
    return results


@pytest.mark.parametrize(("rows", "width", "hidden"), [(1, 8, 16), (37, 24, 300), (150, 16, 64)])
def test_kernel_equals_torch(rows, width, hidden):
    for actual, expected in zip(*run_both(rows, width, hidden)):
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def test_float16_equals_torch():
    for actual, expected in zip(*run_both(70, 32, 64, torch.float16)):
        assert (actual.double() - expected).norm() <= 2e-3 * expected.norm()


def test_opcheck():
    x, weight, bias = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((5, 8), (16, 8), (16,)))
    torch.library.opcheck(linear_relu.linear_relu_forward.operator, (x, weight, bias))


def test_feed_forward_with_kernel_equals_feed_forward_without(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    network = FeedForward(8, 32).to(DEVICE)
    x = torch.randn(6, 8, device=DEVICE)
    expected = network(x)
    monkeypatch.setattr(linear_relu, "supports", lambda x, weight, bias: True)
    torch.testing.assert_close(network(x), expected)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), network.fc1.weight),
                               torch.autograd.grad(expected.sum(), network.fc1.weight))  # fmt: skip


def test_supported_inputs():
    layer, x = nn.Linear(8, 16), torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(FakeCudaTensor)
    parameters = layer.weight, layer.bias
    assert linear_relu.supports(x, *parameters)
    assert not linear_relu.supports(x.float(), *parameters)
    assert not linear_relu.supports(x[None], *parameters)
    assert not linear_relu.supports(x, layer.weight, None)
    assert not linear_relu.supports(torch.zeros(4, 8, dtype=torch.bfloat16), *parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_relu.supports(x.float(), *parameters)
