"""A training step with all kernels equals one without them: in Triton's interpreter, or on a GPU."""

import contextlib
import functools

import jaxtyping
import pytest
import torch

from regard.attention import explain, use
from regard.data import PairBatches
from regard.data.batching.sequences import Sequences
from regard.kernels.triton import add_norm, cross_entropy, linear_relu
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.layers.fusion import fuse_residuals
from regard.models import TransformerConfig, make_model
from regard.training import distributed
from regard.training.losses import token_loss

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
KERNELS = (cross_entropy, linear_relu, add_norm)
MODELS = {"post": dict(norm="post"), "pre": dict(norm="pre", norm_kind="rms")}


def make_model_of(kind, seed=0):
    torch.manual_seed(seed)
    sizes = dict(width=32, heads=2, feedforward=64, encoder_layers=1, decoder_layers=1, max_len=32)
    vocab = dict(source_vocab=50, target_vocab=50, shared_vocab=True)
    return make_model(TransformerConfig(dropout=0.0, **MODELS[kind], **sizes, **vocab)).to(DEVICE).train()


def make_batch():
    generator = torch.Generator().manual_seed(1)
    sides = [
        Sequences.from_lists(torch.randint(4, 50, (n,), generator=generator).tolist() for n in lengths)
        for lengths in ((3, 1, 20, 5), (2, 12, 17, 1))
    ]
    [batch] = PairBatches(*sides, budget=64, max_len=32, seed=0).epoch(0)
    return batch.to(DEVICE)


def loss_and_gradients(model, features, batch):
    model.zero_grad()
    parts = token_loss(features(*batch.inputs), model.output.weight, batch.targets, 0.1)
    parts.loss.backward()
    return torch.cat([parts.loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]).float()


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("compiled", "kind"), [(False, "post"), (False, "pre"), (True, "post")])
def test_kernels_do_not_change_the_update(monkeypatch, compiled, kind):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    model, batch = make_model_of(kind), make_batch()
    expected = loss_and_gradients(model, model.features, batch)
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "supports", lambda *inputs: True)
    features = fuse_residuals(model).features
    if compiled:
        torch._dynamo.reset()
        monkeypatch.setattr(distributed.torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        features = distributed.compiled_features(model)
    with use("varlen_short"):
        torch.testing.assert_close(loss_and_gradients(model, features, batch), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_kernels_do_not_change_the_update(monkeypatch, compiled, kind):
    """In bf16 the error relative to float32 is about the same with and without the kernels.

    Measured over several models, because rounding may turn a relu on or off in any one of them.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    model, batch = make_model_of(kind), make_batch()
    autocast = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16, cache_enabled=False)

    def over_all_models(features):
        results = []
        for seed in range(12):
            model.load_state_dict(make_model_of(kind, seed).state_dict())
            results.append(loss_and_gradients(model, features, batch))
        return torch.stack(results)

    exact = over_all_models(fuse_residuals(model).features)
    with autocast(), explain() as choices:
        fused = over_all_models(distributed.compiled_features(model) if compiled else model.features)
    assert compiled or {choice.backend for choice in choices} == {"varlen_short"}
    with contextlib.ExitStack() as stack, autocast():
        for kernel in KERNELS:
            monkeypatch.setattr(kernel, "supports", lambda *inputs: False)
        stack.enter_context(use("varlen"))
        plain = over_all_models(model.features)
    plain_error = (plain - exact).norm()
    assert (fused - exact).norm() <= 1.5 * plain_error
    assert plain_error <= 0.05 * exact.norm()
