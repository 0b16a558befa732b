"""The logit lens against models that are cut after a layer, and against the final output."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from regard.errors import RegardError
from regard.layers.packed import pack
from regard.viewer.explanations.logit_lens import compute_logit_lens, lens_steps
from regard.viewer.explanations.output import explain_output, model_of
from tests.viewer import image_models, text_models

TEXT_FORMS = ["transformer", "BART", "T5", "gpt", "gpt2", "gemma", "bert, pre", "albert", "classify"]
IMAGE_FORMS = ["class", "distilled", "query", "gray, post"]


def cut(model, layers):
    """A copy of the model that ends after some layers, with the same final norm and output layer."""
    model = copy.deepcopy(model)
    if hasattr(model, "decoder"):
        model.decoder = model.decoder[:layers]
    elif hasattr(model.config, "groups") and model.config.groups:
        object.__setattr__(model.config, "layers", layers)
        model.blocks = nn.ModuleList(model.blocks[i // 2] for i in range(layers))
    else:
        model.blocks = model.blocks[:layers]
        if hasattr(model.config, "layers"):
            object.__setattr__(model.config, "layers", layers)
    return model


@pytest.mark.parametrize("form", [*TEXT_FORMS, *IMAGE_FORMS])
@torch.no_grad()
def test_lens_equals_a_model_without_the_later_layers(form):
    look = (image_models if form in IMAGE_FORMS else text_models).cached_look(form)
    model, output = model_of(look), explain_output(look)
    lens = look.logit_lens()
    steps, tokens = lens_steps(look, output)
    assert lens.tokens == tokens
    assert len(lens.layers) == len(lens.probabilities)
    assert lens.layers[-1] == f"layer {len(lens.layers) - 1}"
    assert len(lens.layers) > 1
    for layer in range(1, len(lens.layers)):
        shorter = cut(model, layer) if layer < len(lens.layers) - 1 else model
        for position in {0, len(steps) - 1}:
            one = steps[position]
            inputs = [pack([ids]) for ids in output.inputs[one.sequence]] or [look.run.images]
            expected = shorter(*inputs)[one.row].softmax(-1)
            np.testing.assert_allclose(lens.probabilities[layer, position], expected[one.column], atol=2e-6)
            best = expected.topk(lens.columns.shape[-1])
            np.testing.assert_allclose(lens.top_probabilities[layer, position], best.values, atol=2e-6)
    assert list(lens.candidates(1, 0).values()) == lens.top_probabilities[1, 0].tolist()
    assert abs(lens.probabilities[0] - lens.probabilities[-1]).max() > 1e-3


def test_lens_of_the_embedding_is_the_output_layer_on_the_embedding():
    look = text_models.cached_look("gpt")
    model, (ids,) = look.pipeline.model, explain_output(look).inputs[0]
    tokens = pack([ids])
    with torch.no_grad():
        x = model.embedding(tokens.ids, tokens.positions)
        expected = model.output(model.norm(x)).softmax(-1)[0, ids[1]]
    np.testing.assert_allclose(look.logit_lens().probabilities[0, 0], expected, atol=1e-6)


def test_last_positions_only():
    look = text_models.cached_look("gpt")
    whole, part = look.logit_lens(), compute_logit_lens(look, last=3)
    np.testing.assert_allclose(part.probabilities, whole.probabilities[:, -3:])
    assert part.tokens == whole.tokens[-3:]


def test_recurrent_models_have_no_lens():
    with pytest.raises(RegardError, match="residual stream"):
        text_models.cached_look("luong").logit_lens()
