"""ViT and DeiT beside transformers with random weights."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from regard.cli import main
from regard.errors import RegardError
from regard.folder import ImageModel, load
from regard.interop import export_folder, import_folder
from regard.models.vit import ViT, ViTConfig
from tests.interop.comparing import round_trip, same_tensors
from tests.interop.comparing_images import (
    CONFIGS,
    MEAN,
    NAMES,
    STD,
    close,
    compare,
    images_of,
    made,
    run_theirs,
    same,
    weights_of,
    write_pictures,
)

CASES = [(family, i) for family in ("ViT", "DeiT") for i in range(len(CONFIGS))]


def edited(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed(folder, change):
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "number"), CASES)
def test_the_encoder(transformers, tmp_path, family, number):
    theirs = made(transformers, f"{family}Model", number, tmp_path / "in")
    images = images_of(theirs)
    wanted = run_theirs(theirs, images)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    encoded, pooled = compare(bundle.model, images, wanted)
    close(encoded, wanted.last_hidden_state)
    close(pooled, wanted.pooler_output)
    assert torch.equal(run_theirs(again, images).last_hidden_state, wanted.last_hidden_state)


@pytest.mark.parametrize("family", ["ViT", "DeiT"])
def test_the_encoder_without_a_pooler(transformers, tmp_path, caplog, family):
    theirs = made(transformers, f"{family}Model", 0, tmp_path / "in")
    changed(tmp_path / "in", lambda tensors: {name: one for name, one in tensors.items() if "pooler" not in name})
    bundle = import_folder(tmp_path / "in")
    images = images_of(theirs)
    wanted = run_theirs(theirs, images)
    encoded, pooled = compare(bundle.model, images, wanted)
    close(encoded, wanted.last_hidden_state)
    close(pooled, wanted.last_hidden_state[:, 0])
    with caplog.at_level(logging.WARNING, "regard"):
        name = export_folder(bundle, tmp_path / "out")
    assert f"{name}.from_pretrained(…, add_pooling_layer=False)" in caplog.text
    same_tensors(tmp_path / "in", tmp_path / "out")
    _, report = getattr(transformers, name).from_pretrained(
        tmp_path / "out", add_pooling_layer=False, output_loading_info=True
    )
    assert not any(report.values()), report


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@pytest.mark.parametrize(
    "name",
    ["ViTForImageClassification", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"],
)
def test_classifying(transformers, tmp_path, name, number):
    theirs = made(transformers, name, number, tmp_path / "in", id2label=NAMES)
    images = images_of(theirs)
    wanted = run_theirs(theirs, images)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    assert isinstance(bundle, ImageModel)
    assert bundle.labels == ("cat", "dog", "owl")
    close(compare(bundle.model, images, wanted)[1], wanted.logits)
    assert torch.equal(run_theirs(again, images).logits, wanted.logits)
    assert again.config.id2label == NAMES


@pytest.mark.parametrize(
    "name", ["ViTModel", "ViTForImageClassification", "DeiTModel", "DeiTForImageClassificationWithTeacher"]
)
def test_both_generations_of_names(transformers, tmp_path, name):
    theirs = made(transformers, name, 0, tmp_path)
    older = import_folder(tmp_path)
    assert any("encoder.layer.0.attention.attention.query" in key for key in load_file(tmp_path / "model.safetensors"))
    theirs.save_pretrained(tmp_path, save_original_format=False)
    assert any("layers.0.attention.q_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    newer = import_folder(tmp_path)
    same(weights_of(older), weights_of(newer))
    assert older.model.config == newer.model.config


@pytest.mark.parametrize("name", ["ViTModel", "DeiTForImageClassification"])
def test_with_the_prefix_and_without(transformers, tmp_path, name):
    made(transformers, name, 0, tmp_path)
    before = weights_of(import_folder(tmp_path))
    prefix = name[:-5].lower() + "." if name == "ViTModel" else "deit."
    if name == "ViTModel":
        changed(tmp_path, lambda tensors: {prefix + key: one for key, one in tensors.items()})
    else:
        changed(tmp_path, lambda tensors: {key.removeprefix(prefix): one for key, one in tensors.items()})
    same(weights_of(import_folder(tmp_path)), before)


@pytest.mark.parametrize("size", [(20, 20), (10, 25), (5, 35)])
@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_other_image_sizes(transformers, tmp_path, name, size):
    theirs = made(transformers, name, 2, tmp_path)
    images = images_of(theirs, size)
    wanted = run_theirs(theirs, images, interpolate_pos_encoding=True)
    close(compare(import_folder(tmp_path).model, images, wanted)[1], wanted.logits)


def test_labels_without_names(transformers, tmp_path):
    made(transformers, "ViTForImageClassification", 0, tmp_path, num_labels=2)
    assert import_folder(tmp_path).labels == ("LABEL_0", "LABEL_1")


def test_what_belongs_to_another_class_is_left_out_and_said(transformers, tmp_path, caplog):
    theirs = made(transformers, "ViTForImageClassification", 0, tmp_path)
    whole = run_theirs(theirs, images_of(theirs)).logits
    changed(tmp_path, lambda tensors: tensors | {"vit.pooler.dense.weight": torch.ones(30, 30)})
    with caplog.at_level(logging.WARNING, "regard"):
        bundle = import_folder(tmp_path)
    assert "no use for it: vit.pooler.dense.weight" in caplog.text
    close(bundle.model(images_of(theirs)), whole)


def test_tensors_that_do_not_fit_are_named(transformers, tmp_path):
    made(transformers, "DeiTForImageClassificationWithTeacher", 0, tmp_path)

    def wrong(tensors):
        del tensors["deit.embeddings.distillation_token"], tensors["deit.encoder.layer.1.output.dense.bias"]
        return tensors | {"deit.relative": torch.ones(3)}

    good = load_file(tmp_path / "model.safetensors")
    changed(tmp_path, wrong)
    with pytest.raises(RegardError) as caught:
        import_folder(tmp_path)
    said = "missing: deit.embeddings.distillation_token, deit.encoder.layer.1.output.dense.bias; unknown: deit.relative"
    assert said in str(caught.value)
    misshapen = {"deit.embeddings.position_embeddings": torch.ones(2, 8, 30), "cls_classifier.bias": torch.ones(3)}
    save_file(good | misshapen, tmp_path / "model.safetensors")
    with pytest.raises(RegardError) as caught:
        import_folder(tmp_path)
    said = "of another shape: deit.embeddings.position_embeddings (2, 8, 30), cls_classifier.bias (3,)"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 35, "pooler_output_size = 30"),
        ("num_hidden_layers", 3, "missing: .*layer.2"),
        ("num_hidden_layers", 10**9, "model.layers must be between 1 and 10,000"),
        ("image_size", [8, 16], r"embeddings.position_embeddings \(1, 7, 30\)"),
        ("image_size", [8, 10], "does not divide into patches"),
        ("image_size", 10**9, "model.image_height must be between 1 and 16,384"),
        ("image_size", [8], "image_size"),
        ("image_size", "8", "image_size"),
        ("patch_size", 2, "projection.weight"),
        ("patch_size", [4, 2], "patch_size.*squares"),
        ("num_channels", 1, "projection.weight"),
        ("num_attention_heads", 4, "must be a multiple of model.heads"),
        ("num_attention_heads", 0, "num_attention_heads"),
        ("head_dim", 3, "head_dim"),
        ("qkv_bias", False, "unknown: .*query.bias"),
        ("intermediate_size", 36, "intermediate.dense.weight"),
        ("hidden_act", "quick_gelu", "hidden_act"),
        ("pooler_act", "gelu", "pooler_act"),
        ("pooler_output_size", 31, "pooler_output_size"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("auto_map", {"AutoModel": "own.Model"}, "auto_map"),
    ],
)
def test_a_config_that_lies_or_asks_for_what_is_not_there(transformers, tmp_path, key, value, said):
    made(transformers, "ViTModel", 0, tmp_path)
    edited(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=said):
        import_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("id2label", {"1": "a", "2": "b"}), ("problem_type", "multi_label_classification")]
)
def test_labels_must_be_numbered_and_of_one_image_one(transformers, tmp_path, key, value):
    made(transformers, "ViTForImageClassification", 0, tmp_path)
    edited(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=key):
        import_folder(tmp_path)


# -- pixels ------------------------------------------------------------------------------------------------------------


def test_how_pixels_are_normalised(transformers, tmp_path, caplog):
    made(transformers, "ViTForImageClassification", 0, tmp_path)
    config = import_folder(tmp_path).model.config
    assert (config.mean, config.std) == (tuple(MEAN), tuple(STD))
    write_pictures(tmp_path, do_normalize=False)
    config = import_folder(tmp_path).model.config
    assert (config.mean, config.std) == ((0.0,), (1.0,))
    write_pictures(tmp_path, image_mean=0.4, image_std=0.3)
    assert import_folder(tmp_path).model.config.mean == (0.4,)
    assert caplog.text == ""
    (tmp_path / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING, "regard"):
        config = import_folder(tmp_path).model.config
    assert (config.mean, config.std) == ((0.5,), (0.5,))
    assert "preprocessor_config.json: there is no such file" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_rescale", False),
        ("rescale_factor", 1 / 127.5),
        ("image_mean", [0.5, "0.5", 0.5]),
        ("image_mean", []),
        ("do_normalize", "yes"),
    ],
)
def test_pixels_in_another_way_are_refused(transformers, tmp_path, key, value):
    made(transformers, "ViTForImageClassification", 0, tmp_path)
    write_pictures(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=f"preprocessor_config.json: {key}"):
        import_folder(tmp_path)
    write_pictures(tmp_path, image_std=[0.0, 1.0, 1.0])
    with pytest.raises(RegardError, match="std"):
        import_folder(tmp_path)


def test_their_processor_makes_the_same_pixels(transformers, tmp_path):
    bundle = own(mean=(0.4,), std=(0.2, 0.3, 0.25))
    export_folder(bundle, tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8))
    processor = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
    theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        shares = theirs(processor(image, return_tensors="pt")["pixel_values"]).logits.softmax(-1)[0]
    assert list(bundle.classify([image])[0].probabilities.values()) == pytest.approx(shares.tolist(), abs=1e-5)


# -- models of our own -------------------------------------------------------------------------------------------------


def own(**changes):
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, layers=2, feedforward=20, patch=4, image_height=12, image_width=16)
    config = ViTConfig(**(dict(labels=("cat", "dog"), drop_path=0.3, decoder_width=32) | sizes | changes))
    model = ViT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return ImageModel(model)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViTForImageClassification", dict(dropout=0.1, segmenter="queries")),
        ("ViTForImageClassification", dict(patches="convolution", activation="gelu_tanh", channels=1)),
        ("ViTForImageClassification", dict(labels=())),
        ("ViTModel", dict(head="none", pooled_map=True, qkv_bias=False)),
        ("DeiTForImageClassification", dict(registers=1)),
        ("DeiTForImageClassificationWithTeacher", dict(distilled=True)),
    ],
)
def test_a_model_of_our_own_goes_out(transformers, tmp_path, name, changes):
    bundle = own(mean=(0.3,), std=(0.25,), **changes)
    assert export_folder(bundle, tmp_path) == name
    images = torch.rand(3, bundle.model.config.channels, 12, 16)
    theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted = theirs((images - 0.3) / 0.25)
        close(bundle.model(images), wanted.pooler_output if name == "ViTModel" else wanted.logits)
        close(import_folder(tmp_path).model(images), bundle.model(images))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(pooling="mean"), "pooling = 'mean'"),
        (dict(pooling="query"), "pooling = 'query'"),
        (dict(registers=2), "registers = 2"),
        (dict(registers=1, distilled=True), "distilled = True"),
        (dict(distilled=True, head="none"), "distilled = True"),
        (dict(qk_norm=True), "qk_norm = True"),
        (dict(layer_scale=0.1), "layer_scale = 0.1"),
        (dict(positions="rotary"), "positions = 'rotary'"),
        (dict(prefix_positions=False), "prefix_positions = False"),
        (dict(patches="stem"), "patches = 'stem'"),
        (dict(pooled_norm=True), "pooled_norm = True"),
        (dict(pooled_map=True), "pooled_map = True"),
        (dict(norm_kind="rms"), "norm_kind = 'rms'"),
        (dict(norm="post"), "norm = 'post'"),
        (dict(activation="swiglu"), "activation = 'swiglu'"),
        (dict(score="cosine"), "score = 'cosine'"),
        (dict(head="segment"), "head = 'segment'"),
        (dict(head="pixels"), "head = 'pixels'"),
    ],
)
def test_what_no_class_computes_stays_here(tmp_path, changes, said):
    with pytest.raises(RegardError, match="No class of transformers computes what this model does") as caught:
        export_folder(own(**changes), tmp_path / "out")
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_commands(tmp_path, capsys):
    bundle, image = own(), np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    bundle.save(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert "a folder for transformers (ViTForImageClassification)" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    assert "Imported an image model with" in capsys.readouterr().err
    back = load(tmp_path / "back", "cpu")
    same(weights_of(back), weights_of(bundle))
    [ours], [before] = back.classify([image]), bundle.classify([image])
    assert ours.probabilities == pytest.approx(before.probabilities, abs=1e-6)
    assert back.training == {"imported": {"class": "ViTForImageClassification", "folder": "hf"}}
