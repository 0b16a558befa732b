"""x + dropout(y), its norm, and gradients beside torch's own: on a GPU, or without one in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from torch import nn

from regard.attention import Offsets, triton_here
from regard.layers import add_norm
from regard.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock, Residual
from regard.layers.norms import RMSNorm
from tests.attention.helpers import OnGPU

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"


def example(rows, width, dtype, wide=None):
    """x (in `wide`), y, gain and bias, and gradients by the normed sum and by the sum itself."""
    torch.manual_seed(0)
    x, sum_grad = (torch.randn(rows, width, device=DEVICE, dtype=wide or dtype) for _ in range(2))
    y, grad = (torch.randn(rows, width, device=DEVICE, dtype=dtype) for _ in range(2))
    gain, bias = (torch.randn(width, device=DEVICE) for _ in range(2))
    return [x, y, gain, bias], (grad, sum_grad)


def exact(given, grads, kept=1.0):
    """Normed sum, sum and gradients in float64, with a mask that is given; without a bias the root mean square's."""
    x, y, gain, bias = (None if one is None else one.detach().double().requires_grad_() for one in given)
    total = x + y * kept
    if bias is None:
        out = nn.functional.rms_norm(total, x.shape[-1:], gain, 1e-5)
    else:
        out = nn.functional.layer_norm(total, x.shape[-1:], gain, bias, 1e-5)
    tensors = [one for one in (x, y, gain, bias) if one is not None]
    return [out, total, *torch.autograd.grad((out, total), tensors, [one.double() for one in grads])]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16,), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (37, 24), (5, 512), (300, 20)])
def test_equals_torchs_own(rows, width, centred, dtypes, monkeypatch):
    monkeypatch.setattr(add_norm, "CELLS", 256)
    monkeypatch.setattr(add_norm, "PROGRAMS", 3)
    given, grads = example(rows, width, *dtypes)
    given = [one.requires_grad_() for one in given[:3]] + [given[3].requires_grad_() if centred else None]
    out, total = add_norm.add_norm(*given, None, 0.0, 1e-5)
    assert (out.dtype, total.dtype) == (dtypes[0], dtypes[-1])
    found = [out, total, *torch.autograd.grad((out, total), [one for one in given if one is not None], grads)]
    assert [one.dtype for one in found[2:4]] == [dtypes[-1], dtypes[0]]
    for one, other in zip(found, exact(given, grads), strict=True):
        assert (one.double() - other).norm() <= (1e-5 if dtypes[0] == torch.float32 else 2e-3) * (other.norm() + 1e-2)


def test_nobody_may_ask_for_the_sum():
    given, (grad, sum_grad) = example(7, 32, torch.float32)
    given = [one.requires_grad_() for one in given]
    found = torch.autograd.grad(add_norm.add_norm(*given, None, 0.0, 1e-5)[0], given, grad)
    for one, other in zip(found, exact(given, (grad, 0 * sum_grad))[2:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_the_same_in_both_directions(p):
    (x, y, gain, bias), grads = example(64, 128, torch.float32)
    seed = torch.tensor([12345], device=DEVICE)
    x = torch.zeros_like(x).requires_grad_()
    given = [x, y.requires_grad_(), gain.requires_grad_(), bias.requires_grad_()]
    out, total = add_norm.add_norm(*given, seed, p, 1e-5)
    mask = total.detach() != 0
    torch.testing.assert_close(total, torch.where(mask, y / (1 - p), 0.0))
    assert mask.float().mean().item() == pytest.approx(1 - p, abs=0.02)  # 8192 draws: five deviations are 0.03
    found = [out, total, *torch.autograd.grad((out, total), given, grads)]
    for one, other in zip(found, exact(given, grads, mask / (1 - p)), strict=True):
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
    torch.library.opcheck(add_norm.add_norm.operator, (*given, torch.tensor([3], device=DEVICE), 0.3, 1e-5))
    torch.library.opcheck(add_norm.add_norm.operator, (*given, None, 0.0, 1e-5))
    torch.library.opcheck(add_norm.add_norm.operator, (*given[:3], None, None, 0.0, 1e-5))


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


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
def test_norms_before_the_sublayers_take_it_too(block, kind, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch.manual_seed(0)
    config = BlockConfig(16, 2, 32, dropout=0.0, norm="pre", norm_kind=kind)
    block = (block(config, "dot") if block is EncoderBlock else block(config, "dot", "dot")).to(DEVICE)
    offsets = Offsets.of(torch.tensor([0, 2, 6], device=DEVICE))
    x, memory = torch.randn(2, 6, 16, device=DEVICE).unbind()
    rest = (offsets,) if isinstance(block, EncoderBlock) else (offsets, memory, offsets)

    def outputs_and_gradients(function):
        given = x.clone().requires_grad_()
        out = function(given, *rest)
        return out, torch.autograd.grad(out.sin().sum(), [given, *block.parameters()])

    expected = outputs_and_gradients(block)
    calls, kernel = [], add_norm.run
    monkeypatch.setattr(add_norm, "takes", lambda x, y, norm: True)
    monkeypatch.setattr(add_norm, "run", lambda *given: calls.append(given) or kernel(*given))
    torch.testing.assert_close(outputs_and_gradients(block), expected)
    assert len(calls) == len(block.residuals) - 1
    block.eval()(x, *rest)  # what is written token by token has no time for it
    assert len(calls) == len(block.residuals) - 1
    monkeypatch.setattr(add_norm, "run", kernel)
    compiled = torch.compile(block.train(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled), expected)


def test_what_it_takes():
    x = torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert add_norm.takes(x, x, nn.LayerNorm(8))
    assert add_norm.takes(x[None].float(), x[None], RMSNorm(8))
    assert not add_norm.takes(x, x, nn.LayerNorm(8, bias=False))
    assert not add_norm.takes(x, x.float(), nn.LayerNorm(8))
    assert not add_norm.takes(x.float(), x.float(), nn.LayerNorm(8))
    assert not add_norm.takes(x, x[:2], nn.LayerNorm(8))
    assert not add_norm.takes(x.new_zeros(1, 5000), x.new_zeros(1, 5000), nn.LayerNorm(5000))
