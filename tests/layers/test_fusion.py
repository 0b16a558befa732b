"""Blocks on the kernel `add_norm` against plain ones: on a GPU, or in Triton's interpreter."""

import jaxtyping
import pytest
import torch

from regard.attention import Offsets
from regard.kernels.triton import add_norm
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.layers.blocks import BlockConfig, Residual
from regard.layers.fusion import fuse_residuals, sum_and_norm
from regard.models.gpt import GPT, GPTConfig
from regard.models.parameters import find_change, find_replacement
from regard.models.variants import make_decoder_block

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
SIZES: dict = dict(width=16, heads=2, feedforward=32)


def block_of(norm: str, cross: bool = False, **changes):
    torch.manual_seed(0)
    if norm == "sandwich":
        return make_decoder_block(GPTConfig(norm=norm, **SIZES, **changes), 0).to(DEVICE)
    config = BlockConfig(norm=norm, **SIZES, **changes)
    return config.make_block("dot", cross_score="dot" if cross else None).to(DEVICE)


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("cross", [False, True])
def test_fused_blocks_equal_plain_blocks(cross, kind, norm, monkeypatch):
    if cross and norm == "sandwich":
        pytest.skip("blocks with norms of outputs have no cross-attention")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    block = block_of(norm, cross, norm_kind=kind, dropout=0.0)
    offsets = Offsets.from_starts(torch.tensor([0, 2, 6], device=DEVICE))
    x, memory = torch.randn(2, 6, 16, device=DEVICE).unbind()
    options = {"memory": memory, "memory_offsets": offsets} if cross else {}

    def outputs_and_gradients(function):
        x_input = x.clone().requires_grad_()
        out = function(x_input, offsets, **options)
        return out, torch.autograd.grad(out.sin().sum(), [x_input, *block.parameters()])

    names, expected = [name for name, _ in block.named_parameters()], outputs_and_gradients(block)
    kernel, calls = add_norm.add_norm, count_fused_calls(monkeypatch)
    outputs_and_gradients(block)
    assert not calls
    assert fuse_residuals(block) is block
    assert [name for name, _ in block.named_parameters()] == names
    torch.testing.assert_close(outputs_and_gradients(block), expected)
    fused = 2 + cross if norm == "post" else 1 + cross
    assert len(calls) == fused
    block.eval()(x, offsets, **options)  # pre-norm: single decoded tokens compute faster than a kernel launches
    assert len(calls) == fused * (1 + (norm == "post"))
    monkeypatch.setattr(add_norm, "add_norm", kernel)
    torch._dynamo.reset()
    compiled = torch.compile(block.train(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled), expected)


def test_dropout_of_a_fused_block(monkeypatch):
    block, x = fuse_residuals(block_of("post", dropout=0.5)), torch.randn(6, 16, device=DEVICE)
    count_fused_calls(monkeypatch)
    offsets = Offsets.from_starts(torch.tensor([0, 6], device=DEVICE))
    assert torch.equal(block.eval()(x, offsets), block(x, offsets))
    assert not torch.allclose(block.train()(x, offsets), block(x, offsets))


def test_calls_without_the_kernel(monkeypatch):
    calls = count_fused_calls(monkeypatch)
    x = torch.randn(6, 16, device=DEVICE)
    offsets = Offsets.from_starts(torch.tensor([0, 6], device=DEVICE))
    for changes in (dict(layer_scale=0.1), dict(drop_path=0.0), dict(norm_kind="layer_without_bias")):
        block = block_of("post", dropout=0.0, **changes)
        expected = block(x, offsets)
        assert torch.equal(fuse_residuals(block)(x, offsets), expected)
    block = block_of("post", dropout=0.0)
    expected = block(x[None], None)
    assert torch.equal(fuse_residuals(block)(x[None], None), expected)  # not packed
    residual = Residual(16, 0.0)
    sum_and_norm(x, x.bfloat16(), residual, block.attention_norm, keeps_dtype=True)  # a residual stream in float32
    assert not calls


def test_a_fused_model_is_that_of_its_config():
    model = GPT(GPTConfig(width=8, heads=2, layers=1, feedforward=8, vocab=5))
    assert type(fuse_residuals(model).blocks[0]).__name__ == "FusedPreNormBlock"
    assert find_change(model) == find_replacement(model) == ""


def count_fused_calls(monkeypatch) -> list[tuple]:
    """Let the kernel run on every input; the list grows by one with each call."""
    calls, kernel = [], add_norm.add_norm
    monkeypatch.setattr(add_norm, "supports", lambda x, y: True)
    monkeypatch.setattr(add_norm, "add_norm", lambda *inputs: calls.append(inputs) or kernel(*inputs))
    return calls
