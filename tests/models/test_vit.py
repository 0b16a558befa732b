"""Vision Transformers: inputs, configurations and heads."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention import SCORES, masks, record
from regard.errors import RegardError
from regard.layers.patches import gather_rows, pack_images, split_patches
from regard.models.vit import ViT, ViTConfig, vit_base, vit_pico, vit_small, vit_tiny

LABELS = ("cat", "dog", "fox")
# Odd numbers of patches and grids that are not square; the first is the default size of the model.
SIZES = [(12, 20), (4, 4), (28, 12), (12, 20)]


def small(**changes) -> ViT:
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, layers=2, feedforward=32, image_height=12, image_width=20, patch=4, labels=LABELS)
    model = ViT(ViTConfig(**(sizes | changes))).eval()
    for parameter in model.parameters():
        # No parameter is left at zero or one, where an error would not show.
        nn.init.normal_(parameter, std=0.2)
    return model


def make_images() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(3, *size) for size in SIZES]


def test_output_depends_on_every_patch():
    model, image = small(), torch.rand(1, 3, 12, 20)
    before = model(image)
    for row in range(3):
        for column in range(5):
            other = image.clone()
            other[:, :, 4 * row, 4 * column] = 0
            assert not torch.allclose(model(other), before, atol=1e-6)


# -- images of one size, packed images, single images ------------------------------------------------------------------

CHOICES = [
    *(dict(score=score) for score in SCORES if score != "location"),
    *(dict(positions=kind, pooling=pooling) for kind in ("rotary", "none") for pooling in ("mean", "query")),
    dict(positions="sinusoidal", patches="convolution", pooling="query"),
    dict(patches="stem", registers=3, layer_scale=0.1, qk_norm=True, qkv_bias=False),
    dict(distilled=True, registers=1, norm="post"),
    dict(pooling="mean", pooled_norm=True, norm_kind="rms", prefix_positions=False, registers=1),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_packed_and_single_images_agree(choice):
    model, images = small(**choice), make_images()
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(pack_images(images, 4)), alone, atol=1e-5, rtol=1e-4)
        same = torch.stack([images[0], images[3]])
        torch.testing.assert_close(model(same), alone[[0, 3]], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model.tokens(pack_images(list(same), 4)), model.tokens(same).flatten(0, 1))
        torch.testing.assert_close(
            model.encode(pack_images(list(same), 4)), model.encode(same).flatten(0, 1), atol=1e-5, rtol=1e-4
        )
    assert alone.shape == (4, 3)
    assert alone.std(0).min() > 1e-4  # the outputs differ between images


def test_location_score_is_limited_to_the_default_size():
    model = small(score="location")
    images = torch.rand(2, 3, 12, 20)
    torch.testing.assert_close(model(images), model(pack_images(list(images), 4)))
    with pytest.raises(RegardError, match="Location: 22 keys"):
        model(torch.rand(1, 3, 28, 12))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("choice", [dict(), dict(distilled=True, positions="rotary", registers=1)], ids=str)
def test_last_block_computes_only_class_tokens(choice, packed):
    model = small(**choice)
    images = pack_images(make_images(), 4) if packed else torch.rand(2, 3, 12, 20)
    features = model.features(images)
    torch.testing.assert_close(features, model.pool(model.encode(images), images))
    with record(model) as recording:
        model(images)
    queries = 2 if model.config.distilled else 1
    assert [recorded.weights().shape[2] for recorded in recording.values()][-1] == queries
    assert recording["blocks.0.attention"].weights().shape[2] > queries


def test_class_and_mean_pooling():
    images = torch.rand(2, 3, 12, 20)
    model = small(registers=2)
    torch.testing.assert_close(model(images), model.output(model.encode(images)[:, 0]))
    model = small(pooling="mean", registers=2)
    assert model.config.prefix == 2
    torch.testing.assert_close(model(images), model.output(model.encode(images)[:, 2:].mean(1)))
    model = small(pooling="mean", pooled_norm=True)
    raw = model.encode(images)
    torch.testing.assert_close(model(images), model.output(model.norm(raw.mean(1))))
    model = small(pooled_map=True)
    mapped = torch.tanh(model.pooled_map(model.encode(images)[:, 0]))
    torch.testing.assert_close(model(images), model.output(mapped))
    torch.testing.assert_close(model.pool(model.encode(images), images), mapped)


def test_attention_pooling_matches_its_formula():
    model, images = small(pooling="query", registers=1), torch.rand(2, 3, 12, 20)
    with record(model) as recording:
        out = model(images)
    weights = recording["pooler.attention"].weights()
    assert weights.shape == (2, 2, 1, 15)  # over patches, not registers
    attention, patches = model.pooler.attention, model.encode(images)[:, 1:]
    _, v = attention.keys_values(patches, None)
    context = torch.einsum("bhts,bshd->bthd", weights, v).flatten(-2)
    torch.testing.assert_close(out, model.output(attention.out(context)[:, 0]))


def test_distilled_model_averages_both_logits():
    model, images = small(distilled=True), torch.rand(2, 3, 12, 20)
    x = model.encode(images)
    assert model.config.prefix == 2
    torch.testing.assert_close(model(images), (model.output(x[:, 0]) + model.distilled(x[:, 1])) / 2)


def test_learned_positions_are_interpolated_for_other_sizes():
    model, images = small(), torch.rand(1, 3, 24, 16)
    table = model.embedding.learned.weight
    expected = table[1:].view(1, 3, 5, 16).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(expected, size=(6, 4), mode="bicubic", align_corners=False)
    expected = expected.permute(0, 2, 3, 1).flatten(0, 2)
    patches = model.embedding.patches(model.embedding.normalize(images))[0]
    torch.testing.assert_close(model.tokens(images)[0, 1:], patches + expected)


def test_drop_path_grows_with_depth_and_is_off_in_eval_mode():
    model, images = small(layers=5, drop_path=0.4), torch.rand(2, 3, 12, 20)
    rates = [[block.attention_residual.drop_path.p, block.feedforward_residual.drop_path.p] for block in model.blocks]
    assert rates == [[pytest.approx(0.1 * i)] * 2 for i in range(5)]
    assert torch.equal(model(images), model(images))
    model.train()
    torch.manual_seed(0)
    first = model(images)
    assert not torch.equal(first, model(images))
    torch.manual_seed(0)
    assert torch.equal(first, model(images))


class ForbidSync(TorchDispatchMode):
    """Forbid operations that synchronize with the device, which a captured CUDA graph cannot contain."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "choice",
    [
        dict(distilled=True),
        dict(positions="rotary", pooling="query", patches="stem"),
        dict(positions="sinusoidal", pooling="mean", qk_norm=True),
        dict(head="segment", segmenter="queries"),
        dict(head="pixels", decoder_width=32),
    ],
    ids=str,
)
def test_training_step_does_not_synchronize_with_the_device(choice, monkeypatch):
    monkeypatch.setattr(masks, "_is_readable", lambda lengths: False)  # as on a GPU
    model = small(drop_path=0.5, dropout=0.1, layer_scale=0.1, registers=1, **choice).train()
    default, other = torch.rand(2, 3, 12, 20), torch.rand(2, 3, 16, 8)
    for images in (default, other) if model.mae_decoder else (default, other, pack_images(make_images(), 4)):
        with ForbidSync():
            out = model.masked_loss(images) if model.mae_decoder else model(images)
            (sum(mask.sum() for mask in out) if isinstance(out, list) else out.sum()).backward()
    with pytest.raises(AssertionError), ForbidSync():
        default.sum().item()


# -- segmentation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segmenter", ["linear", "queries"])
def test_segmentation_of_packed_and_single_images_agrees(segmenter):
    model = small(head="segment", segmenter=segmenter, registers=1)
    images = make_images()
    alone = [model(image[None])[0] for image in images]
    assert [tuple(logits.shape) for logits in alone] == [(3, *size) for size in SIZES]
    for logits, expected in zip(model(pack_images(images, 4)), alone):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    together = model(torch.stack([images[0], images[3]]))
    torch.testing.assert_close(together, torch.stack([alone[0], alone[3]]), atol=1e-5, rtol=1e-4)


def test_segmentation_logits_are_local():
    model = small(head="segment")
    features = torch.zeros(1, 15, 16)
    features[0, 7] = 5  # row 1, column 2
    with torch.no_grad():
        masks = model.masks(features, torch.zeros(1, 3, 12, 20))[0] - model.output.bias[:, None, None]
    nonzero = masks.abs().amax(0) > 1e-6
    assert nonzero[4:8, 8:12].all()
    assert not nonzero[:2].any()
    assert not nonzero[:, :6].any()
    assert not nonzero[:, 14:].any()


def test_class_queries_attend_with_the_patches():
    model = small(head="segment", segmenter="queries", segmenter_layers=3)
    with record(model, "segmenter.*") as recording:
        model(torch.rand(2, 3, 12, 20))
    assert len(recording) == 3
    # Three label queries and fifteen patches.
    assert recording["segmenter.blocks.0.attention"].weights().shape == (2, 2, 18, 18)


# -- masked patches (MAE) ----------------------------------------------------------------------------------------------


def masked_autoencoder(**changes) -> ViT:
    return small(**(dict(head="pixels", decoder_width=32, decoder_layers=1) | changes))


@pytest.mark.parametrize("choice", [dict(), dict(positions="rotary", pooling="mean"), dict(patches="stem")], ids=str)
def test_only_visible_patches_are_encoded_and_only_masked_ones_predicted(choice):
    model, images = masked_autoencoder(**choice), torch.rand(3, 3, 12, 20)
    with record(model) as recording:
        torch.manual_seed(0)
        predicted, target, masked = model.reconstruct(images, mask_ratio=0.6)
    assert recording["blocks.0.attention"].weights().shape[-1] == 6 + model.config.prefix
    assert recording["mae_decoder.blocks.0.attention"].weights().shape[-1] == 15 + model.config.prefix
    assert masked.shape == (3, 9)
    assert predicted.shape == target.shape == (3, 9, 48)
    # The target is the masked patches, each normalized to mean 0 and variance 1.
    patches = gather_rows(split_patches(images, 4), masked)
    patches = (patches - patches.mean(-1, keepdim=True)) / patches.std(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(target, patches, atol=1e-4, rtol=1e-3)
    torch.manual_seed(0)
    torch.testing.assert_close(model.masked_loss(images, mask_ratio=0.6), (predicted - target).square().mean())
    # Changing masked pixels changes the target but not the prediction.
    other = split_patches(images, 4)
    other.scatter_(1, masked[:, :, None].expand(-1, -1, 48), torch.rand(3, 9, 48))
    other = nn.functional.fold(other.mT, (12, 20), 4, stride=4)
    torch.manual_seed(0)
    again = model.reconstruct(other, mask_ratio=0.6)
    torch.testing.assert_close(again.predicted, predicted)
    assert not torch.allclose(again.target, target)
    # Changing visible pixels changes the prediction.
    torch.manual_seed(0)
    assert not torch.allclose(model.reconstruct(1 - images, mask_ratio=0.6).predicted, predicted)


def test_masks_differ_between_images():
    model, images = masked_autoencoder(), torch.rand(40, 3, 12, 20)
    masked = model.reconstruct(images, mask_ratio=0.5).masked
    assert all(len(set(row)) == 7 for row in masked.tolist())
    assert len({tuple(sorted(row)) for row in masked.tolist()}) > 30
    assert set(masked.flatten().tolist()) == set(range(15))


def test_unsupported_reconstruction_raises():
    with pytest.raises(RegardError, match="head classify does not reconstruct patches"):
        small().masked_loss(torch.rand(1, 3, 12, 20))
    with pytest.raises(RegardError, match="images of one size"):
        masked_autoencoder().masked_loss(pack_images(make_images(), 4))
    for mask_ratio in (0.0, 1.0, 1.5):
        with pytest.raises(RegardError, match="of 15 patches visible"):
            masked_autoencoder().masked_loss(torch.rand(1, 3, 12, 20), mask_ratio)


def test_reconstruction_is_learned():
    torch.manual_seed(0)
    config = ViTConfig(width=32, heads=2, layers=1, feedforward=64, image_height=16, image_width=16, patch=4)
    model = ViT(replace(config, head="pixels", decoder_width=32, decoder_layers=1, positions="sinusoidal"))
    # Slanted stripes: the visible patches determine the masked ones.
    ramp = torch.arange(16.0)
    phase = torch.arange(8)[:, None, None]
    images = (0.5 + 0.5 * torch.sin(0.4 * ramp[:, None] + 0.2 * ramp + phase))[:, None].expand(-1, 3, -1, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)
    losses = []
    for _ in range(200):
        loss = model.masked_loss(images, mask_ratio=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# -- parameters --------------------------------------------------------------------------------------------------------

HEADS = [
    dict(),
    dict(score="concat", positions="rotary", distilled=True, registers=2, layer_scale=0.1, qk_norm=True),
    dict(score="cosine", pooling="query", positions="sinusoidal", patches="stem"),
    dict(score="general", pooling="mean", norm="post", patches="convolution"),
    dict(score="location", head="segment"),
    dict(score="dot", head="segment", segmenter="queries", pooling="mean", positions="none"),
    dict(head="pixels", decoder_width=32),
    dict(head="none", pooled_norm=True, pooled_map=True, pooling="query"),
]


@pytest.mark.parametrize("choice", HEADS, ids=str)
def test_every_parameter_gets_a_gradient(choice):
    model = small(**choice).train()
    images = torch.rand(3, 3, 12, 20)
    out = model.masked_loss(images, 0.5) if model.config.head == "pixels" else model(images)
    (out * torch.randn_like(out)).sum().backward()
    without_gradient = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without_gradient == []


@pytest.mark.parametrize("choice", HEADS, ids=str)
def test_heads_differ_only_in_head_parameters(choice):
    """Fine-tuning with another head replaces parameters under these names only."""
    model, other = small(**choice), small(**(choice | dict(head="none", pooling="class", distilled=False)))
    names = {name for name, _ in model.named_parameters()} ^ {name for name, _ in other.named_parameters()}
    heads = ("output.", "distilled.", "pooler.", "segmenter.", "mae_decoder.", "embedding.prefix")
    assert all(name.startswith(heads) for name in names)


def test_initial_logits_are_small_and_sizes_match_the_papers():
    torch.manual_seed(0)
    model = ViT(vit_pico(labels=LABELS))
    logits = model(torch.rand(8, 3, 32, 32))
    assert logits.abs().max() < 2
    assert vit_pico().grid == (8, 8)
    assert vit_pico().max_len == 64
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in ViT(size(labels=("x",) * 1000)).parameters()) for size in (vit_tiny, vit_small)]
        sizes.append(sum(p.numel() for p in ViT(vit_base(labels=("x",) * 1000)).parameters()))
    # As published: 5.7, 22.1 and 86.6 million.
    assert [round(size / 1e6, 1) for size in sizes] == [5.7, 22.1, 86.6]


def test_inconsistent_configs_raise():
    for changes, message in [
        (dict(mean=(0.1, 0.2)), "model.mean has 2 values for images of 3 channels"),
        (dict(std=(0.0,)), "model.std"),
        (dict(distilled=True, pooling="mean"), "distilled"),
        (dict(head="segment", labels=()), "needs labels"),
        (dict(head="pixels", decoder_width=40), "model.decoder_width is 40"),
        (dict(image_height=13), "13×20 pixels"),
        (dict(width=15), "must be a multiple of model.heads"),
        (dict(width=12, positions="rotary"), "multiple of 4"),
        (dict(width=10, positions="sinusoidal"), "multiple of 4"),
        (dict(image_height=12, image_width=12, patch=3, patches="stem"), "power of 2"),
        (dict(image_height=2048, image_width=2048, patch=1), "4,194,304 patches"),
    ]:
        with pytest.raises(RegardError, match=message):
            small(**changes)
    with pytest.raises(RegardError, match="Images of 1 channels"):
        small()(torch.rand(1, 1, 12, 20))


def test_grayscale_images():
    model = small(channels=1, mean=(0.3,))
    assert model(torch.rand(2, 1, 12, 20)).shape == (2, 3)
