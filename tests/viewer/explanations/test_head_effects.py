"""Effects of heads against runs in which one head is ablated by a hook on the output projection."""

import re

import numpy as np
import pytest
import torch

from regard.errors import RegardError
from regard.layers.packed import pack
from regard.viewer.explanations import output as explained_output
from regard.viewer.explanations.head_effects import compute_head_effects
from regard.viewer.explanations.output import explain_output
from tests.viewer import image_models, text_models

TEXT_FORMS = ["transformer", "rotary, grouped", "luong", "bahdanau", "gpt", "llama", "bert", "albert", "classify"]
IMAGE_FORMS = ["class", "distilled", "query"]


def logprob(look, model, output, step):
    """The log-probability of one prediction, from a forward pass on its input alone."""
    one = output.steps[step]
    inputs = [pack([ids]) for ids in output.inputs[one.sequence]] or [look.run.images]
    return model(*inputs)[one.row].double().log_softmax(-1)[one.column].item()


def ablated_logprob(look, model, output, step, name, head):
    """The same with zeros in the columns of a head, which the output projection reads."""
    module = model.get_submodule(name if name in dict(model.named_modules()) else re.sub(r"\.\d+$", "", name))

    def zero_head(projection, args):
        x = args[0].clone()
        width = x.shape[-1] // module.heads
        x[..., head * width : (head + 1) * width] = 0
        return (x,)

    hook = module.out.register_forward_pre_hook(zero_head)
    try:
        return logprob(look, model, output, step)
    finally:
        hook.remove()


@pytest.mark.parametrize("form", [*TEXT_FORMS, *IMAGE_FORMS])
@torch.no_grad()
def test_effects_equal_ablation_by_hooks(form, monkeypatch):
    monkeypatch.setattr(explained_output, "MAX_BATCH_TOKENS", 60)  # several batches, the last one smaller
    look = (image_models if form in IMAGE_FORMS else text_models).cached_look(form)
    model, output = explained_output.model_of(look), explain_output(look)
    effects = look.head_effects()
    assert list(effects.by_attention) == list(look.maps)
    assert len(effects.tokens) == len(output.steps)
    some = range(0, len(output.steps), 2)
    np.testing.assert_allclose(effects.logprobs[some], [logprob(look, model, output, i) for i in some], atol=1e-5)
    for name in [next(iter(look.maps)), list(look.maps)[-1]]:
        module = model.get_submodule(name) if name in dict(model.named_modules()) else None
        if module is not None and not hasattr(module, "out"):  # a recurrent model: without context
            continue
        heads = effects.by_attention[name]
        for head in {0, len(heads) - 1}:
            expected = [ablated_logprob(look, model, output, i, name, head) for i in some]
            np.testing.assert_allclose(heads[head][some], expected - effects.logprobs[some], atol=4e-6, rtol=1e-4)
    name, head = effects.largest
    assert abs(effects.total[name][head]) == max(np.abs(one).max() for one in effects.total.values()) > 5e-5


@pytest.mark.parametrize("form", ["luong", "bahdanau"])
@torch.no_grad()
def test_ablation_of_a_recurrent_decoder_removes_the_context(form):
    look = text_models.cached_look(form)
    model, output = look.pipeline.model, explain_output(look)
    hook = model.decoder.attention.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    try:
        without = [logprob(look, model, output, i) for i in range(len(output.steps))]
    finally:
        hook.remove()
    effects = look.head_effects()
    np.testing.assert_allclose(effects.by_attention["decoder.attention"][0], without - effects.logprobs, atol=2e-5)


def test_models_without_predictions_are_refused():
    for look in (text_models.cached_look("embed"), image_models.cached_look("linear")):
        with pytest.raises(RegardError, match="no output to explain"):
            look.head_effects()


def test_effects_of_selected_attentions():
    look = text_models.cached_look("transformer")
    whole, part = look.head_effects(), compute_head_effects(look, attentions=["decoder.1.cross"])
    assert list(part.by_attention) == ["decoder.1.cross"]
    np.testing.assert_allclose(part.total["decoder.1.cross"], whole.total["decoder.1.cross"], atol=1e-6)
