"""Gradient × input, integrated gradients and occlusion against directional derivatives and against autograd by hand."""

import numpy as np
import pytest
import torch

from regard.errors import RegardError
from regard.layers.packed import pack
from regard.viewer.explanations import attribution
from regard.viewer.explanations import output as explained_output
from regard.viewer.explanations.attribution import METHODS, compute_attribution
from regard.viewer.explanations.output import explain_output, model_of
from tests.viewer import image_models, text_models

FORMS = ["transformer", "BART", "luong", "bahdanau", "gpt", "llama", "bert", "albert", "classify"]


def scaled_logprob(look, output, step, side, token, factor):
    """The log-probability of a prediction if the embedding of one input token is multiplied by a factor."""
    one = output.steps[step]
    model = model_of(look)
    calls = []

    def scale(module, args, out):
        calls.append(None)
        if len(calls) - 1 != side:
            return out
        out = out.clone()
        rows = out[0] if out.dim() == 3 else out
        rows[token] *= factor
        return out

    modules = [getattr(model, name).tokens for name in ("source_embedding", "target_embedding") if hasattr(model, name)]
    modules = modules or [model.embedding.tokens if output.inputs[0] else model.embedding.patches]
    hooks = [module.register_forward_hook(scale) for module in set(modules)]
    try:
        inputs = [pack([ids]) for ids in output.inputs[one.sequence]] or [look.run.images.double()]
        return model(*inputs)[one.row].log_softmax(-1)[one.column].item()
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_attribution_is_the_derivative_along_the_embedding(form):
    look = text_models.make_look(text_models.make_pipeline(form))
    output, found = explain_output(look), compute_attribution(look)
    model_of(look).double()
    epsilon = 1e-5
    for side, (name, values) in enumerate(found.values.items()):
        assert values.shape == (len(found.tokens), len(found.inputs[name]))
        for step in {0, len(output.steps) - 1}:
            for token in {0, values.shape[1] // 2}:
                up, down = (scaled_logprob(look, output, step, side, token, 1 + e) for e in (epsilon, -epsilon))
                assert values[step, token] == pytest.approx((up - down) / (2 * epsilon), abs=2e-4, rel=1e-3)
        if name == "target":
            assert not np.triu(values, 1).any()  # no token depends on later ones
        assert np.abs(values).max() > 1e-3


@pytest.mark.parametrize("form", ["class", "stem"])
@torch.no_grad()
def test_attribution_of_patches(form):
    look = image_models.cached_look(form)
    label = look.run.model.config.labels[1]
    found = look.attribution(label)
    assert found.shape == look.grid
    model = image_models.model_of(form).double()
    double = image_models.regard.look(model, look.run.images[0].double())
    output = explain_output(double)
    output = explained_output.ExplainedOutput(output.inputs, [output.steps[0]._replace(column=1)], [label])
    for patch in (0, 3):
        up, down = (scaled_logprob(double, output, 0, 0, patch, 1 + e) for e in (1e-5, -1e-5))
        assert found.flat[patch] == pytest.approx((up - down) / 2e-5, abs=1e-4, rel=1e-3)
        with_, without = (scaled_logprob(double, output, 0, 0, patch, factor) for factor in (1, 0))
        assert double.attribution(label, "occlusion").flat[patch] == pytest.approx(with_ - without, abs=1e-4)
    # The sum of integrated gradients is the difference between the image and zeros in place of all patches.
    total = look.attribution(label, "integrated_gradients").sum()
    with torch.no_grad():
        zeros = model.embedding.patches.register_forward_hook(lambda module, args, out: 0 * out)
        nothing = model(look.run.images.double())[0].log_softmax(-1)[1]
        zeros.remove()
    assert total == pytest.approx(with_ - float(nothing), rel=0.05, abs=0.02)


def test_attribution_equals_autograd_by_hand():
    """A language model: the gradient through a copy of its embeddings, without hooks."""
    look = text_models.cached_look("gpt")
    model, output = look.pipeline.model, explain_output(look)
    ((ids,),) = output.inputs
    tokens = pack([ids])
    x = model.embedding(tokens.ids, tokens.positions).detach().requires_grad_()
    h = x
    for block in model.blocks:
        h = block(h, tokens.offsets, tokens.positions)
    logprobs = model.output(model.norm(h)).log_softmax(-1)
    for i in (0, 2):
        step = output.steps[i]
        (gradient,) = torch.autograd.grad(logprobs[step.row, step.column], x, retain_graph=True)
        np.testing.assert_allclose(look.attribution().values["text"][i], (gradient * x).sum(-1).detach(), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_occlusion_is_the_change_without_the_embedding(form):
    look = text_models.cached_look(form)
    output, found = explain_output(look), look.attribution("occlusion")
    for side, values in enumerate(found.values.values()):
        for step in {0, len(output.steps) - 1}:
            for token in range(len(output.inputs[output.steps[step].sequence][side])):
                with_, without = (scaled_logprob(look, output, step, side, token, factor) for factor in (1, 0))
                assert values[step, token] == pytest.approx(with_ - without, abs=1e-4)
        assert np.abs(values).max() > 1e-3


@pytest.mark.parametrize("form", ["transformer", "classify", "rotary, grouped"])
def test_integrated_gradients_equal_autograd_of_scaled_embeddings(form, monkeypatch):
    """The gradient with respect to one factor per token, at the same points."""
    monkeypatch.setattr(attribution, "INTEGRATION_POINTS", (32,))
    look = text_models.cached_look(form)
    model, output, found = look.pipeline.model, explain_output(look), look.attribution("integrated_gradients")
    one = output.steps[0]
    inputs = [pack([ids]) for ids in output.inputs[one.sequence]]
    modules = [getattr(model, name).tokens for name in ("source_embedding", "target_embedding") if hasattr(model, name)]

    def logprob(factors):
        queue = iter(factors)
        hooks = [
            module.register_forward_hook(lambda module, args, out: out * next(queue)[:, None])
            for module in set(modules or [model.embedding.tokens])
        ]
        try:
            return model(*inputs)[one.row].log_softmax(-1)[one.column]
        finally:
            for hook in hooks:
                hook.remove()

    expected = [0] * len(inputs)
    for u in (np.arange(32) + 0.5) / 32:
        alpha, density = u**3, 3 * u**2
        factors = [torch.full((len(x.ids),), alpha, requires_grad=True) for x in inputs]
        gradients = torch.autograd.grad(logprob(factors), factors)
        expected = [total + gradient * density / 32 for total, gradient in zip(expected, gradients)]
    for values, by_hand in zip(found.values.values(), expected):
        np.testing.assert_allclose(values[0][: len(by_hand)], by_hand, atol=1e-4)


@pytest.mark.parametrize("form", ["transformer", "classify", "rotary, grouped"])
def test_integrated_gradients_add_up_to_the_change_of_the_prediction(form, caplog, monkeypatch):
    """Also without positions that are added, where a norm makes all the difference close to zeros."""
    look = text_models.cached_look(form)
    output, found = explain_output(look), look.attribution("integrated_gradients")
    changes = attribution._logprobs(look, output, 1.0) - attribution._logprobs(look, output, 0.0)
    sums = sum(values.sum(1) for values in found.values.values())
    np.testing.assert_allclose(sums, changes, rtol=0.05, atol=0.02)
    assert not caplog.records
    monkeypatch.setattr(attribution, "INTEGRATION_POINTS", (1,))
    monkeypatch.setattr(attribution, "TOLERANCE", (0.0, 0.0))
    look.attribution("integrated_gradients")
    assert "the values of a prediction add up to its change of log p only within" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_several_batches(method, monkeypatch):
    monkeypatch.setattr(attribution, "INTEGRATION_POINTS", (2,))
    look = text_models.cached_look("bert")
    whole = look.attribution(method).values["text"]
    monkeypatch.setattr(explained_output, "MAX_BATCH_TOKENS", 13)
    np.testing.assert_allclose(look.attribution(method).values["text"], whole, atol=1e-5)


def test_unknown_methods_raise_errors():
    for look in (text_models.cached_look("gpt"), image_models.cached_look("class")):
        with pytest.raises(RegardError, match=r"no attribution method 'shap'\. Choose one of gradient, integrated"):
            look.attribution(method="shap")


def test_segmenters_have_no_attribution():
    with pytest.raises(RegardError, match="needs an image classifier"):
        image_models.cached_look("linear").attribution()
