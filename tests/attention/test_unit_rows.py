"""Rows of length 1 and their gradients beside torch's own: on a GPU, or without one in Triton's interpreter."""

import pytest
import torch
from torch import nn

from regard.attention import Cosine, scores, triton_here, unit_rows
from regard.attention.unit_rows import unit_rows as brought

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"
# How far gradients may lie from the exact ones, which are rounded once.
CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(x, scale, grad, eps):
    x = x.detach().double().requires_grad_()
    scale = None if scale is None else scale.detach().double().requires_grad_()
    out = nn.functional.normalize(x, dim=-1, eps=eps)
    out = out if scale is None else out * scale
    given = [x] if scale is None else [x, scale]
    return [out, *torch.autograd.grad(out, given, grad.double())]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("scaled", ["no", "one", "heads"])
@pytest.mark.parametrize("shape", [(5, 16), (3, 70, 8), (2, 3, 65, 40), (2, 3, 0, 8)])
def test_equals_torchs_own(shape, scaled, dtype, monkeypatch):
    monkeypatch.setattr(unit_rows, "CELLS", 512)
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    numbers = (shape[-3], 1, 1) if scaled == "heads" and len(shape) > 2 else (1,)
    scale = None if scaled == "no" else (1 + torch.rand(numbers, device=DEVICE)).requires_grad_()
    out = brought(x.requires_grad_(), scale, 1e-6)
    found = [out, *torch.autograd.grad(out, [x] if scale is None else [x, scale], grad)]
    for one, other in zip(found, exact(x, scale, grad, 1e-6)):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= CLOSE[dtype] * (other.norm() + 1e-9)


def test_any_strides():
    """Heads of a projection side by side, and halves of one: what layers give."""
    torch.manual_seed(0)
    both = torch.randn(2, 9, 2, 3, 16, device=DEVICE)
    for x in (both[:, :, 0].transpose(1, 2), both[..., ::2][:, :, 1], both[:, :, 1, 0]):
        torch.testing.assert_close(brought(x, None, 1e-6), nn.functional.normalize(x, dim=-1))
        grad = torch.randn_like(x).mT.contiguous().mT
        dx, _ = torch.ops.regard.unit_rows_backward(grad, x, None, 1e-6)
        torch.testing.assert_close(dx, exact(x, None, grad, 1e-6)[1].float(), atol=1e-6, rtol=1e-5)


def test_a_vector_without_direction_stays_what_it_is():
    x = torch.tensor([[0.0, 0.0], [3e-7, 4e-7]], device=DEVICE, requires_grad=True)
    out = brought(x, None, 1e-6)
    assert out.flatten().tolist() == pytest.approx([0.0, 0.0, 0.3, 0.4])
    [dx] = torch.autograd.grad(out, x, torch.ones_like(out))
    assert dx.flatten().tolist() == pytest.approx([1e6] * 4)


@pytest.mark.parametrize("heads", [None, 3])
def test_cosine_through_it_is_cosine(heads, monkeypatch):
    torch.manual_seed(0)
    score = Cosine(10.0, learned=True, heads=heads).to(DEVICE)
    q, k = (torch.randn(2, 3, n, 16, device=DEVICE, requires_grad=True) for n in (4, 6))
    given = [q, k, *score.parameters()]
    results = []
    for takes in (True, False):
        monkeypatch.setattr(scores.unit_rows, "takes", lambda x, takes=takes: takes)
        out = score(q, k)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_compilers_see_one_operator():
    function = torch.compile(lambda x: brought(x, None, 1e-6).sum(), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 16, device=DEVICE, requires_grad=True)
    [found] = torch.autograd.grad(function(x), x)
    [expected] = torch.autograd.grad(nn.functional.normalize(x, dim=-1).sum(), x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
