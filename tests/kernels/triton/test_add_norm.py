"""x + dropout(y), its norm and gradients against torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from torch import nn

from regard.kernels.triton import add_norm
from regard.kernels.triton.add_norm import add_norm_forward
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.attention.helpers import FakeCudaTensor
from tests.kernels.triton.helpers import combine

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"


def make_inputs(rows, width, dtype, x_dtype=None):
    """x, y, gain and bias, and gradients of the normalized sum and of the sum."""
    torch.manual_seed(0)
    x, sum_grad = (torch.randn(rows, width, device=DEVICE, dtype=x_dtype or dtype) for _ in range(2))
    y, grad = (torch.randn(rows, width, device=DEVICE, dtype=dtype) for _ in range(2))
    gain, bias = (torch.randn(width, device=DEVICE) for _ in range(2))
    return [x, y, gain, bias], (grad, sum_grad)


def expected_results(inputs, grads, dropout_mask=1.0):
    """Normalized sum, sum and gradients in float64; LayerNorm, or without a bias RMSNorm."""
    x, y, gain, bias = (None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs)
    total = x + y * dropout_mask
    if bias is None:
        out = nn.functional.rms_norm(total, x.shape[-1:], gain, 1e-5)
    else:
        out = nn.functional.layer_norm(total, x.shape[-1:], gain, bias, 1e-5)
    tensors = [tensor for tensor in (x, y, gain, bias) if tensor is not None]
    return [out, total, *torch.autograd.grad((out, total), tensors, [grad.double() for grad in grads])]


SIZES = [(1, 16), (37, 24), (5, 512), (300, 20)]
DTYPES = [(torch.float32,), (torch.float16,), (torch.float16, torch.float32)]


@pytest.mark.parametrize(("sizes", "is_centered", "dtypes"), combine(2, SIZES, [True, False], DTYPES), ids=str)
def test_kernel_equals_torch(sizes, is_centered, dtypes, monkeypatch):
    rows, width = sizes
    monkeypatch.setattr(add_norm, "TILE_ELEMENTS", 256)
    monkeypatch.setattr(add_norm, "PROGRAMS", 3)
    (x, y, gain, bias), grads = make_inputs(rows, width, *dtypes)
    inputs = [x.requires_grad_(), y.requires_grad_(), gain.requires_grad_(), bias.requires_grad_()]
    inputs[3] = inputs[3] if is_centered else None
    out, total = add_norm_forward(*inputs, None, 0.0, 1e-5)
    assert (out.dtype, total.dtype) == (dtypes[0], dtypes[-1])
    input_grads = torch.autograd.grad((out, total), [tensor for tensor in inputs if tensor is not None], grads)
    assert [grad.dtype for grad in input_grads[:2]] == [dtypes[-1], dtypes[0]]
    tolerance = 1e-5 if dtypes[0] == torch.float32 else 2e-3
    for actual, expected in zip([out, total, *input_grads], expected_results(inputs, grads), strict=True):
        assert (actual.double() - expected).norm() <= tolerance * (expected.norm() + 1e-2)


def test_sum_without_gradient():
    inputs, (grad, sum_grad) = make_inputs(7, 32, torch.float32)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    input_grads = torch.autograd.grad(add_norm_forward(*inputs, None, 0.0, 1e-5)[0], inputs, grad)
    for actual, expected in zip(input_grads, expected_results(inputs, (grad, 0 * sum_grad))[2:], strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_mask_is_the_same_forward_and_backward(p):
    (x, y, gain, bias), grads = make_inputs(64, 128, torch.float32)
    seed = torch.tensor([12345], device=DEVICE)
    x = torch.zeros_like(x).requires_grad_()
    inputs = [x, y.requires_grad_(), gain.requires_grad_(), bias.requires_grad_()]
    out, total = add_norm_forward(*inputs, seed, p, 1e-5)
    mask = total.detach() != 0
    torch.testing.assert_close(total, torch.where(mask, y / (1 - p), 0.0))
    assert mask.float().mean().item() == pytest.approx(1 - p, abs=0.02)  # 8192 draws: five standard deviations are 0.03
    results = [out, total, *torch.autograd.grad((out, total), inputs, grads)]
    for actual, expected in zip(results, expected_results(inputs, grads, mask / (1 - p)), strict=True):
        assert (actual.double() - expected).norm() <= 1e-5 * expected.norm()


def test_dropout_masks_are_uncorrelated():
    """Masks of different rows, columns and seeds agree in about half of the elements."""
    masks = []
    for seed in (1, 2):
        y = torch.ones(128, 256, device=DEVICE)
        norm = nn.LayerNorm(256).to(DEVICE)
        inputs = torch.zeros_like(y), y, norm.weight, norm.bias, torch.tensor([seed], device=DEVICE)
        masks.append((add_norm_forward(*inputs, 0.5, 1e-5)[1] != 0).float())
    mask, other = masks
    for a, b in ((mask, other), (mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]), (mask[:, 4:], mask[:, :-4])):
        assert (a == b).float().mean().item() == pytest.approx(0.5, abs=0.02)  # seven standard deviations
    assert (mask.mean(0) - 0.5).abs().max() < 0.25
    assert (mask.mean(1) - 0.5).abs().max() < 0.2


def test_opcheck():
    inputs, _ = make_inputs(5, 16, torch.float32)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(add_norm_forward.operator, (*inputs, torch.tensor([3], device=DEVICE), 0.3, 1e-5))
    torch.library.opcheck(add_norm_forward.operator, (*inputs, None, 0.0, 1e-5))
    torch.library.opcheck(add_norm_forward.operator, (*inputs[:3], None, None, 0.0, 1e-5))


def test_supported_inputs():
    x = torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(FakeCudaTensor)
    assert add_norm.supports(x, x)
    assert add_norm.supports(x[None].float(), x[None])
    assert not add_norm.supports(x, x.float())
    assert not add_norm.supports(x.float(), x.float())
    assert not add_norm.supports(x, x[:2])
    assert not add_norm.supports(x.new_zeros(1, 5000), x.new_zeros(1, 5000))
