"""Programs against the models that they are derived from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from regard.attention import Score
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models.transformer import Transformer, TransformerConfig
from regard.program import forward_program
from regard.program.numpy_interpreter import run
from tests.program.helpers import ENCODERS, IMAGES, LANGUAGE_MODELS, TRANSLATORS, VOCAB, model_of

TOKENS = st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=14)


def assert_same(found, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found).reshape(wanted.shape), wanted.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", TRANSLATORS)
@settings(max_examples=8, deadline=None)
@given(source=TOKENS, target=TOKENS)
@torch.no_grad()
def test_program_of_a_translator_equals_forward(form, source, target):
    model = model_of(form)
    program = forward_program(model)
    values = run(program, model, {"source": torch.tensor([source]), "target": torch.tensor([target])})
    assert_same(values[program.outputs[0]], model(pack([source]), pack([target])))


@pytest.mark.parametrize("form", LANGUAGE_MODELS | ENCODERS)
@settings(max_examples=8, deadline=None)
@given(text=TOKENS)
@torch.no_grad()
def test_program_of_a_text_model_equals_forward(form, text):
    model = model_of(form)
    program = forward_program(model)
    inputs, given = {"text": torch.tensor([text])}, [pack([text])]
    if "segments" in program.inputs:
        given.append(torch.arange(len(text)) % 2)
        inputs["segments"] = given[1][None]
    assert_same(run(program, model, inputs)[program.outputs[0]], model(*given))


@pytest.mark.parametrize("form", IMAGES)
@pytest.mark.parametrize("size", [(16, 24), (24, 8)])
@torch.no_grad()
def test_program_of_an_image_model_equals_forward(form, size):
    model, image = model_of(form), torch.rand(1, 3, *size)
    program = forward_program(model, image)
    assert_same(run(program, model, {"image": image})[program.outputs[0]], model(image))


def test_steps_know_their_modules_and_their_source():
    program = forward_program(model_of("sinusoidal, scaled dot"))
    weights = [step for step in program if step.op == "softmax"]
    assert [step.module for step in weights] == ["encoder.0.attention", "decoder.0.attention", "decoder.0.cross"]
    assert {step.source for step in weights} == {"regard/layers/multihead.py · forward"}
    assert [str(size) for size in weights[-1].shape] == ["1", "2", "target", "source"]


def test_a_loop_is_one_step_with_a_body_that_knows_its_modules():
    program = forward_program(model_of("GRU, Bahdanau, concat"))
    loops = [step for step in program if step.op == "scan"]
    assert [step.module for step in loops] == [
        "encoder.layers.0.forward_layer",
        "encoder.layers.0.backward_layer",
        "decoder",
    ]
    (weights,) = [step for step in loops[-1].body if step.op == "softmax"]
    assert weights.module == "decoder.attention"


def test_inputs_of_another_shape_are_refused():
    model = model_of("GPT, rotary")
    with pytest.raises(RegardError, match=r"text is \(2, 3\); the program takes \('1', 'text'\)"):
        run(forward_program(model), model, {"text": torch.zeros(2, 3, dtype=torch.long)})


class Gate(nn.Module):
    """A layer that no interpreter has been told of."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.map = inner, nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x) * torch.sigmoid(self.map(x))


class Distance(Score):
    """A score that no interpreter has been told of: minus the squared distance."""

    def pair(self, q, k):
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def toy_model() -> Transformer:
    torch.manual_seed(0)
    sizes = dict(width=12, heads=2, feedforward=20, encoder_layers=1, decoder_layers=1)
    model = Transformer(TransformerConfig(**sizes, source_vocab=VOCAB, target_vocab=VOCAB)).eval()
    model.encoder[0].feedforward = Gate(model.encoder[0].feedforward, 12)
    model.decoder[0].cross.score = Distance()
    return model


@torch.no_grad()
def test_a_new_layer_and_a_new_score_need_no_change():
    model, source, target = toy_model(), [5, 6, 7], [2, 8]
    program = forward_program(model)
    values = run(program, model, {"source": torch.tensor([source]), "target": torch.tensor([target])})
    assert_same(values[program.outputs[0]], model(pack([source]), pack([target])))
    assert "encoder.0.feedforward.map" in {step.module for step in program}
    assert "square" in {step.op for step in program if step.module == "decoder.0.cross.score"}
