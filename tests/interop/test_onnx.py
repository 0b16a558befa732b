"""ONNX graphs in ONNX Runtime compared with the models that they were exported from."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from regard.graph import capture
from regard.graph.entries import batch_entries
from regard.interop.onnx_runner import OnnxDecoder, OnnxEncoder, OnnxImageModel
from regard.interop.onnx_writer import onnx_model
from regard.layers.packed import pack
from tests.graph.helpers import ENCODERS, IMAGES, LANGUAGE_MODELS, TRANSLATORS, model_of, toy_model

SOURCES = [[5, 6, 7, 8, 20, 3], [9], [4, 22, 10, 3]]
TARGETS = [[2, 5, 6, 7], [2], [2, 8, 9, 11, 12, 20]]


def load_graphs(model, model_class):
    sessions = {}
    for name, entry in batch_entries(model).items():
        graph = capture(model, entry.call, entry.inputs, entry.sizes)
        graph = onnx_model(onnx, graph, model, name, entry.outputs)
        onnx.checker.check_model(graph, full_check=True)
        sessions[name] = onnxruntime.InferenceSession(graph.SerializeToString())
    return model_class(model.config, sessions)


def assert_close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", TRANSLATORS)
@torch.no_grad()
def test_translators_score_and_decode_as_in_pytorch(form):
    model = model_of(form)
    graphs = load_graphs(model, OnnxDecoder)
    assert_close(graphs(pack(SOURCES), pack(TARGETS)), model(pack(SOURCES), pack(TARGETS)))
    assert_close(*(reordered_logits(each, pack(SOURCES)) for each in (graphs, model)))


def reordered_logits(model, source) -> torch.Tensor:
    """The logits after hypotheses have been reordered and one sentence has been dropped."""
    state = model.start(source)
    _, state = model.step(state, torch.full((3, 1), 2))
    state = model.reorder(state, torch.tensor([[0, 0], [2, 2]]))
    _, state = model.step(state, torch.tensor([[5, 6], [7, 8]]))
    state = model.reorder(state, torch.tensor([[1, 0], [2, 2]]))
    return model.step(state, torch.tensor([[9, 10], [11, 12]]))[0]


@pytest.mark.parametrize("form", LANGUAGE_MODELS)
@torch.no_grad()
def test_language_models_score_and_decode_as_in_pytorch(form):
    model = model_of(form)
    graphs = load_graphs(model, OnnxDecoder)
    assert_close(graphs(pack(SOURCES)), model(pack(SOURCES)))
    assert_close(*(reordered_logits(each, pack(SOURCES)) for each in (graphs, model)))


@pytest.mark.parametrize("form", ENCODERS)
@torch.no_grad()
def test_encoders_give_the_same_output_as_in_pytorch(form):
    model, tokens = model_of(form), pack(SOURCES)
    graphs = load_graphs(model, OnnxEncoder)
    assert_close(graphs(tokens), model(tokens))
    if model.config.segments > 1:
        segments = torch.from_numpy(np.arange(len(tokens.ids)) % 2)
        assert_close(graphs(tokens, segments), model(tokens, segments))


@pytest.mark.parametrize("form", IMAGES)
@torch.no_grad()
def test_image_models_give_the_same_output_as_in_pytorch(form):
    model, images = model_of(form), torch.rand(4, 3, 16, 24)
    assert_close(load_graphs(model, OnnxImageModel)(images), model(images))


@torch.no_grad()
def test_custom_layers_and_scores_export():
    model = toy_model()
    assert_close(load_graphs(model, OnnxDecoder)(pack(SOURCES), pack(TARGETS)), model(pack(SOURCES), pack(TARGETS)))


@torch.no_grad()
def test_sinusoidal_positions_are_exact_at_large_indices():
    model = model_of("sinusoidal, scaled dot")
    source = [[5 + i % 17 for i in range(3000)]]
    assert_close(load_graphs(model, OnnxDecoder)(pack(source), pack([[2]])), model(pack(source), pack([[2]])))
