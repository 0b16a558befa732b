"""norm(x + dropout(y)) and its gradients beside torch's own: on a GPU, or without one in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from torch import nn

from regard.attention import triton_here
from regard.layers import add_norm
from regard.layers.blocks import BlockConfig, Residual

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"


def example(rows, width, dtype):
    """x, y, gain and bias, and a gradient."""
    torch.manual_seed(0)
    x, y, grad = (torch.randn(rows, width, device=DEVICE, dtype=dtype) for _ in range(3))
    gain, bias = (torch.randn(width, device=DEVICE) for _ in range(2))
    return [x, y, gain, bias], grad


def exact(given, grad, kept=1.0):
    """In float64, with a mask that is given."""
    x, y, gain, bias = (one.detach().double().requires_grad_() for one in given)
    out = nn.functional.layer_norm(x + y * kept, x.shape[-1:], gain, bias, 1e-5)
    return [out, *torch.autograd.grad(out, (x, y, gain, bias), grad.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (37, 24), (5, 512), (300, 20)])
def test_equals_torchs_own(rows, width, dtype, monkeypatch):
    monkeypatch.setattr(add_norm, "CELLS", 256)
    monkeypatch.setattr(add_norm, "PROGRAMS", 3)
    given, grad = example(rows, width, dtype)
    given = [one.requires_grad_() for one in given]
    out, _ = add_norm.add_norm(*given, None, 0.0, 1e-5)
    found = [out, *torch.autograd.grad(out, given, grad)]
    for one, other in zip(found, exact(given, grad)):
        assert (one.double() - other).norm() <= (1e-5 if dtype == torch.float32 else 2e-3) * (other.norm() + 1e-2)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_the_same_in_both_directions(p):
    (x, y, gain, bias), grad = example(64, 128, torch.float32)
    seed = torch.tensor([12345], device=DEVICE)
    x = torch.zeros_like(x).requires_grad_()
    given = [x, y.requires_grad_(), gain.requires_grad_(), bias.requires_grad_()]
    out, total = add_norm.add_norm(*given, seed, p, 1e-5)
    mask = total.detach() != 0
    torch.testing.assert_close(total, torch.where(mask, y / (1 - p), 0.0))
    assert mask.float().mean().item() == pytest.approx(1 - p, abs=0.02)  # 8192 draws: five deviations are 0.03
    found = [out, *torch.autograd.grad(out, given, grad)]
    for one, other in zip(found, exact(given, grad, mask / (1 - p))):
        assert (one.double() - other).norm() <= 1e-5 * other.norm()


def test_masks_have_no_pattern():
    """Rows, columns and seeds agree with each other as often as chance has it."""
    masks = []
    for seed in (1, 2):
        y = torch.ones(128, 256, device=DEVICE)
        norm = nn.LayerNorm(256).to(DEVICE)
        given = torch.zeros_like(y), y, norm.weight, norm.bias, torch.tensor([seed], device=DEVICE)
        masks.append((add_norm.add_norm(*given, 0.5, 1e-5)[1] != 0).float())
    one, other = masks
    for a, b in ((one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[:, 4:], one[:, :-4])):
        assert (a == b).float().mean().item() == pytest.approx(0.5, abs=0.02)  # seven deviations
    assert (one.mean(0) - 0.5).abs().max() < 0.25
    assert (one.mean(1) - 0.5).abs().max() < 0.2


def test_the_operator_keeps_torchs_rules():
    given, _ = example(5, 16, torch.float32)
    given = [one.requires_grad_() for one in given]
    torch.library.opcheck(add_norm.add_norm, (*given, torch.tensor([3], device=DEVICE), 0.3, 1e-5))
    torch.library.opcheck(add_norm.add_norm, (*given, None, 0.0, 1e-5))


@pytest.mark.parametrize("training", [False, True])
def test_a_residual_takes_it_where_it_can(training, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    residual = Residual(BlockConfig(16, 2, 32, dropout=0.0, norm="post")).to(DEVICE).train(training)
    x = torch.randn(6, 16, device=DEVICE)
    expected = residual(x, torch.sin)
    monkeypatch.setattr(add_norm, "takes", lambda x, y, norm: True)
    torch.testing.assert_close(residual(x, torch.sin), expected)
    residual.dropout.p = 0.5
    dropped = torch.compile(residual, backend="aot_eager", fullgraph=True)(x, torch.sin)
    assert torch.allclose(dropped, expected) != training
    scaled = Residual(BlockConfig(16, 2, 32, dropout=0.0, norm="post", layer_scale=0.1)).to(DEVICE)
    torch.testing.assert_close(scaled(x, torch.sin), scaled.norm(x + 0.1 * x.sin()))


class _Cuda(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_what_it_takes():
    x = torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(_Cuda)
    assert add_norm.takes(x, x, nn.LayerNorm(8))
    assert not add_norm.takes(x, x, nn.RMSNorm(8))
    assert not add_norm.takes(x, x.float(), nn.LayerNorm(8))
    assert not add_norm.takes(x.float(), x.float(), nn.LayerNorm(8))
    assert not add_norm.takes(x[None], x[None], nn.LayerNorm(8))
    assert not add_norm.takes(x.new_zeros(1, 5000), x.new_zeros(1, 5000), nn.LayerNorm(5000))
