"""Residual connections on the kernel `add_norm` against plain ones: on a GPU, or in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from torch import nn

from regard.attention import Offsets
from regard.kernels.triton import add_norm
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock
from regard.layers.norms import make_norm
from regard.layers.residual import FusedResidual, Residual

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_fused_residual_equals_plain_residual(training, norm_first, monkeypatch):
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


def test_residuals_without_kernel(monkeypatch):
    calls = count_fused_calls(monkeypatch)
    x, update, norm = *torch.randn(2, 6, 16, device=DEVICE), make_norm("layer", 16).to(DEVICE)
    for changes in (dict(layer_scale=0.1), dict(drop_path=0.0)):
        residual = BlockConfig(16, 2, 32, dropout=0.0, norm="post", **changes).make_residual().to(DEVICE)
        factor = 1.0 if residual.layer_scale is None else 0.1
        torch.testing.assert_close(residual.add_norm(x[None], update[None], norm)[1][0], norm(x + factor * update))
    post = FusedResidual(16, 0.0, norm_first=False).to(DEVICE)
    post.add_norm(x[None], update[None], norm)  # not packed
    post.add_norm(x, update.bfloat16(), norm)  # a residual stream in float32
    post.add_norm(x, update, nn.LayerNorm(16, bias=False).to(DEVICE))
    assert not calls


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("block", [EncoderBlock, DecoderBlock])
def test_fused_blocks_equal_plain_blocks(block, kind, norm, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch.manual_seed(0)
    config = BlockConfig(16, 2, 32, dropout=0.0, norm=norm, norm_kind=kind)
    block = (block(config, "dot") if block is EncoderBlock else block(config, "dot", "dot")).to(DEVICE)
    offsets = Offsets.from_starts(torch.tensor([0, 2, 6], device=DEVICE))
    x, memory = torch.randn(2, 6, 16, device=DEVICE).unbind()
    options = {} if isinstance(block, EncoderBlock) else {"memory": memory, "memory_offsets": offsets}

    def outputs_and_gradients(function):
        x_input = x.clone().requires_grad_()
        out = function(x_input, offsets, **options)
        return out, torch.autograd.grad(out.sin().sum(), [x_input, *block.parameters()])

    expected = outputs_and_gradients(block)
    kernel, calls = add_norm.add_norm, count_fused_calls(monkeypatch)
    torch.testing.assert_close(outputs_and_gradients(block), expected)
    sublayers = 2 if isinstance(block, EncoderBlock) else 3
    fused = sublayers - 1 if norm == "pre" else sublayers
    assert len(calls) == fused
    block.eval()(x, offsets, **options)  # pre-norm: single decoded tokens compute faster than a kernel launches
    assert len(calls) == fused + (0 if norm == "pre" else fused)
    monkeypatch.setattr(add_norm, "add_norm", kernel)
    torch._dynamo.reset()
    compiled = torch.compile(block.train(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled), expected)


def count_fused_calls(monkeypatch) -> list[tuple]:
    """Let the kernel run on every input; the list grows by one with each call."""
    calls, kernel = [], add_norm.add_norm
    monkeypatch.setattr(add_norm, "supports", lambda x, y: True)
    monkeypatch.setattr(add_norm, "add_norm", lambda *inputs: calls.append(inputs) or kernel(*inputs))
    return calls
