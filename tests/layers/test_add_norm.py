"""x + dropout(y), its norm, and gradients beside torch's own: on a GPU, or without one in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from torch import nn

from regard.attention import Offsets, triton_here
from regard.layers import add_norm
from regard.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock
from regard.layers.norms import RMSNorm, make_norm
from regard.layers.residual import FusedResidual, Residual
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


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_fused_residual_equals_its_plain_twin(training, norm_first, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    residual = FusedResidual(16, 0.0, norm_first=norm_first).to(DEVICE).train(training)
    x, update, norm = *torch.randn(2, 6, 16, device=DEVICE), make_norm("layer", 16).to(DEVICE)
    expected = Residual.add_norm(residual, x, update, norm)
    calls = count_fused_calls(monkeypatch)
    torch.testing.assert_close(residual.add_norm(x, update, norm), expected)
    assert len(calls) == (training or not norm_first)
    residual.dropout.p = 0.5
    dropped = torch.compile(residual.add_norm, backend="aot_eager", fullgraph=True)(x, update, norm)
    assert torch.allclose(dropped[1], expected[1], atol=1e-5) != training


def test_residuals_that_stay_plain(monkeypatch):
    calls = count_fused_calls(monkeypatch)
    x, update, norm = *torch.randn(2, 6, 16, device=DEVICE), make_norm("layer", 16).to(DEVICE)
    for changes in (dict(layer_scale=0.1), dict(drop_path=0.0)):
        residual = BlockConfig(16, 2, 32, dropout=0.0, norm="post", **changes).residual().to(DEVICE)
        factor = 1.0 if residual.layer_scale is None else 0.1
        torch.testing.assert_close(residual.add_norm(x[None], update[None], norm)[1][0], norm(x + factor * update))
    post = FusedResidual(16, 0.0, norm_first=False).to(DEVICE)
    post.add_norm(x[None], update[None], norm)  # not packed
    post.add_norm(x, update.bfloat16(), norm)  # a residual stream in float32
    assert not calls


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
def test_fused_blocks_equal_plain_ones(block, kind, norm, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch.manual_seed(0)
    config = BlockConfig(16, 2, 32, dropout=0.0, norm=norm, norm_kind=kind)
    block = (block(config, "dot") if block is EncoderBlock else block(config, "dot", "dot")).to(DEVICE)
    offsets = Offsets.of(torch.tensor([0, 2, 6], device=DEVICE))
    x, memory = torch.randn(2, 6, 16, device=DEVICE).unbind()
    rest = (offsets,) if isinstance(block, EncoderBlock) else (offsets, memory, offsets)

    def outputs_and_gradients(function):
        given = x.clone().requires_grad_()
        out = function(given, *rest)
        return out, torch.autograd.grad(out.sin().sum(), [given, *block.parameters()])

    expected = outputs_and_gradients(block)
    kernel, calls = add_norm.run, count_fused_calls(monkeypatch)
    torch.testing.assert_close(outputs_and_gradients(block), expected)
    sublayers = 2 if isinstance(block, EncoderBlock) else 3
    fused = sublayers - 1 if norm == "pre" else sublayers
    assert len(calls) == fused
    block.eval()(x, *rest)  # pre-norm: single decoded tokens compute faster than a kernel launches
    assert len(calls) == fused + (0 if norm == "pre" else fused)
    monkeypatch.setattr(add_norm, "run", kernel)
    torch._dynamo.reset()
    compiled = torch.compile(block.train(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled), expected)


def count_fused_calls(monkeypatch) -> list[tuple]:
    """Let the kernel run on every input; the list grows by one with each call."""
    calls, kernel = [], add_norm.run
    monkeypatch.setattr(add_norm, "supports", lambda x, y, norm: True)
    monkeypatch.setattr(add_norm, "run", lambda *given: calls.append(given) or kernel(*given))
    return calls


def test_supported_inputs():
    x = torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert add_norm.supports(x, x, nn.LayerNorm(8))
    assert add_norm.supports(x[None].float(), x[None], RMSNorm(8))
    assert not add_norm.supports(x, x, nn.LayerNorm(8, bias=False))
    assert not add_norm.supports(x, x.float(), nn.LayerNorm(8))
    assert not add_norm.supports(x.float(), x.float(), nn.LayerNorm(8))
    assert not add_norm.supports(x, x[:2], nn.LayerNorm(8))
    assert not add_norm.supports(x.new_zeros(1, 5000), x.new_zeros(1, 5000), nn.LayerNorm(5000))
