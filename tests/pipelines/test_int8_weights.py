"""Model folders with int8 weights: a quarter of the size, and exactly the values of int8 decoding."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.decode.precision import convert_model
from regard.errors import RegardError
from regard.kernels.cpu.int8_linear import quantize_weight
from regard.layers.quantized import Int8Linear
from regard.models import BertConfig, GPTConfig, ViTConfig, make_model
from regard.pipelines import FORMAT, ImageModel, TextEncoder, TextGenerator, load
from regard.pipelines.folder import dequantize_weights, quantize_weights
from tests.pipelines.test_folder import make_translator

LINES = ["one two three", "four", "five six"]


def make_generator():
    tokenizer = Tokenizer.train(LINES, "word")
    sizes = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32, "vocab": tokenizer.vocab_size}
    return TextGenerator(make_model(GPTConfig(**sizes)).eval(), tokenizer)


def make_encoder():
    tokenizer = Tokenizer.train(LINES, "word")
    sizes = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32, "vocab": tokenizer.vocab_size}
    return TextEncoder(make_model(BertConfig(**sizes)).eval(), tokenizer)


def make_image_model():
    config = ViTConfig(width=16, heads=2, layers=1, feedforward=32, image_height=8, image_width=8, patch=4)
    return ImageModel(make_model(config).eval())


PIPELINES = {
    "transformer": lambda: make_translator("transformer"),
    "separate vocabularies": lambda: make_translator("transformer", shared=False),
    "untied": lambda: make_translator("transformer", tied=False),
    "seq2seq": lambda: make_translator("seq2seq"),
    "gpt": make_generator,
    "bert": make_encoder,
    "vit": make_image_model,
}


@pytest.mark.parametrize("name", PIPELINES)
def test_loaded_weights_quantize_to_the_stored_values(tmp_path, name):
    saved = PIPELINES[name]()
    saved.save(tmp_path, precision="int8")
    stored = load_file(tmp_path / "model.safetensors")
    loaded = load(tmp_path, "cpu")
    parameters = dict(loaded.model.named_parameters())
    int8_names = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    linear = {id(m.weight) for m in loaded.model.modules() if type(m) is nn.Linear}
    assert int8_names == {name for name, parameter in parameters.items() if id(parameter) in linear}
    assert parameters.keys() == stored.keys() - {f"{name}_scale" for name in int8_names}
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float32
        if name in int8_names:
            q, scale = quantize_weight(parameter.detach())
            assert torch.equal(q, stored[name])
            assert torch.equal(scale, stored[f"{name}_scale"])
        else:
            assert torch.equal(parameter, stored[name])
    original = dict(saved.model.named_parameters())
    for name in int8_names:  # within half a step
        step = stored[f"{name}_scale"][:, None]
        assert ((parameters[name] - original[name]).abs() <= 0.5001 * step).all()


def test_int8_decoding_uses_the_stored_values(tmp_path):
    saved = make_translator("transformer", tied=False)
    saved.save(tmp_path, precision="int8")
    stored, loaded = load_file(tmp_path / "model.safetensors"), load(tmp_path, "cpu")
    converted = convert_model(loaded.model, "int8")
    layers = {name: module for name, module in converted.named_modules() if isinstance(module, Int8Linear)}
    assert {f"{name}.weight" for name in layers} == {n for n, tensor in stored.items() if tensor.dtype == torch.int8}
    for name, layer in layers.items():
        assert torch.equal(layer.weight, stored[f"{name}.weight"])
        assert torch.equal(layer.scale, stored[f"{name}.weight_scale"])
    config = DecodeConfig(beam=2, n_best=2, precision="int8")
    assert loaded.translate(LINES, config) == saved.translate(LINES, config)


def test_folder_is_a_quarter_of_the_size(tmp_path):
    translator = make_translator("transformer", width=64, feedforward=512)
    translator.save(tmp_path / "float32")
    translator.save(tmp_path / "int8", precision="int8")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "float32")]
    assert sizes[0] < 0.32 * sizes[1]


def test_loaded_model_scores_searches_and_saves_again(tmp_path):
    saved = make_translator("transformer")
    saved.save(tmp_path, precision="int8")
    loaded = load(tmp_path, "cpu")
    assert loaded.model.output.weight is loaded.model.source_embedding.tokens.weight
    assert loaded.score(("one two", "three")).logprob == pytest.approx(saved.score(("one two", "three")).logprob, 0.05)
    for config in (DecodeConfig(), DecodeConfig(engine="plain"), DecodeConfig(precision="int8")):
        assert len(loaded.translate(LINES, config)) == 3
    loaded.save(tmp_path / "again", precision="int8")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()
    loaded.save(tmp_path)  # replaces the int8 files by float32 ones
    assert json.loads((tmp_path / "config.json").read_text())["format"] == FORMAT
    assert torch.equal(load(tmp_path, "cpu").model.output.weight, loaded.model.output.weight)


def test_older_versions_refuse_the_folder(tmp_path):
    """They support `format` 1 only."""
    generator = make_generator()
    generator.save(tmp_path, precision="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["format"], config["precision"]) == (FORMAT + 1, "int8")
    generator.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["format"] == FORMAT
    assert "precision" not in config


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


NAME = "output.weight_scale"
BROKEN = {
    "missing": (lambda t: t.pop(NAME), "the int8 tensor output.weight has no scales (output.weight_scale is missing)"),
    "short": (lambda t: t.update({NAME: t[NAME][1:].clone()}), "output.weight_scale is float32 of shape"),
    "float16": (lambda t: t.update({NAME: t[NAME].half()}), "output.weight_scale is float16 of shape"),
    "zero": (lambda t: t[NAME].zero_(), "output.weight_scale must be positive and finite"),
    "nan": (lambda t: t[NAME].fill_(torch.nan), "output.weight_scale must be positive and finite"),
    "unused": (lambda t: t.update({"output.bias_scale": t[NAME].clone()}), "do not match the config: output.bias_sc"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_scales(tmp_path, name):
    change, message = BROKEN[name]
    make_translator("transformer", tied=False).save(tmp_path, precision="int8")
    change_tensors(tmp_path, change)
    with pytest.raises(RegardError) as caught:
        load(tmp_path, "cpu")
    assert f"{tmp_path / 'model.safetensors'}: " in str(caught.value)
    assert message in str(caught.value)


def test_int8_tensors_without_the_precision_in_the_config(tmp_path):
    make_generator().save(tmp_path, precision="int8")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "precision"}))
    with pytest.raises(RegardError, match=r"do not match the config: .*weight_scale"):
        load(tmp_path, "cpu")
    path.write_text(json.dumps(config | {"precision": "int4"}))
    with pytest.raises(RegardError, match="precision must be one of float32, int8"):
        load(tmp_path, "cpu")


def test_invalid_requests(tmp_path):
    with pytest.raises(RegardError, match="precision must be one of float32, int8"):
        make_generator().save(tmp_path, precision="int4")
    generator = make_generator()
    with torch.no_grad():
        generator.model.output.weight[0, 0] = torch.nan
    with pytest.raises(RegardError, match="is not finite"):
        generator.save(tmp_path / "new", precision="int8")


def test_rows_of_zeros_and_extreme_weights():
    layer = nn.Linear(3, 4)
    rows = [[0.0, 0.0, 0.0], [1e-38, 0.0, -1e-38], [3e38, 1.0, -3e38], [1.0, -0.5, 0.25]]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    weights = quantize_weights(layer)
    again, scale = quantize_weight(dequantize_weights(weights, "memory")["weight"])
    assert torch.equal(again, weights["weight"])
    assert torch.equal(scale, weights["weight_scale"])
