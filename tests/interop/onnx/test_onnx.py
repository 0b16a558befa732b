"""ONNX graphs against the models that they were exported from, in ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from regard.interop.onnx.onnx_runner import OnnxDecoder, OnnxEncoder, OnnxImageModel
from regard.interop.onnx.onnx_writer import onnx_model
from regard.layers.packed import pack
from regard.program import capture, program_of
from regard.program.entries import batch_entries
from tests.program.helpers import ENCODERS, IMAGES, LANGUAGE_MODELS, TRANSLATORS, model_of
from tests.program.test_program import toy_model

SOURCES = [[5, 6, 7, 8, 20, 3], [9], [4, 22, 10, 3]]
TARGETS = [[2, 5, 6, 7], [2], [2, 8, 9, 11, 12, 20]]


def opened(model, kind):
    sessions = {}
    for name, entry in batch_entries(model).items():
        program = program_of(capture(model, entry.call, entry.inputs, entry.sizes))
        graph = onnx_model(onnx, program, model, name, entry.outputs)
        onnx.checker.check_model(graph, full_check=True)
        sessions[name] = onnxruntime.InferenceSession(graph.SerializeToString())
    return kind(model.config, sessions)


def assert_same(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", TRANSLATORS)
@torch.no_grad()
def test_translators_score_and_decode_as_in_torch(form):
    model = model_of(form)
    graphs = opened(model, OnnxDecoder)
    assert_same(graphs(pack(SOURCES), pack(TARGETS)), model(pack(SOURCES), pack(TARGETS)))
    assert_same(*(beams(one, pack(SOURCES)) for one in (graphs, model)))


def beams(model, source) -> torch.Tensor:
    """The scores after several hypotheses per sentence have been reordered, and one sentence has left."""
    state = model.start(source)
    _, state = model.step(state, torch.full((3, 1), 2))
    state = model.reorder(state, torch.tensor([[0, 0], [2, 2]]))
    _, state = model.step(state, torch.tensor([[5, 6], [7, 8]]))
    state = model.reorder(state, torch.tensor([[1, 0], [2, 2]]))
    return model.step(state, torch.tensor([[9, 10], [11, 12]]))[0]


@pytest.mark.parametrize("form", LANGUAGE_MODELS)
@torch.no_grad()
def test_language_models_score_and_decode_as_in_torch(form):
    model = model_of(form)
    graphs = opened(model, OnnxDecoder)
    assert_same(graphs(pack(SOURCES)), model(pack(SOURCES)))
    assert_same(*(beams(one, pack(SOURCES)) for one in (graphs, model)))


@pytest.mark.parametrize("form", ENCODERS)
@torch.no_grad()
def test_encoders_as_in_torch(form):
    model, tokens = model_of(form), pack(SOURCES)
    graphs = opened(model, OnnxEncoder)
    assert_same(graphs(tokens), model(tokens))
    if model.config.segments > 1:
        segments = torch.from_numpy(np.arange(len(tokens.ids)) % 2)
        assert_same(graphs(tokens, segments), model(tokens, segments))


@pytest.mark.parametrize("form", IMAGES)
@torch.no_grad()
def test_image_models_as_in_torch(form):
    model, images = model_of(form), torch.rand(4, 3, 16, 24)
    assert_same(opened(model, OnnxImageModel)(images), model(images))


@torch.no_grad()
def test_a_new_layer_and_a_new_score_need_no_change():
    model = toy_model()
    assert_same(opened(model, OnnxDecoder)(pack(SOURCES), pack(TARGETS)), model(pack(SOURCES), pack(TARGETS)))


@torch.no_grad()
def test_sinusoidal_codes_are_exact_far_from_the_start():
    model = model_of("sinusoidal, scaled dot")
    source = [[5 + i % 17 for i in range(3000)]]
    assert_same(opened(model, OnnxDecoder)(pack(source), pack([[2]])), model(pack(source), pack([[2]])))
