"""`look` at images: its arrays and plots."""

import io
import pickle
import xml.etree.ElementTree as xml

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from PIL import Image

import regard
from regard.attention import record
from regard.errors import RegardError
from regard.pipelines import ImageModel
from regard.viewer import attention_rollout
from regard.viewer.plots import overlay
from tests.viewer.image_helpers import KINDS, LABELS, images, model_of, photo

PATCHES = [f"{row},{column}" for row in range(2) for column in range(3)]


def look(kind="class", **changes):
    return regard.look(model_of(kind, **changes), images()[0])


# Arrays


def test_maps_have_names_and_axes():
    seen = look("distilled")
    assert list(seen.maps) == [f"blocks.{i}.attention" for i in range(3)]
    tokens = ["class token", "distillation token", "register 0", "register 1", *PATCHES]
    for one in seen.maps.values():
        assert one.rows == one.columns == tokens
        assert one.weights.shape == (2, 10, 10)
        np.testing.assert_allclose(one.weights.sum(-1), 1, rtol=1e-5)
    assert look("query").maps["pooler.attention"].rows == ["query"]
    assert look("query").maps["pooler.attention"].columns == PATCHES
    segmenter = look("mean", head="segment", segmenter="queries").maps["segmenter.blocks.1.attention"]
    assert segmenter.rows == [*LABELS, *PATCHES]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_models_own_forward(kind):
    model, batch = model_of(kind), images()
    with torch.no_grad(), record(model) as recording:
        shares = model(batch).softmax(-1)[0]  # the last block computes the class tokens only
    seen = regard.look(model, batch[0])
    for name, one in recording.items():
        used = one.weights()[0].numpy()
        np.testing.assert_allclose(seen.maps[name].weights[:, : used.shape[1]], used, atol=1e-6)
    assert list(seen.probabilities.values()) == pytest.approx(shares.tolist(), abs=1e-6)
    assert seen.label == LABELS[int(shares.argmax())]


def test_lists_arrays_and_pickles(tmp_path):
    model = model_of("mean")
    first, second = regard.look(model, list(images()[:1]) * 2)
    np.testing.assert_array_equal(
        np.asarray(first.maps["blocks.1.attention"]), second.maps["blocks.1.attention"].weights
    )
    content = pickle.dumps(first)
    assert len(content) < sum(4 * parameter.numel() for parameter in model.parameters())
    loaded = pickle.loads(content)
    np.testing.assert_array_equal(loaded.rollout(), first.rollout())
    loaded.save(tmp_path / "map.pdf")
    for call in (
        lambda: loaded.save(tmp_path / "page.html"),
        lambda: loaded.rollout(label=LABELS[0]),
        loaded.attribution,
        loaded.head_effects,
        loaded.logit_lens,
    ):
        with pytest.raises(RegardError, match="loaded from a pickle, which has no model"):
            call()


def test_query_of_the_weights_over_patches():
    seen = look("distilled")
    weights = seen.maps["blocks.1.attention"].weights
    np.testing.assert_array_equal(seen.patch_weights("blocks.1.attention"), weights[:, 0, 4:].reshape(2, 2, 3))
    weighted = seen.patch_weights("blocks.1.attention", patch=(1, 0))
    np.testing.assert_array_equal(weighted, weights[:, 4 + 3, 4:].reshape(2, 2, 3))
    np.testing.assert_array_equal(seen.patch_weights(), seen.patch_weights("blocks.2.attention"))

    seen = look("mean")
    mean = seen.maps["blocks.2.attention"].weights[:, 1:, 1:].mean(1)
    np.testing.assert_allclose(seen.patch_weights(), mean.reshape(2, 2, 3))

    seen = look("query")
    question = seen.maps["pooler.attention"].weights[:, 0]
    np.testing.assert_array_equal(seen.patch_weights(), question.reshape(2, 2, 3))
    last = seen.maps["blocks.2.attention"].weights  # the last attention with patches as queries
    np.testing.assert_array_equal(seen.patch_weights(patch=(0, 2)), last[:, 1 + 2, 1:].reshape(2, 2, 3))


def test_weights_of_the_class_query_of_a_segmenter():
    seen = look("class", head="segment", segmenter="queries")
    weights = seen.maps["segmenter.blocks.1.attention"].weights
    np.testing.assert_array_equal(seen.patch_weights(label="dog"), weights[:, 1, 3:].reshape(2, 2, 3))
    np.testing.assert_allclose(seen.patch_weights(), weights[:, 3:, 3:].mean(1).reshape(2, 2, 3))
    # The class token of a segmenter does not represent the image.
    encoder = seen.maps["blocks.0.attention"].weights[:, 1:, 1:].mean(1)
    np.testing.assert_allclose(seen.patch_weights("blocks.0.attention"), encoder.reshape(2, 2, 3))


def test_rollout_is_the_attention_rollout_of_the_model():
    model, batch = model_of("distilled"), images()
    seen, plain, weighted = (
        regard.look(model, batch[0]),
        attention_rollout(model, batch),
        attention_rollout(model, batch, [2]),
    )
    np.testing.assert_allclose(seen.rollout(), plain.patch_weights(), atol=1e-7)
    np.testing.assert_allclose(seen.rollout(patch=(1, 1)), plain.patch_weights(0, (1, 1)), atol=1e-7)
    np.testing.assert_allclose(seen.rollout(label="owl"), weighted.patch_weights(), atol=1e-7)
    segmenter = look(head="segment", segmenter="queries")
    np.testing.assert_allclose(
        segmenter.rollout(label="dog"), attention_rollout(segmenter.run.model, batch).patch_weights(query=1), atol=1e-7
    )


@pytest.mark.parametrize("head", ["none", "pixels", "segment"])
def test_look_at_models_with_any_head(head):
    seen = look("mean", head=head, decoder_width=32, segmenter="linear")
    assert list(seen.maps) == [f"blocks.{i}.attention" for i in range(3)]
    assert (seen.label, seen.probabilities) == (None, {})
    assert seen._repr_png_().startswith(b"\x89PNG")


def test_files_images_arrays_and_tensors_give_equal_looks(tmp_path):
    model = model_of()
    file = photo(tmp_path / "p.png")
    pixels = np.asarray(Image.open(file))
    numbers = torch.tensor(pixels / np.float32(255)).permute(2, 0, 1)
    found = [
        regard.look(one, source)
        for one in (model, ImageModel(model))
        for source in (file, str(file), Image.open(file), pixels, numbers)
    ]
    for one in found:
        np.testing.assert_array_equal(one.pixels, pixels)
        np.testing.assert_allclose(one.patch_weights(), found[0].patch_weights(), atol=1e-6)
    assert "p.png" in repr(found[0])


def test_classifier_takes_the_center_crop_and_segmenter_the_full_image(tmp_path):
    file = photo(tmp_path / "p.png", 16, 48)
    assert regard.look(model_of(), file).pixels.shape == (8, 12, 3)
    seen = regard.look(model_of(head="segment"), file)
    assert (seen.pixels.shape, seen.grid) == ((8, 24, 3), (2, 6))


def test_look_leaves_the_model_unchanged():
    model, batch = model_of(), images()
    with torch.no_grad():
        before = model(batch)
        seen = regard.look(model, batch[0])
        seen.rollout(label="cat")
        torch.testing.assert_close(model(batch), before, rtol=0, atol=0)
    assert all(one.grad is None for one in model.parameters())


# Plots


def test_patch_has_one_color_over_a_gray_image():
    pixels = np.full((8, 12, 3), 128, np.uint8)
    weights = np.array([[0.0, 0.1, 0.2], [0.3, 0.4, 0.0]])
    found = overlay(pixels, weights)
    tiles = found.reshape(2, 4, 3, 4, 3).swapaxes(1, 2)
    assert (tiles == tiles[:, :, :1, :1]).all()
    colors = tiles[:, :, 0, 0].reshape(6, 3)
    assert len(np.unique(colors.round(6), axis=0)) == 5  # two weights are 0
    bright = colors @ [0.2126, 0.7152, 0.0722]
    assert list(np.argsort(bright[:5])) == [0, 1, 2, 3, 4]  # larger is brighter
    np.testing.assert_array_equal(overlay(pixels, weights / 7), found)  # each panel has its own scale
    gray = overlay(pixels[..., :1], weights)
    np.testing.assert_allclose(gray, found, atol=1e-6)
    assert np.isfinite(overlay(pixels, np.zeros((2, 3)))).all()


def saved(seen, tmp_path, **options):
    """The pixels of the PNG and the text of the SVG."""
    seen.save(tmp_path / "map.png", **options)
    seen.save(tmp_path / "map.svg", **options)
    pixels = imread(io.BytesIO((tmp_path / "map.png").read_bytes()), format="png")
    words = "\n".join(xml.parse(tmp_path / "map.svg").getroot().itertext())
    assert min(pixels.shape[:2]) > 200
    assert len(np.unique(pixels[..., 0])) > 50
    return pixels, " ".join(words.split())


@pytest.mark.parametrize(
    ("kind", "changes", "options", "captions"),
    [
        ("class", {}, {}, ["the image", "head 0", "head 1", "Attention of the class token in blocks.2.attention."]),
        ("mean", {}, {}, ["Attention of all patches (mean) in blocks.2.attention."]),
        ("query", {}, {}, ["Attention of the pooling query in pooler.attention."]),
        ("class", {}, {"attention": "blocks.0.attention", "head": 1}, ["head 1", "in blocks.0.attention."]),
        ("class", {}, {"patch": (1, 2)}, ["Attention of the patch in row 1, column 2 in blocks.2.attention."]),
        ("query", {}, {"attention": "all"}, ["blocks.0", "pooler", "head 1", "one row per attention."]),
        ("class", {}, {"rollout": True}, ["rollout", "Attention rollout of the image through all layers."]),
        (
            "class",
            {},
            {"rollout": True, "patch": (0, 0)},
            ["Attention rollout of the patch in row 0, column 0 through"],
        ),
        ("class", {}, {"label": "owl"}, ["rollout", "for owl", "weighted by gradients of owl."]),
        ("mean", dict(head="segment"), {"patch": (0, 1)}, ["the patch in row 0, column 1"]),
        (
            "mean",
            dict(head="segment", segmenter="queries"),
            {},
            ["the image", "cat", "dog", "owl", "Attention of the query of each label in segmenter.blocks.1.attention"],
        ),
        (
            "mean",
            dict(head="segment", segmenter="queries"),
            {"label": "dog"},
            ["head 1", "Attention of the query of dog in"],
        ),
        (
            "mean",
            dict(head="segment", segmenter="queries"),
            {"label": "dog", "rollout": True},
            ["for dog", "the query of"],
        ),
    ],
)
def test_plots_have_captions(tmp_path, kind, changes, options, captions):
    _, words = saved(look(kind, **changes), tmp_path, **options)
    for one in captions:
        assert one in words


def test_query_patch_is_framed(tmp_path):
    plain, _ = saved(look("mean"), tmp_path, attention="blocks.2.attention", head=0)
    framed, _ = saved(look("mean"), tmp_path, attention="blocks.2.attention", head=0, patch=(0, 0))
    image_width = int(0.44 * plain.shape[1])  # the left panel is the image, equal in both
    changed = np.argwhere(np.abs(plain - framed)[:, :image_width].max(-1) > 0.3)
    top, left = changed.min(0)
    bottom, right = changed[changed[:, 0] < plain.shape[0] * 0.8].max(0)
    assert 100 < bottom - top < 140  # a patch of 4 pixels, where 12 are 2.3 inches wide
    assert 100 < right - left < 140


def test_plot_of_one_head(tmp_path):
    _, words = saved(look(), tmp_path, head=1)
    assert "head 0" not in words


def test_plot_shows_the_labels_with_the_most_pixels(tmp_path, monkeypatch):
    from regard.viewer import image_look

    monkeypatch.setattr(image_look, "MAX_LABELS", 2)
    seen = look("mean", head="segment", segmenter="queries")
    areas = np.bincount(seen.run.output[0].argmax(0).flatten(), minlength=3)
    _, words = saved(seen, tmp_path)
    assert LABELS[int(areas.argmin())] not in words.split()
    assert LABELS[int(areas.argmax())] in words.split()


def test_labels_are_never_parsed_as_markup(tmp_path):
    labels = ("$x_1$ <b>&amp;", "猫 " * 30, "dog")
    seen = look("class", labels=labels)
    for label in labels:
        _, words = saved(seen, tmp_path, label=label)
        assert " ".join(label.split()[:2]) in words


def test_look_of_a_grayscale_model(tmp_path):
    seen = regard.look(model_of(channels=1), photo(tmp_path / "p.png", 9, 20))
    assert seen.pixels.shape == (8, 12, 1)
    saved(seen, tmp_path)


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda seen, at: seen.save(at / "map.jpg"), "map.jpg: pages are .html, plots are .png, .svg or .pdf"),
        (
            lambda seen, at: seen.save(at / "map.png", "blocks.9.attention"),
            "no attention 'blocks.9.attention'.*blocks.2",
        ),
        (
            lambda seen, at: seen.save(at / "map.png", head=2),
            "blocks.2.attention has no head 2. Choose a head from 0 to 1",
        ),
        (lambda seen, at: seen.save(at / "map.png", patch=(2, 0)), "no patch in row 2, column 0"),
        (lambda seen, at: seen.save(at / "map.png", label="cow"), "has no label 'cow'. Its labels are cat, dog"),
        (
            lambda seen, at: seen.save(at / "map.png", label="cat", patch=(0, 0)),
            "A patch and a label cannot be combined",
        ),
        (lambda seen, at: seen.save(at / "map.png", head=1, rollout=True), "Rollout combines all attentions"),
        (
            lambda seen, at: seen.patch_weights("blocks.0.attention", label="cat"),
            "blocks.0.attention has no labels as queries",
        ),
        (
            lambda seen, at: look("query").patch_weights("pooler.attention", (0, 0)),
            "pooler.attention has no patches as queries",
        ),
        (lambda seen, at: look(labels=()).rollout(label="cat"), "has no label 'cat'. It has no labels"),
        (lambda seen, at: look("mean", head="segment").rollout(label="cat"), "needs an image classifier"),
        (lambda seen, at: regard.look(model_of(), images()), r"shape \(1, 3, 8, 12\) is not one image"),
        (lambda seen, at: regard.look(model_of(), images(1, 9)[0]), "does not divide into patches"),
        (lambda seen, at: regard.look(model_of(channels=1), images()[0]), "Images of 3 channels"),
        (lambda seen, at: regard.look(model_of(), at / "no.jpg"), "no.jpg: there is no such file"),
        (
            lambda seen, at: regard.look(model_of(), "p.jpg", "a target"),
            "target, layers, gold and context are not supported",
        ),
    ],
)
def test_invalid_arguments_raise_errors(tmp_path, call, message):
    with pytest.raises(RegardError, match=message):
        call(look(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_invalid_and_oversized_image_files_raise_errors(tmp_path, monkeypatch):
    (tmp_path / "text.jpg").write_text("not an image")
    with pytest.raises(RegardError, match=r"text\.jpg: not a readable image"):
        regard.look(model_of(), tmp_path / "text.jpg")
    photo(tmp_path / "bomb.png", 20, 20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with pytest.raises(RegardError, match=r"bomb\.png: the image has more than 0 million pixels"):
        regard.look(model_of(), tmp_path / "bomb.png")
