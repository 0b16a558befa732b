"""Vision Transformers of timm beside plain steps."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.cli import main
from regard.errors import RegardError
from regard.folder import load
from regard.interop import export_folder, import_folder
from regard.interop.mapping import write_weights
from regard.interop.timm_like import table_of
from regard.interop.vit_like import PATCHES
from regard.models.vit import ViT, ViTConfig
from tests.interop.image_model_comparison import (
    MEAN,
    NAMES,
    STD,
    close,
    compare,
    images_of,
    made,
    normalize_pixels,
    run_foreign,
    same,
    weights_of,
)
from tests.interop.model_comparison import assert_same_tensors
from tests.interop.reference_vit import reference_vit

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
    pipeline = import_folder(timm_folder(tmp_path, tensors, global_pool=pool))
    torch.manual_seed(1)
    images = torch.rand(2, 3, 8, 12)
    wanted = reference_vit(tensors, normalize_pixels(images), heads=5, pool=pool)
    close(pipeline.model(images), wanted)
    assert (pipeline.model.config.image_height, pipeline.model.config.image_width) == (8, 12)
    # The table runs in the other direction too.
    ours = weights_of(pipeline)
    ours[PATCHES] = ours[PATCHES].unflatten(1, (3, 4, 4))
    tokens = [one for one in ("cls_token", "dist_token", "reg_token") if one in tensors]
    norm = "fc_norm" if variant.get("fc_norm") else "norm"
    same(write_weights(table_of(tokens, norm), {"blocks": 2}, ours), tensors)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_the_same_weights_by_the_names_of_timm(transformers, tmp_path, name):
    theirs = made(transformers, name, 0, tmp_path / "hf", layer_norm_eps=1e-6, id2label=NAMES)
    images = images_of(theirs)
    wanted = run_foreign(theirs, images)
    pipeline = import_folder(timm_folder(tmp_path / "timm", by_timm(load_file(tmp_path / "hf" / "model.safetensors"))))
    close(compare(pipeline.model, images, wanted)[1], wanted.logits)
    same(weights_of(pipeline), weights_of(import_folder(tmp_path / "hf")))
    # And so a model of timm goes on to transformers.
    assert export_folder(pipeline, tmp_path / "out") == name
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")


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
        (dict(mlp_ratio=float("nan")), {}, "mlp_ratio must be finite"),
        (dict(img_size=224), {}, "224×224 pixels have 3136 patches, .* but pos_embed has 7 rows"),
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
        ({f"blocks.{i}.attn.{x}_norm.weight": torch.full((6,), 0.5) for i in (0, 1) for x in "qk"}, "q_norm.bias"),
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
