"""relu(W x + b) and its gradients beside torch's own: on a GPU, or without one in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from torch import nn

from regard.attention import triton_here
from regard.layers import linear_relu
from regard.layers.feedforward import FeedForward
from tests.attention.helpers import OnGPU

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"


def both(rows, width, hidden, dtype=torch.float32):
    """Outputs and gradients of ours and of torch's in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(width, hidden).to(DEVICE, dtype)
    x, grad = (
        torch.randn(rows, width, device=DEVICE, dtype=dtype),
        torch.randn(rows, hidden, device=DEVICE, dtype=dtype),
    )
    results = []
    for function, kind in ((linear_relu.linear_relu, dtype), (lambda x, w, b: (x @ w.T + b).relu(), torch.float64)):
        given = [one.detach().to(kind).requires_grad_() for one in (x, layer.weight, layer.bias)]
        out = function(*given)
        results.append([out, *torch.autograd.grad(out, given, grad.to(kind))])
    return results


@pytest.mark.parametrize(("rows", "width", "hidden"), [(1, 8, 16), (37, 24, 300), (150, 16, 64)])
def test_equals_torchs_own(rows, width, hidden):
    for one, other in zip(*both(rows, width, hidden)):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_in_halves():
    for one, other in zip(*both(70, 32, 64, torch.float16)):
        assert (one.double() - other).norm() <= 2e-3 * other.norm()


def test_the_operator_keeps_torchs_rules():
    x, weight, bias = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((5, 8), (16, 8), (16,)))
    torch.library.opcheck(linear_relu.linear_relu.operator, (x, weight, bias))


def test_feed_forward_takes_it_where_it_can(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    network = FeedForward(8, 32).to(DEVICE)
    x = torch.randn(6, 8, device=DEVICE)
    expected = network(x)
    monkeypatch.setattr(linear_relu, "takes", lambda x, layer: True)
    torch.testing.assert_close(network(x), expected)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), network.inner.weight),
                               torch.autograd.grad(expected.sum(), network.inner.weight))  # fmt: skip


def test_what_it_takes():
    layer, narrow = nn.Linear(8, 16), torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert linear_relu.takes(narrow, layer)
    assert not linear_relu.takes(narrow.float(), layer)
    assert not linear_relu.takes(narrow[None], layer)
    assert not linear_relu.takes(narrow, nn.Linear(8, 16, bias=False))
    assert not linear_relu.takes(torch.zeros(4, 8, dtype=torch.bfloat16), layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_relu.takes(narrow.float(), layer)
