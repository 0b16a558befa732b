"""Graphs against the models from which they are captured."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.graph import forward_graph
from regard.graph.interpreter import run
from regard.layers.packed import pack
from tests.graph.helpers import ENCODERS, IMAGES, LANGUAGE_MODELS, TRANSLATORS, VOCAB, model_of, toy_model

TOKENS = st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=14)


def assert_same(actual, expected: torch.Tensor) -> None:
    actual = torch.from_numpy(actual).reshape(expected.shape)
    torch.testing.assert_close(actual, expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TRANSLATORS)
@settings(max_examples=8, deadline=None)
@given(source=TOKENS, target=TOKENS)
@torch.no_grad()
def test_graph_of_a_translator_equals_forward(name, source, target):
    model = model_of(name)
    graph = forward_graph(model)
    values = run(graph, model, {"source": torch.tensor([source]), "target": torch.tensor([target])})
    assert_same(values[graph.outputs[0]], model(pack([source]), pack([target])))


@pytest.mark.parametrize("name", LANGUAGE_MODELS | ENCODERS)
@settings(max_examples=8, deadline=None)
@given(text=TOKENS)
@torch.no_grad()
def test_graph_of_a_text_model_equals_forward(name, text):
    model = model_of(name)
    graph = forward_graph(model)
    inputs, arguments = {"text": torch.tensor([text])}, [pack([text])]
    if "segments" in graph.inputs:
        arguments.append(torch.arange(len(text)) % 2)
        inputs["segments"] = arguments[1][None]
    assert_same(run(graph, model, inputs)[graph.outputs[0]], model(*arguments))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("size", [(16, 24), (24, 8)])
@torch.no_grad()
def test_graph_of_an_image_model_equals_forward(name, size):
    model, image = model_of(name), torch.rand(1, 3, *size)
    graph = forward_graph(model, image)
    assert_same(run(graph, model, {"image": image})[graph.outputs[0]], model(image))


def test_steps_have_module_and_source():
    graph = forward_graph(model_of("sinusoidal, scaled dot"))
    weights = [step for step in graph if step.op == "softmax"]
    assert [step.module for step in weights] == ["encoder.0.attention", "decoder.0.attention", "decoder.0.cross"]
    assert {step.source for step in weights} == {"regard/layers/attention.py · forward"}
    assert [str(size) for size in weights[-1].shape] == ["1", "2", "target", "source"]


def test_loop_is_one_step_whose_body_has_modules():
    graph = forward_graph(model_of("GRU, Bahdanau, concat"))
    loops = [step for step in graph if step.op == "scan"]
    assert [step.module for step in loops] == [
        "encoder.layers.0.forward_layer",
        "encoder.layers.0.backward_layer",
        "decoder",
    ]
    (weights,) = [step for step in loops[-1].body if step.op == "softmax"]
    assert weights.module == "decoder.attention"


def test_inputs_of_another_shape_raise():
    model = model_of("GPT, rotary")
    with pytest.raises(RegardError, match=r"text has shape \(2, 3\); expected \('1', 'text'\)"):
        run(forward_graph(model), model, {"text": torch.zeros(2, 3, dtype=torch.long)})


@torch.no_grad()
def test_custom_layer_and_score_are_captured():
    model, source, target = toy_model(), [5, 6, 7], [2, 8]
    graph = forward_graph(model)
    values = run(graph, model, {"source": torch.tensor([source]), "target": torch.tensor([target])})
    assert_same(values[graph.outputs[0]], model(pack([source]), pack([target])))
    assert "encoder.0.feedforward.map" in {step.module for step in graph}
    assert "square" in {step.op for step in graph if step.module == "decoder.0.cross.score"}
