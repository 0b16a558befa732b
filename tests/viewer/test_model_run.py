"""A look runs its model once; the page is made from what that run recorded."""

import numpy as np
import pytest
import torch

from regard.layers.packed import Packed
from regard.viewer import build_trace, model_run
from tests.viewer import image_models, text_models

TEXTS = ("transformer", "luong", "gpt", "bert", "classify")


# With explanations, the only head of "luong" is ablated: a pass of the changed model on the same input.
@pytest.mark.parametrize(
    ("form", "explain"), [*((form, None) for form in TEXTS), *((form, True) for form in TEXTS if form != "luong")]
)
def test_page_of_a_text_takes_one_forward_pass(tmp_path, form, explain):
    pipeline = text_models.make_pipeline(form)
    passes = []

    def count(module, args):
        # The page compares the model with a rounded copy; attributions run it with gradients.
        if module is pipeline.model and not torch.is_grad_enabled():
            passes.append([tokens.ids.tolist() for tokens in args if isinstance(tokens, Packed)])

    pipeline.model.register_forward_pre_hook(count)
    look = text_models.make_look(pipeline)
    look.save(tmp_path / "page.html", explain=explain)
    assert passes.count(list(look.ids)) == 1


@pytest.mark.parametrize("explain", [None, True])
@pytest.mark.parametrize("form", ["class", "queries"])
def test_page_of_an_image_takes_one_forward_pass(tmp_path, form, explain):
    model = image_models.model_of(form)
    passes = []

    def count(module, args):
        # The trace exports the model's graph.
        if module is model.embedding and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            passes.append(len(args[0]))

    model.embedding.register_forward_pre_hook(count)
    image_models.make_look(model).save(tmp_path / "page.html", explain=explain)
    assert passes[0] == 1
    # The effects of heads run copies of the image.
    assert 1 not in passes[1:]


def test_outputs_of_modules_are_kept_for_small_inputs_only(monkeypatch):
    look = text_models.make_look(text_models.make_pipeline("gpt"))
    assert look.run.outputs["blocks.0" if "blocks.0" in look.run.outputs else "stack.blocks.0"]
    monkeypatch.setattr(model_run, "MAX_TOKENS", 1)
    other = text_models.make_look(look.pipeline)
    assert other.run.outputs is None
    # A trace on request runs the model again.
    trace, expected = build_trace(other), build_trace(look)
    np.testing.assert_array_equal(trace["output.l"], expected["output.l"])
    assert [step["differs"] for step in trace.steps] == [step["differs"] for step in expected.steps]
