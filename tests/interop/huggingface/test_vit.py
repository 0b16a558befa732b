"""ViT and DeiT compared with transformers, with random weights."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from regard.cli import main
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.layers.patches import pack_images
from regard.models.vit import ViT, ViTConfig
from regard.pipelines import ImageModel, load
from regard.viewer.rollout import attention_rollout
from tests.interop.image_model_comparison import (
    CONFIGS,
    MEAN,
    NAMES,
    STD,
    TOWER_CONFIGS,
    assert_close,
    assert_same_attention,
    make_hf_model,
    random_images,
    run_hf_model,
    write_preprocessor,
)
from tests.interop.model_comparison import (
    assert_same_tensors,
    assert_same_weights,
    edit_config,
    round_trip,
    weights_of,
)

CASES = [(family, i) for family in ("ViT", "DeiT") for i in range(len(CONFIGS))]


def edit_tensors(folder, edit):
    tensors = edit(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


TOWER_CASES = [(family, i) for family, configs in TOWER_CONFIGS.items() for i in range(len(configs))]


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "index"), [*CASES, *TOWER_CASES])
def test_encoder_matches_transformers(transformers, tmp_path, family, index):
    hf_model = make_hf_model(transformers, f"{family}Model", index, tmp_path / "in")
    images = random_images(hf_model)
    expected = run_hf_model(hf_model, images)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    encoded, pooled = assert_same_attention(pipeline.model, images, expected)
    assert_close(encoded, expected.last_hidden_state)
    mean = expected.last_hidden_state.mean(1)  # SigLIP without its pooling
    assert_close(pooled, mean if expected.pooler_output is None else expected.pooler_output)
    assert torch.equal(run_hf_model(exported, images).last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("family", ["ViT", "DeiT"])
def test_encoder_without_pooler_matches_transformers(transformers, tmp_path, caplog, family):
    hf_model = make_hf_model(transformers, f"{family}Model", 0, tmp_path / "in")
    edit_tensors(
        tmp_path / "in", lambda tensors: {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    )
    pipeline = import_huggingface(tmp_path / "in")
    images = random_images(hf_model)
    expected = run_hf_model(hf_model, images)
    encoded, pooled = assert_same_attention(pipeline.model, images, expected)
    assert_close(encoded, expected.last_hidden_state)
    assert_close(pooled, expected.last_hidden_state[:, 0])
    with caplog.at_level(logging.WARNING, "regard"):
        name = export_huggingface(pipeline, tmp_path / "out")
    assert f"{name}.from_pretrained(…, add_pooling_layer=False)" in caplog.text
    assert_same_tensors(tmp_path / "in", tmp_path / "out")
    _, report = getattr(transformers, name).from_pretrained(
        tmp_path / "out", add_pooling_layer=False, output_loading_info=True
    )
    assert not any(report.values()), report


_CLASSIFIERS = ["ViTForImageClassification", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        *((name, i) for name in _CLASSIFIERS for i in range(len(CONFIGS))),
        *((f"{family}ForImageClassification", i) for family, i in TOWER_CASES if family.startswith("Dino")),
    ],
)
def test_classifier_matches_transformers(transformers, tmp_path, name, index):
    hf_model = make_hf_model(transformers, name, index, tmp_path / "in", id2label=NAMES)
    images = random_images(hf_model)
    expected = run_hf_model(hf_model, images)
    pipeline, exported = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    assert isinstance(pipeline, ImageModel)
    assert pipeline.labels == ("cat", "dog", "owl")
    assert_close(assert_same_attention(pipeline.model, images, expected)[1], expected.logits)
    assert torch.equal(run_hf_model(exported, images).logits, expected.logits)
    assert exported.config.id2label == NAMES


@pytest.mark.parametrize(
    "name", ["ViTModel", "ViTForImageClassification", "DeiTModel", "DeiTForImageClassificationWithTeacher"]
)
def test_old_and_new_tensor_names_are_read(transformers, tmp_path, name):
    hf_model = make_hf_model(transformers, name, 0, tmp_path)
    old = import_huggingface(tmp_path)
    assert any("encoder.layer.0.attention.attention.query" in key for key in load_file(tmp_path / "model.safetensors"))
    hf_model.save_pretrained(tmp_path, save_original_format=False)
    assert any("layers.0.attention.q_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    new = import_huggingface(tmp_path)
    assert_same_weights(weights_of(old), weights_of(new))
    assert old.model.config == new.model.config


@pytest.mark.parametrize("name", ["ViTModel", "DeiTForImageClassification"])
def test_name_prefix_is_optional(transformers, tmp_path, name):
    make_hf_model(transformers, name, 0, tmp_path)
    expected = weights_of(import_huggingface(tmp_path))
    prefix = name[:-5].lower() + "." if name == "ViTModel" else "deit."
    if name == "ViTModel":
        edit_tensors(tmp_path, lambda tensors: {prefix + key: tensor for key, tensor in tensors.items()})
    else:
        edit_tensors(tmp_path, lambda tensors: {key.removeprefix(prefix): tensor for key, tensor in tensors.items()})
    assert_same_weights(weights_of(import_huggingface(tmp_path)), expected)


@pytest.mark.parametrize("size", [(20, 20), (10, 25), (5, 35)])
@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_other_image_sizes_match_transformers(transformers, tmp_path, name, size):
    hf_model = make_hf_model(transformers, name, 2, tmp_path)
    images = random_images(hf_model, size)
    expected = run_hf_model(hf_model, images, interpolate_pos_encoding=True)
    assert_close(assert_same_attention(import_huggingface(tmp_path).model, images, expected)[1], expected.logits)


def test_labels_without_names_get_default_names(transformers, tmp_path):
    make_hf_model(transformers, "ViTForImageClassification", 0, tmp_path, num_labels=2)
    assert import_huggingface(tmp_path).labels == ("LABEL_0", "LABEL_1")


def test_tensors_of_another_class_are_left_out_with_a_warning(transformers, tmp_path, caplog):
    hf_model = make_hf_model(transformers, "ViTForImageClassification", 0, tmp_path)
    expected = run_hf_model(hf_model, random_images(hf_model)).logits
    edit_tensors(tmp_path, lambda tensors: tensors | {"vit.pooler.dense.weight": torch.ones(30, 30)})
    with caplog.at_level(logging.WARNING, "regard"):
        pipeline = import_huggingface(tmp_path)
    assert "unused by a model of this class: vit.pooler.dense.weight" in caplog.text
    assert_close(pipeline.model(random_images(hf_model)), expected)


def test_missing_unknown_and_misshapen_tensors_are_named(transformers, tmp_path):
    make_hf_model(transformers, "DeiTForImageClassificationWithTeacher", 0, tmp_path)

    def spoil(tensors):
        del tensors["deit.embeddings.distillation_token"], tensors["deit.encoder.layer.1.output.dense.bias"]
        return tensors | {"deit.relative": torch.ones(3)}

    original = load_file(tmp_path / "model.safetensors")
    edit_tensors(tmp_path, spoil)
    with pytest.raises(RegardError) as caught:
        import_huggingface(tmp_path)
    message = (
        "missing: deit.embeddings.distillation_token, deit.encoder.layer.1.output.dense.bias; unknown: deit.relative"
    )
    assert message in str(caught.value)
    misshapen = {"deit.embeddings.position_embeddings": torch.ones(2, 8, 30), "cls_classifier.bias": torch.ones(3)}
    save_file(original | misshapen, tmp_path / "model.safetensors")
    with pytest.raises(RegardError) as caught:
        import_huggingface(tmp_path)
    message = "wrong shape: deit.embeddings.position_embeddings (2, 8, 30), cls_classifier.bias (3,)"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
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
def test_wrong_or_unsupported_settings_are_an_error(transformers, tmp_path, key, value, message):
    make_hf_model(transformers, "ViTModel", 0, tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=message):
        import_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id2label", {"1": "a", "2": "b"}),
        ("problem_type", "multi_label_classification"),
        ("problem_type", "regression"),
    ],
)
def test_multi_label_and_unnumbered_labels_are_an_error(transformers, tmp_path, key, value):
    make_hf_model(transformers, "ViTForImageClassification", 0, tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=key):
        import_huggingface(tmp_path)


# -- pixels -----------------------------------------------------------------------------------------------------------


def test_pixel_normalization_is_read(transformers, tmp_path, caplog):
    make_hf_model(transformers, "ViTForImageClassification", 0, tmp_path)
    config = import_huggingface(tmp_path).model.config
    assert (config.mean, config.std) == (tuple(MEAN), tuple(STD))
    write_preprocessor(tmp_path, do_normalize=False)
    config = import_huggingface(tmp_path).model.config
    assert (config.mean, config.std) == ((0.0,), (1.0,))
    write_preprocessor(tmp_path, image_mean=0.4, image_std=0.3)
    assert import_huggingface(tmp_path).model.config.mean == (0.4,)
    assert caplog.text == ""
    (tmp_path / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING, "regard"):
        config = import_huggingface(tmp_path).model.config
    assert (config.mean, config.std) == ((0.5,), (0.5,))
    assert "preprocessor_config.json: the file is missing" in caplog.text


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
def test_unsupported_pixel_normalization_is_an_error(transformers, tmp_path, key, value):
    make_hf_model(transformers, "ViTForImageClassification", 0, tmp_path)
    write_preprocessor(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=f"preprocessor_config.json: {key}"):
        import_huggingface(tmp_path)
    write_preprocessor(tmp_path, image_std=[0.0, 1.0, 1.0])
    with pytest.raises(RegardError, match="std"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize("size", [(12, 12), (48, 20), (19, 50), (12, 31)])
def test_exported_image_processor_crops_like_regard(transformers, tmp_path, size):
    """The label depends on the center of the image; an image that is squashed instead would have the other one."""
    pipeline = make_image_model(mean=(0.4,), std=(0.2, 0.3, 0.25), image_width=12)
    export_huggingface(pipeline, tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    smooth = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    image = Image.fromarray(smooth).resize(size, Image.Resampling.BICUBIC)
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    own = torch.tensor(pipeline.preprocess(image)).permute(2, 0, 1) / 255
    expected = (own - 0.4) / torch.tensor([0.2, 0.3, 0.25])[:, None, None]
    # The crop starts at a whole pixel in transformers.
    step = (expected.diff(dim=1).abs().max() + expected.diff(dim=2).abs().max()) / 2
    assert (pixels[0] - expected).abs().max() <= (1e-5 if size[0] == size[1] else step)
    with torch.no_grad():
        hf_model = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
        probabilities = hf_model(pixels).logits.softmax(-1)[0]
    found = pipeline.classify([image])[0].probabilities
    assert list(found.values()) == pytest.approx(probabilities.tolist(), abs=1e-5 if size[0] == size[1] else 0.05)


def test_input_sizes_that_transformers_cannot_cover_are_reported(transformers, tmp_path, caplog):
    export_huggingface(make_image_model(), tmp_path)
    assert "changes the aspect ratio of images to resize them to (12, 16)" in caplog.text
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)).convert("RGBA")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 12, 16)


# -- export of models of Regard ---------------------------------------------------------------------------------------


def make_image_model(**changes):
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
def test_exported_model_gives_the_same_output_in_transformers(transformers, tmp_path, name, changes):
    pipeline = make_image_model(mean=(0.3,), std=(0.25,), **changes)
    assert export_huggingface(pipeline, tmp_path) == name
    images = torch.rand(3, pipeline.model.config.channels, 12, 16)
    hf_model = getattr(transformers, name).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = hf_model((images - 0.3) / 0.25)
        assert_close(pipeline.model(images), expected.pooler_output if name == "ViTModel" else expected.logits)
        assert_close(import_huggingface(tmp_path).model(images), pipeline.model(images))


@pytest.mark.parametrize(
    ("changes", "message"),
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
        (dict(head="segment"), "has the head 'segment'"),
        (dict(head="pixels"), "has the head 'pixels'"),
    ],
)
def test_unsupported_fields_are_named_and_nothing_is_written(tmp_path, changes, message):
    with pytest.raises(RegardError, match="No class of transformers ") as caught:
        export_huggingface(make_image_model(**changes), tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_export_and_import_commands(tmp_path, capsys):
    pipeline, image = make_image_model(), np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    pipeline.save(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert "a folder for transformers (ViTForImageClassification)" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    assert "Imported an image model with" in capsys.readouterr().err
    back = load(tmp_path / "back", "cpu")
    assert_same_weights(weights_of(back), weights_of(pipeline))
    [actual], [expected] = back.classify([image]), pipeline.classify([image])
    assert actual.probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    assert back.training == {"imported": {"class": "ViTForImageClassification", "folder": "hf"}}


# -- DINOv2, CLIP and SigLIP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layerscale_value", 0.0),
        ("image_size", [8, 12]),
        ("patch_size", [4, 2]),
        ("hidden_act", "mish"),
        ("head_dim", 5),
        ("problem_type", "regression"),
    ],
)
def test_unsupported_settings_of_dinov2_are_an_error_that_names_the_key(transformers, tmp_path, key, value):
    make_hf_model(transformers, "Dinov2ForImageClassification", 0, tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=f"{key} = .* is unsupported"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize("family", ["CLIPVision", "SiglipVision"])
@pytest.mark.parametrize(("key", "value"), [("image_size", 13), ("hidden_act", "mish"), ("patch_size", [4, 2])])
def test_unsupported_settings_of_towers_are_an_error_that_names_the_key(transformers, tmp_path, family, key, value):
    make_hf_model(transformers, f"{family}Model", 0, tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(RegardError, match=f"{key} = .* is unsupported"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize("family", ["CLIPVision", "SiglipVision"])
def test_towers_with_the_prefix_of_earlier_versions_are_read(transformers, tmp_path, family):
    make_hf_model(transformers, f"{family}Model", 0, tmp_path)
    expected = weights_of(import_huggingface(tmp_path))
    edit_tensors(tmp_path, lambda tensors: {f"vision_model.{key}": tensor for key, tensor in tensors.items()})
    assert_same_weights(weights_of(import_huggingface(tmp_path)), expected)


@pytest.mark.parametrize("family", ["CLIPVision", "SiglipVision"])
def test_packed_images_give_the_features_of_towers(transformers, tmp_path, family):
    hf_model = make_hf_model(transformers, f"{family}Model", 0, tmp_path)
    images = random_images(hf_model)
    model = import_huggingface(tmp_path).model
    with torch.no_grad():
        packed = pack_images(list(images), model.config.patch)
        assert_close(model(packed), run_hf_model(hf_model, images).pooler_output)


def test_packed_images_give_the_logits_of_dinov2(transformers, tmp_path):
    hf_model = make_hf_model(transformers, "Dinov2WithRegistersForImageClassification", 0, tmp_path)
    images = random_images(hf_model)
    model = import_huggingface(tmp_path).model
    with torch.no_grad():
        assert_close(model(pack_images(list(images), model.config.patch)), run_hf_model(hf_model, images).logits)


def test_rollout_of_class_token_and_patches_is_a_distribution(transformers, tmp_path):
    hf_model = make_hf_model(transformers, "Dinov2ForImageClassification", 0, tmp_path)
    model = import_huggingface(tmp_path).model
    images = random_images(hf_model)
    for rollout in (attention_rollout(model, images), attention_rollout(model, images, [0, 1])):
        assert rollout.pooled.shape == (2, model.config.max_len)
        torch.testing.assert_close(rollout.pooled.sum(1), torch.ones(2))
