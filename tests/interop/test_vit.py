"""ViT and DeiT beside transformers with random weights; Vision Transformers of timm beside plain steps."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from regard.attention import exact, record
from regard.cli import main
from regard.errors import RegardError
from regard.folder import ImageModel, load
from regard.interop import export_folder, import_folder
from regard.interop.mapping import write_weights
from regard.interop.timm_like import table_of
from regard.interop.vit_like import PATCHES
from regard.models.vit import ViT, ViTConfig
from tests.interop.comparing import random_model, round_trip, same_tensors
from tests.interop.plain_vit import plain_vit

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NAMES = {0: "cat", 1: "dog", 2: "owl"}

_SIZES = dict(hidden_size=30, num_attention_heads=5, num_hidden_layers=2, intermediate_size=37)
CONFIGS = [
    dict(_SIZES, image_size=[8, 12], patch_size=4),
    dict(_SIZES, image_size=8, patch_size=[2, 2], qkv_bias=False, num_channels=1, hidden_act="gelu_new"),
    dict(_SIZES, hidden_size=24, num_attention_heads=1, num_hidden_layers=3, image_size=15, patch_size=5)
    | dict(hidden_act="relu", layer_norm_eps=1e-3),
]
CASES = [(family, i) for family in ("ViT", "DeiT") for i in range(len(CONFIGS))]


def made(transformers, name, number, folder, **changes):
    """A model of theirs and its folder."""
    config = getattr(transformers, f"{'DeiT' if name.startswith('DeiT') else 'ViT'}Config")
    model = random_model(getattr(transformers, name), config(**CONFIGS[number] | changes), folder)
    write_pictures(folder, model.config.num_channels)
    return model


def write_pictures(folder, channels=3, **changes):
    table = {"do_normalize": True, "image_mean": MEAN[:channels], "image_std": STD[:channels]}
    (folder / "preprocessor_config.json").write_text(json.dumps(table | changes))


def images_of(model, size=None, count=2):
    torch.manual_seed(5)
    given = size or model.config.image_size
    sides = (given, given) if isinstance(given, int) else given
    return torch.rand(count, model.config.num_channels, *sides)


def normalised(images):
    mean, std = (torch.tensor(one[: images.shape[1]])[:, None, None] for one in (MEAN, STD))
    return (images - mean) / std


@torch.no_grad()
def run_theirs(model, images, **more):
    return model(normalised(images), output_attentions=True, **more)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@torch.no_grad()
def compare(ours, images, theirs):
    """Every map of every token, and then only what the output asks for; the tokens and the output."""
    with record(ours) as recording:
        encoded = ours.encode(images)
    maps = [exact.weights(call) for one in recording.values() for call in one.calls]
    for own, other in zip(maps, theirs.attentions, strict=True):
        close(own, other)
    with record(ours) as recording:
        output = ours(images)
    [last] = recording[f"blocks.{len(maps) - 1}.attention"].calls
    asked = exact.weights(last)
    close(asked, theirs.attentions[-1][:, :, : asked.shape[2]])
    return encoded, output


def weights_of(bundle):
    return {name: parameter.detach() for name, parameter in bundle.model.named_parameters()}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


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
        ("num_hidden_layers", 10**9, "layers, but there are only"),
        ("image_size", [8, 16], r"embeddings.position_embeddings \(1, 7, 30\)"),
        ("image_size", [8, 10], "does not divide into patches"),
        ("image_size", 10**9, "embeddings.position_embeddings"),
        ("image_size", [8], "image_size"),
        ("image_size", "8", "image_size"),
        ("patch_size", 2, "projection.weight"),
        ("patch_size", [4, 2], "patch_size.*squares"),
        ("num_channels", 1, "projection.weight"),
        ("num_attention_heads", 4, "does not divide into 4 heads"),
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
    assert "opens in transformers as ViTForImageClassification" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    assert "A model of images of" in capsys.readouterr().err
    back = load(tmp_path / "back", "cpu")
    same(weights_of(back), weights_of(bundle))
    [ours], [before] = back.classify([image]), bundle.classify([image])
    assert ours.probabilities == pytest.approx(before.probabilities, abs=1e-6)
    assert back.training == {"imported": {"class": "ViTForImageClassification", "folder": "hf"}}


# -- timm --------------------------------------------------------------------------------------------------------------

_TIMM = dict(embed_dim=30, depth=2, num_heads=5, patch_size=4, img_size=[8, 12])
VARIANTS = [
    dict(),
    dict(scaled=True, qkv_bias=False),
    dict(normed=True),
    dict(registers=4, among=False),
    dict(registers=2, scaled=True),
    dict(classes=0),
    dict(distilled=True),
    dict(pool="avg", fc_norm=True),  # the class token is there and not read
    dict(pool="avg", class_token=False),
    dict(pool="avg", class_token=False, registers=1, fc_norm=True, among=False, scaled=True, normed=True),
]


def timm_tensors(
    classes=3,
    class_token=True,
    distilled=False,
    registers=0,
    among=True,
    scaled=False,
    normed=False,
    qkv_bias=True,
    fc_norm=False,
    pool="token",
):
    torch.manual_seed(7)
    width, hidden, patches = 30, 37, 6
    found = {}

    def layer(name, *shape, bias=True, one=0.0):
        found[f"{name}.weight"] = one + 0.2 * torch.randn(shape)
        if bias:
            found[f"{name}.bias"] = 0.2 * torch.randn(shape[0])

    tokens = {"cls_token": int(class_token), "dist_token": int(distilled), "reg_token": registers}
    found |= {name: torch.randn(1, count, width) for name, count in tokens.items() if count}
    found["pos_embed"] = torch.randn(1, patches + among * sum(tokens.values()), width)
    layer("patch_embed.proj", width, 3, 4, 4)
    for i in range(2):
        block = f"blocks.{i}"
        layer(f"{block}.norm1", width, one=1.0)
        layer(f"{block}.attn.qkv", 3 * width, width, bias=qkv_bias)
        layer(f"{block}.attn.proj", width, width)
        layer(f"{block}.norm2", width, one=1.0)
        layer(f"{block}.mlp.fc1", hidden, width)
        layer(f"{block}.mlp.fc2", width, hidden)
        if normed:
            layer(f"{block}.attn.q_norm", 6, one=1.0)
            layer(f"{block}.attn.k_norm", 6, one=1.0)
        if scaled:
            found |= {f"{block}.ls{n}.gamma": torch.randn(width) for n in (1, 2)}
    layer("fc_norm" if fc_norm else "norm", width, one=1.0)
    if classes:
        layer("head", classes, width)
    if distilled:
        layer("head_dist", classes, width)
    return found


def timm_folder(folder, tensors, name="vit_tiny_patch16_224", arguments=_TIMM, **changes):
    folder.mkdir(exist_ok=True)
    about = {"input_size": [3, 8, 12], "mean": MEAN, "std": STD, "crop_pct": 0.9, "classifier": "head"}
    table = {"architecture": name, "pretrained_cfg": about, "model_args": arguments}
    if tensors is not None:
        table |= {"num_features": 30, "num_classes": len(tensors.get("head.weight", ()))}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(table | changes))
    return folder


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_names_of_timm(tmp_path, variant):
    tensors = timm_tensors(**variant)
    pool = variant.get("pool", "token")
    bundle = import_folder(timm_folder(tmp_path, tensors, global_pool=pool))
    torch.manual_seed(1)
    images = torch.rand(2, 3, 8, 12)
    wanted = plain_vit(tensors, normalised(images), heads=5, pool=pool)
    close(bundle.model(images), wanted)
    assert (bundle.model.config.image_height, bundle.model.config.image_width) == (8, 12)
    # The table runs in the other direction too.
    ours = weights_of(bundle)
    ours[PATCHES] = ours[PATCHES].unflatten(1, (3, 4, 4))
    tokens = [one for one in ("cls_token", "dist_token", "reg_token") if one in tensors]
    norm = "fc_norm" if variant.get("fc_norm") else "norm"
    same(write_weights(table_of(tokens, norm), {"blocks": 2}, ours), tensors)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_the_same_weights_by_the_names_of_timm(transformers, tmp_path, name):
    theirs = made(transformers, name, 0, tmp_path / "hf", layer_norm_eps=1e-6, id2label=NAMES)
    images = images_of(theirs)
    wanted = run_theirs(theirs, images)
    bundle = import_folder(timm_folder(tmp_path / "timm", by_timm(load_file(tmp_path / "hf" / "model.safetensors"))))
    close(compare(bundle.model, images, wanted)[1], wanted.logits)
    same(weights_of(bundle), weights_of(import_folder(tmp_path / "hf")))
    # And so a model of timm goes on to transformers.
    assert export_folder(bundle, tmp_path / "out") == name
    same_tensors(tmp_path / "hf", tmp_path / "out")


def by_timm(tensors):
    """Tensors of ViT or DeiT by the names that timm has for them."""
    plain = {name.split(".", 1)[1] if name.split(".")[0] in ("vit", "deit") else name: x for name, x in tensors.items()}
    fixed = {
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.position_embeddings": "pos_embed",
    }
    spelled = [
        ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
        ("encoder.layer", "blocks"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("layernorm", "norm"),
        ("attention.output.dense", "attn.proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("distillation_classifier", "head_dist"),
        ("cls_classifier", "head"),
        ("classifier", "head"),
    ]
    found = {}
    for name, tensor in plain.items():
        if ".attention.attention." in name:
            block, _, part = name.partition(".attention.attention.query.")
            if part:
                three = [plain[name.replace("query", one)] for one in ("query", "key", "value")]
                found[f"{block.replace('encoder.layer', 'blocks')}.attn.qkv.{part}"] = torch.cat(three)
            continue
        name = fixed.get(name, name)
        for old, new in spelled:
            name = name.replace(old, new)
        found[name] = tensor
    return found


def test_the_name_of_an_architecture_says_what_tensors_do_not(tmp_path):
    """192 wide and 3 heads, patches of 16 at 224×224; here of one layer."""
    config = ViTConfig(layers=1, labels=("a", "b"), norm_eps=1e-6)
    ours = {name: one.detach() for name, one in ViT(config).named_parameters()}
    ours[PATCHES] = ours[PATCHES].unflatten(1, (3, 16, 16))
    tensors = write_weights(table_of(["cls_token"], "norm"), {"blocks": 1}, ours)
    about = {"input_size": [3, 224, 224]}
    names = dict(label_names=["a", "b"], num_features=192, arguments={"depth": 1})
    folder = timm_folder(tmp_path, tensors, "deit_tiny_patch16_224.fb_in1k", pretrained_cfg=about, **names)
    assert import_folder(folder).model.config == config
    # The same of the tensors alone, in a folder or not.
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "deit.safetensors")
    bare = import_folder(folder / "deit.safetensors")
    assert bare.labels == ("LABEL_0", "LABEL_1")
    assert bare.model.config.heads == 3
    assert main(["import", str(folder / "deit.safetensors"), "--out", str(tmp_path / "out")]) == 0
    same(weights_of(load(tmp_path / "out", "cpu")), weights_of(bare))
    (folder / "deit.safetensors").rename(folder / "model.safetensors")
    same(weights_of(import_folder(folder)), weights_of(bare))


def test_tensors_alone_say_what_they_can(tmp_path, caplog):
    tensors = timm_tensors(registers=3, among=False, normed=True)
    tensors["pos_embed"] = torch.randn(1, 9, 30)
    save_file(tensors, tmp_path / "own.safetensors")
    with caplog.at_level(logging.WARNING, "regard"):
        config = import_folder(tmp_path / "own.safetensors").model.config
    assert (config.heads, config.image_height, config.image_width) == (5, 12, 12)  # heads by the norm of queries
    assert (config.registers, config.prefix_positions, config.mean) == (3, False, (0.5,))
    assert "nothing says what mean" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(pos_embed=torch.randn(1, 8, 30)), "nothing says how large images are, and 8 positions"),
        (dict(), "nothing says how many heads there are in a width of 30"),
        ({"patch_embed.proj.weight": None}, "these are of none"),
    ],
)
def test_tensors_alone_that_do_not_say_enough(tmp_path, change, said):
    tensors = timm_tensors() | {"pos_embed": torch.randn(1, 10, 30)} | change
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "own.safetensors")
    with pytest.raises(RegardError, match=said):
        import_folder(tmp_path / "own.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "resnet50",
        "vit_base_patch16_rpn_224",
        "vit_base_patch16_siglip_gap_224",
        "vit_giant_patch14_reg4_dinov2",
        None,
        3,
    ],
)
def test_architectures_that_are_not_known(tmp_path, name):
    with pytest.raises(RegardError, match="is not known") as caught:
        import_folder(timm_folder(tmp_path, timm_tensors(), name))
    assert "vit_SIZE_patchN" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (dict(embed_dim=32), {}, "embed_dim = 32, but the tensors say 30"),
        ({}, dict(num_features=192), "num_features = 192, but the tensors say 30"),
        ({}, dict(num_classes=1000), "num_classes = 1000, but the tensors say 3"),
        (dict(depth=12), {}, "depth = 12, but the tensors say 2"),
        (dict(patch_size=8), {}, "patch_size = 8, but the tensors say 4"),
        (dict(in_chans=1), {}, "in_chans = 1, but the tensors say 3"),
        (dict(class_token=False), {}, "class_token = False, but the tensors say True"),
        (dict(reg_tokens=4), {}, "reg_tokens = 4, but the tensors say 0"),
        (dict(qkv_bias=False), {}, "qkv_bias = False"),
        (dict(qk_norm=True), {}, "qk_norm = True"),
        (dict(fc_norm=True), {}, "fc_norm = True"),
        (dict(no_embed_class=True), {}, "no_embed_class = True"),
        (dict(mlp_ratio=4.0), {}, "mlp_ratio = 4.0"),
        (dict(mlp_ratio=float("nan")), {}, "mlp_ratio = nan"),
        (dict(img_size=224), {}, "224×224 pixels have 3136 patches, .* but pos_embed has 7 rows"),
        (dict(num_heads=4), {}, "does not divide into 4 heads"),
        (dict(init_values=1e-5), {}, "missing: blocks.0.ls1.gamma"),
        (dict(global_pool="map"), {}, "global_pool"),
        (dict(global_pool=""), {}, "global_pool"),
        (dict(act_layer="quick_gelu"), {}, "act_layer"),
        (dict(norm_layer="rmsnorm"), {}, "norm_layer"),
        (dict(pool_include_prefix=True), {}, "pool_include_prefix"),
        ({}, dict(model_args=[1]), "model_args"),
        ({}, dict(pretrained_cfg="x"), "pretrained_cfg"),
        ({}, dict(label_names=["a", "b"]), "head.weight"),
    ],
)
def test_a_config_of_timm_that_lies_or_asks_for_what_is_not_there(tmp_path, arguments, changes, said):
    folder = timm_folder(tmp_path, timm_tensors(), arguments=_TIMM | arguments, **changes)
    with pytest.raises(RegardError, match=said):
        import_folder(folder)


def test_arguments_of_training_and_those_that_are_off_are_passed_over(tmp_path):
    more = dict(drop_path_rate=0.1, proj_drop_rate=0.2, dynamic_img_size=True, pre_norm=False, fc_norm=None)
    assert import_folder(timm_folder(tmp_path, timm_tensors(), arguments=_TIMM | more)).model.config.width == 30


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm_pre.weight": torch.ones(30)}, "unknown: norm_pre.weight"),
        ({"blocks.1.norm2.bias": None}, "missing: blocks.1.norm2.bias"),
        ({"pos_embed": None}, "missing: pos_embed"),
        ({"patch_embed.proj.weight": torch.ones(30, 48)}, "another shape: patch_embed.proj.weight"),
        ({"patch_embed.proj.weight": torch.ones(30, 3, 0, 0)}, "another shape: patch_embed.proj.weight"),
        ({"blocks.0.attn.qkv.weight": torch.ones(91, 30)}, "blocks.0.attn.qkv.weight"),
        ({f"blocks.{i}.attn.{x}_norm.weight": torch.rand(6) for i in (0, 1) for x in "qk"}, "q_norm.bias"),
        ({"blocks.0.attn.q_norm.weight": torch.ones(64)}, "blocks.0.attn.k_norm"),
        ({"cls_token": torch.ones(1, 2, 30)}, "cls_token"),
    ],
    ids=str,
)
def test_tensors_of_timm_that_do_not_fit_are_named(tmp_path, change, said):
    tensors = {name: one for name, one in (timm_tensors() | change).items() if one is not None}
    with pytest.raises(RegardError, match=said):
        import_folder(timm_folder(tmp_path, tensors))


def test_without_a_class_token_nothing_is_read_off_it(tmp_path):
    folder = timm_folder(tmp_path, timm_tensors(class_token=False, pool="avg"), global_pool="token")
    with pytest.raises(RegardError, match=r"global_pool.*there is no cls_token"):
        import_folder(folder)
