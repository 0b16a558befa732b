"""Vision Transformers of timm compared with a reference implementation."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.cli import main
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.interop.huggingface.timm import timm_table
from regard.interop.huggingface.vit import PATCH_WEIGHT
from regard.interop.weight_mapping import write_weights
from regard.models.vit import ViT, ViTConfig
from regard.pipelines import load
from tests.interop.image_model_comparison import (
    MEAN,
    NAMES,
    STD,
    assert_close,
    assert_same_attention,
    make_hf_model,
    normalize_pixels,
    random_images,
    run_hf_model,
)
from tests.interop.model_comparison import assert_same_tensors, assert_same_weights, weights_of
from tests.interop.reference_vit import reference_vit

_TIMM = dict(embed_dim=30, depth=2, num_heads=5, patch_size=4, img_size=[8, 12])
VARIANTS = [
    dict(),
    dict(layer_scale=True, qkv_bias=False),
    dict(qk_norm=True),
    dict(registers=4, prefix_positions=False),
    dict(registers=2, layer_scale=True),
    dict(classes=0),
    dict(distilled=True),
    dict(pool="avg", fc_norm=True),  # the class token is not pooled
    dict(pool="avg", class_token=False),
    dict(
        pool="avg", class_token=False, registers=1, fc_norm=True, prefix_positions=False, layer_scale=True, qk_norm=True
    ),
]


def timm_tensors(
    classes=3,
    class_token=True,
    distilled=False,
    registers=0,
    prefix_positions=True,
    layer_scale=False,
    qk_norm=False,
    qkv_bias=True,
    fc_norm=False,
    pool="token",
):
    torch.manual_seed(7)
    width, hidden, patches = 30, 37, 6
    tensors = {}

    def layer(name, *shape, bias=True, mean=0.0):
        tensors[f"{name}.weight"] = mean + 0.2 * torch.randn(shape)
        if bias:
            tensors[f"{name}.bias"] = 0.2 * torch.randn(shape[0])

    tokens = {"cls_token": int(class_token), "dist_token": int(distilled), "reg_token": registers}
    tensors |= {name: torch.randn(1, count, width) for name, count in tokens.items() if count}
    tensors["pos_embed"] = torch.randn(1, patches + prefix_positions * sum(tokens.values()), width)
    layer("patch_embed.proj", width, 3, 4, 4)
    for i in range(2):
        block = f"blocks.{i}"
        layer(f"{block}.norm1", width, mean=1.0)
        layer(f"{block}.attn.qkv", 3 * width, width, bias=qkv_bias)
        layer(f"{block}.attn.proj", width, width)
        layer(f"{block}.norm2", width, mean=1.0)
        layer(f"{block}.mlp.fc1", hidden, width)
        layer(f"{block}.mlp.fc2", width, hidden)
        if qk_norm:
            layer(f"{block}.attn.q_norm", 6, mean=1.0)
            layer(f"{block}.attn.k_norm", 6, mean=1.0)
        if layer_scale:
            tensors |= {f"{block}.ls{n}.gamma": torch.randn(width) for n in (1, 2)}
    layer("fc_norm" if fc_norm else "norm", width, mean=1.0)
    if classes:
        layer("head", classes, width)
    if distilled:
        layer("head_dist", classes, width)
    return tensors


def timm_folder(folder, tensors, name="vit_tiny_patch16_224", arguments=_TIMM, **changes):
    folder.mkdir(exist_ok=True)
    pretrained_cfg = {"input_size": [3, 8, 12], "mean": MEAN, "std": STD, "crop_pct": 0.9, "classifier": "head"}
    table = {"architecture": name, "pretrained_cfg": pretrained_cfg, "model_args": arguments}
    if tensors is not None:
        table |= {"num_features": 30, "num_classes": len(tensors.get("head.weight", ()))}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(table | changes))
    return folder


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_timm_models_match_the_reference(tmp_path, variant):
    tensors = timm_tensors(**variant)
    pool = variant.get("pool", "token")
    pipeline = import_huggingface(timm_folder(tmp_path, tensors, global_pool=pool))
    torch.manual_seed(1)
    images = torch.rand(2, 3, 8, 12)
    expected = reference_vit(tensors, normalize_pixels(images), heads=5, pool=pool)
    assert_close(pipeline.model(images), expected)
    assert (pipeline.model.config.image_height, pipeline.model.config.image_width) == (8, 12)
    # Writing with the same table gives the original tensors.
    weights = weights_of(pipeline)
    weights[PATCH_WEIGHT] = weights[PATCH_WEIGHT].unflatten(1, (3, 4, 4))
    tokens = [name for name in ("cls_token", "dist_token", "reg_token") if name in tensors]
    norm = "fc_norm" if variant.get("fc_norm") else "norm"
    assert_same_weights(write_weights(timm_table(tokens, norm), {"blocks": 2}, weights), tensors)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_timm_and_transformers_folders_give_the_same_model(transformers, tmp_path, name):
    hf_model = make_hf_model(transformers, name, 0, tmp_path / "hf", layer_norm_eps=1e-6, id2label=NAMES)
    images = random_images(hf_model)
    expected = run_hf_model(hf_model, images)
    pipeline = import_huggingface(
        timm_folder(tmp_path / "timm", rename_to_timm(load_file(tmp_path / "hf" / "model.safetensors")))
    )
    assert_close(assert_same_attention(pipeline.model, images, expected)[1], expected.logits)
    assert_same_weights(weights_of(pipeline), weights_of(import_huggingface(tmp_path / "hf")))
    # A model of timm can be exported to transformers.
    assert export_huggingface(pipeline, tmp_path / "out") == name
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")


def rename_to_timm(tensors):
    """Tensors of ViT or DeiT of transformers under the names of timm."""
    plain = {name.split(".", 1)[1] if name.split(".")[0] in ("vit", "deit") else name: x for name, x in tensors.items()}
    fixed = {
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.position_embeddings": "pos_embed",
    }
    replacements = [
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
    renamed = {}
    for name, tensor in plain.items():
        if ".attention.attention." in name:
            block, _, part = name.partition(".attention.attention.query.")
            if part:
                qkv = [plain[name.replace("query", role)] for role in ("query", "key", "value")]
                renamed[f"{block.replace('encoder.layer', 'blocks')}.attn.qkv.{part}"] = torch.cat(qkv)
            continue
        name = fixed.get(name, name)
        for old, new in replacements:
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def test_architecture_name_determines_the_number_of_heads(tmp_path):
    """Width 192 and 3 heads, patches of 16 at 224×224; here with one layer."""
    config = ViTConfig(layers=1, labels=("a", "b"), norm_eps=1e-6)
    weights = {name: parameter.detach() for name, parameter in ViT(config).named_parameters()}
    weights[PATCH_WEIGHT] = weights[PATCH_WEIGHT].unflatten(1, (3, 16, 16))
    tensors = write_weights(timm_table(["cls_token"], "norm"), {"blocks": 1}, weights)
    pretrained_cfg = {"input_size": [3, 224, 224]}
    options = dict(label_names=["a", "b"], num_features=192, arguments={"depth": 1})
    folder = timm_folder(tmp_path, tensors, "deit_tiny_patch16_224.fb_in1k", pretrained_cfg=pretrained_cfg, **options)
    assert import_huggingface(folder).model.config == config
    # Without config.json: a single file, or a folder.
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "deit.safetensors")
    bare = import_huggingface(folder / "deit.safetensors")
    assert bare.labels == ("LABEL_0", "LABEL_1")
    assert bare.model.config.heads == 3
    assert main(["import", str(folder / "deit.safetensors"), "--out", str(tmp_path / "out")]) == 0
    assert_same_weights(weights_of(load(tmp_path / "out", "cpu")), weights_of(bare))
    (folder / "deit.safetensors").rename(folder / "model.safetensors")
    assert_same_weights(weights_of(import_huggingface(folder)), weights_of(bare))


def test_weights_without_config_use_defaults(tmp_path, caplog):
    tensors = timm_tensors(registers=3, prefix_positions=False, qk_norm=True)
    tensors["pos_embed"] = torch.randn(1, 9, 30)
    save_file(tensors, tmp_path / "own.safetensors")
    with caplog.at_level(logging.WARNING, "regard"):
        config = import_huggingface(tmp_path / "own.safetensors").model.config
    assert (config.heads, config.image_height, config.image_width) == (5, 12, 12)  # heads from the norm of queries
    assert (config.registers, config.prefix_positions, config.mean) == (3, False, (0.5,))
    assert "the mean of pixels is missing" in caplog.text
    assert "no config.json; assuming the defaults of timm: pooling 'class', activation gelu, 5 heads" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(pos_embed=torch.randn(1, 8, 30)), "the image size is unknown; 8 positions"),
        (dict(), "the number of heads is unknown for width 30"),
        ({"patch_embed.proj.weight": None}, "only Vision Transformers of timm can be imported without config.json"),
    ],
)
def test_weights_without_config_that_are_ambiguous_are_an_error(tmp_path, change, message):
    tensors = timm_tensors() | {"pos_embed": torch.randn(1, 10, 30)} | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "own.safetensors")
    with pytest.raises(RegardError, match=message):
        import_huggingface(tmp_path / "own.safetensors")


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
def test_unsupported_architectures_are_an_error(tmp_path, name):
    with pytest.raises(RegardError, match="unsupported architecture") as caught:
        import_huggingface(timm_folder(tmp_path, timm_tensors(), name))
    assert "vit_SIZE_patchN" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (dict(embed_dim=32), {}, "embed_dim = 32, but the tensors imply 30"),
        ({}, dict(num_features=192), "num_features = 192, but the tensors imply 30"),
        ({}, dict(num_classes=1000), "num_classes = 1000, but the tensors imply 3"),
        (dict(depth=12), {}, "depth = 12, but the tensors imply 2"),
        (dict(patch_size=8), {}, "patch_size = 8, but the tensors imply 4"),
        (dict(in_chans=1), {}, "in_chans = 1, but the tensors imply 3"),
        (dict(class_token=False), {}, "class_token = False, but the tensors imply True"),
        (dict(reg_tokens=4), {}, "reg_tokens = 4, but the tensors imply 0"),
        (dict(qkv_bias=False), {}, "qkv_bias = False"),
        (dict(qk_norm=True), {}, "qk_norm = True"),
        (dict(fc_norm=True), {}, "fc_norm = True"),
        (dict(no_embed_class=True), {}, "no_embed_class = True"),
        (dict(mlp_ratio=4.0), {}, "mlp_ratio = 4.0"),
        (dict(mlp_ratio=float("nan")), {}, "mlp_ratio must be finite"),
        (dict(img_size=224), {}, "224×224 pixels have 3136 patches .* but pos_embed has 7 rows"),
        (dict(num_heads=4), {}, "must be a multiple of model.heads"),
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
def test_wrong_or_unsupported_timm_settings_are_an_error(tmp_path, arguments, changes, message):
    folder = timm_folder(tmp_path, timm_tensors(), arguments=_TIMM | arguments, **changes)
    with pytest.raises(RegardError, match=message):
        import_huggingface(folder)


def test_training_arguments_and_disabled_features_are_ignored(tmp_path):
    more = dict(drop_path_rate=0.1, proj_drop_rate=0.2, dynamic_img_size=True, pre_norm=False, fc_norm=None)
    assert import_huggingface(timm_folder(tmp_path, timm_tensors(), arguments=_TIMM | more)).model.config.width == 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_pre.weight": torch.ones(30)}, "unknown: norm_pre.weight"),
        ({"blocks.1.norm2.bias": None}, "missing: blocks.1.norm2.bias"),
        ({"pos_embed": None}, "missing: pos_embed"),
        ({"patch_embed.proj.weight": torch.ones(30, 48)}, "wrong shape: patch_embed.proj.weight"),
        ({"patch_embed.proj.weight": torch.ones(30, 3, 0, 0)}, "wrong shape: patch_embed.proj.weight"),
        ({"blocks.0.attn.qkv.weight": torch.ones(91, 30)}, "blocks.0.attn.qkv.weight"),
        ({f"blocks.{i}.attn.{x}_norm.weight": torch.full((6,), 0.5) for i in (0, 1) for x in "qk"}, "q_norm.bias"),
        ({"blocks.0.attn.q_norm.weight": torch.ones(64)}, "blocks.0.attn.k_norm"),
        ({"cls_token": torch.ones(1, 2, 30)}, "cls_token"),
    ],
    ids=str,
)
def test_wrong_timm_tensors_are_named(tmp_path, change, message):
    tensors = {name: tensor for name, tensor in (timm_tensors() | change).items() if tensor is not None}
    with pytest.raises(RegardError, match=message):
        import_huggingface(timm_folder(tmp_path, tensors))


def test_class_pooling_without_class_token_is_an_error(tmp_path):
    folder = timm_folder(tmp_path, timm_tensors(class_token=False, pool="avg"), global_pool="token")
    with pytest.raises(RegardError, match=r"global_pool.*the model has no cls_token"):
        import_huggingface(folder)
