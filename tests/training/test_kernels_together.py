"""A whole update with every kernel of ours is the update without them: in Triton's interpreter, or on a GPU."""

import contextlib
import functools

import jaxtyping
import pytest
import torch

from regard.attention import explain, triton_here, use
from regard.data import Batches, Sequences
from regard.layers import add_norm, linear_relu
from regard.models import TransformerConfig, make_model
from regard.training import vocabulary
from regard.training.losses import token_loss
from regard.training.runtime import compilation

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"
OURS = {vocabulary: "takes", linear_relu: "takes", add_norm: "supports"}


KINDS = {"post": dict(norm="post"), "pre": dict(norm="pre", norm_kind="rms")}


def small_model(kind, seed=0):
    torch.manual_seed(seed)
    sizes = dict(width=32, heads=2, feedforward=64, encoder_layers=1, decoder_layers=1, max_len=32)
    vocab = dict(source_vocab=50, target_vocab=50, shared_vocab=True)
    return make_model(TransformerConfig(dropout=0.0, **KINDS[kind], **sizes, **vocab)).to(DEVICE).train()


def batch():
    draw = torch.Generator().manual_seed(1)
    sides = [
        Sequences.of(torch.randint(4, 50, (n,), generator=draw).tolist() for n in lengths)
        for lengths in ((3, 1, 20, 5), (2, 12, 17, 1))
    ]
    [one] = Batches(*sides, budget=64, max_len=32, seed=0).epoch(0)
    return one.to(DEVICE)


def gradients(model, features, one):
    model.zero_grad()
    parts = token_loss(features(*one.inputs), model.output.weight, one.targets, 0.1)
    parts.loss.backward()
    return torch.cat([parts.loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]).float()


@pytest.mark.skipif(not triton_here.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_same_update(monkeypatch, compiled, kind):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    model, one = small_model(kind), batch()
    expected = gradients(model, model.features, one)
    for module, condition in OURS.items():
        monkeypatch.setattr(module, condition, lambda *given: True)
    features = model.features
    if compiled:
        torch._dynamo.reset()
        monkeypatch.setattr(compilation.torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        features = compilation.compiled_features(model)
    with use("sentences"):
        torch.testing.assert_close(gradients(model, features, one), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_the_same_update(monkeypatch, compiled, kind):
    """In bf16, with and without our kernels: about as far from float32 as each other.

    Several models together, for in each of them chance decides whether rounding turns a relu on or off.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    model, one = small_model(kind), batch()
    narrow = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16, cache_enabled=False)

    def of_all_models(features):
        found = []
        for seed in range(12):
            model.load_state_dict(small_model(kind, seed).state_dict())
            found.append(gradients(model, features, one))
        return torch.stack(found)

    exact = of_all_models(model.features)
    with narrow(), explain() as choices:
        ours = of_all_models(compilation.compiled_features(model) if compiled else model.features)
    assert compiled or {choice.kernel for choice in choices} == {"sentences"}
    with contextlib.ExitStack() as stack, narrow():
        for module, condition in OURS.items():
            monkeypatch.setattr(module, condition, lambda *given: False)
        stack.enter_context(use("varlen"))
        plain = of_all_models(model.features)
    unavoidable = (plain - exact).norm()
    assert (ours - exact).norm() <= 1.5 * unavoidable
    assert unavoidable <= 0.05 * exact.norm()
