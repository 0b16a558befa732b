"""Scenes of images, and what the page computes from them: weights over patches, rollout."""

import json
from functools import partial

import numpy as np
import pytest
import torch

import regard
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import entropy
from regard.viewer import attention_rollout
from regard.viewer.masks import label_colors
from regard.viewer.page import image_scene
from regard.viewer.page.image_scene import MAX_LABEL_ROLLOUTS
from regard.viewer.page.text_scene import Scene
from tests.viewer.helpers import numbers, weights
from tests.viewer.image_helpers import KINDS, LABELS, images, model_of, photo
from tests.viewer.web.test_web import OPEN, SHOW, carried, node

# Without the step-by-step view, which takes longer than all the rest; tests/viewer/trace is about it.
build_image_scene = partial(image_scene.build_image_scene, trace=False)
SEGMENTERS = {"linear": dict(head="segment"), "queries": dict(head="segment", segmenter="queries")}
FORMS = {**{kind: (kind, {}) for kind in KINDS}, **{name: ("mean", one) for name, one in SEGMENTERS.items()}}


def look(form="class", **changes):
    kind, own = FORMS[form]
    return regard.look(model_of(kind, **own, **changes), images()[0])


def raw_array(scene: Scene, blob: dict) -> np.ndarray:
    return np.frombuffer(scene.blobs[blob["at"]], blob["type"]).reshape(blob["shape"])


# Contents


@pytest.mark.parametrize("form", FORMS)
def test_scene_contains_every_attention_and_its_first_patch(form):
    seen = look(form)
    scene = build_image_scene(seen)
    header, image = scene.header, scene.header["image"]
    assert [one["name"] for one in header["attentions"]] == list(seen.maps)
    for one in header["attentions"]:
        shown = seen.maps[one["name"]]
        np.testing.assert_allclose(weights(scene, one["name"]), shown.weights, atol=1e-6)
        for axis, tokens in (("rows", shown.rows), ("columns", shown.columns)):
            assert header["sides"][one[axis]]["tokens"] == tokens
            first = image["first"].get(one[axis])
            assert first == (tokens.index("0,0") if "0,0" in tokens else None)
        query = image["single_query"][one["name"]]
        rows = shown.weights[:, shown.rows.index("0,0") :].mean(1) if query is None else shown.weights[:, query]
        first = image["first"][one["columns"]]
        np.testing.assert_allclose(rows[:, first:].reshape(-1, 2, 3), seen.patch_weights(one["name"]))
    np.testing.assert_array_equal(raw_array(scene, image["pixels"]), seen.pixels)
    assert (image["grid"], image["patch"]) == ([2, 3], 4)
    json.dumps(header, allow_nan=False)


@pytest.mark.parametrize("form", KINDS)
def test_scene_contains_the_rollout_of_the_most_likely_labels(form):
    seen = look(form)
    scene = build_image_scene(seen)
    labels = scene.header["image"]["labels"]
    assert [one["name"] for one in labels] == sorted(LABELS, key=lambda name: -seen.probabilities[name])
    for one in labels:
        assert (one["number"], one["probability"]) == (LABELS.index(one["name"]), seen.probabilities[one["name"]])
        np.testing.assert_allclose(numbers(scene, one["rollout"]), seen.rollout(label=one["name"]), atol=1e-7)
    share = 100 * seen.probabilities[seen.label]
    assert scene.header["image"]["answer"] == f"{seen.label}, {share:.1f} %"


def test_scene_of_many_labels_contains_the_most_likely_and_the_selected_one():
    names = tuple(f"label {i}" for i in range(12))
    seen = regard.look(model_of(labels=names), images()[0])
    best = sorted(names, key=lambda name: -seen.probabilities[name])
    header = build_image_scene(seen, label=best[9]).header
    assert [one["name"] for one in header["image"]["labels"]] == [*best[:MAX_LABEL_ROLLOUTS], best[9]]
    assert (header["initial"]["over"], header["initial"]["label"]) == ("rollout", names.index(best[9]))


@pytest.mark.parametrize("form", SEGMENTERS)
def test_scene_of_a_segmenter_contains_mask_and_colors(form):
    seen = look(form)
    scene = build_image_scene(seen)
    mask = scene.header["image"]["mask"]
    np.testing.assert_array_equal(raw_array(scene, mask), seen.run.output[0].argmax(0))
    assert mask["colors"] == label_colors(3).tolist()
    assert scene.header["image"]["labels"] == [{"number": i, "name": name} for i, name in enumerate(LABELS)]
    assert scene.header["initial"]["over"] == "mask"
    assert build_image_scene(look()).header["image"]["mask"] is None


def test_mask_of_more_than_256_labels_is_uint16():
    labels = tuple(f"l{i}" for i in range(300))
    seen = regard.look(model_of("mean", head="segment", labels=labels), images()[0])
    scene = build_image_scene(seen)
    mask = scene.header["image"]["mask"]
    assert mask["type"] == "uint16"
    np.testing.assert_array_equal(raw_array(scene, mask), seen.run.output[0].argmax(0))


def test_names_of_image_and_model(tmp_path):
    seen = regard.look(model_of(), photo(tmp_path / "cat.png"), name="pets")
    header = build_image_scene(seen, images=["cat.png", "dog.png"]).header
    assert header["texts"] == {"source": "cat.png", "target": ""}
    assert header["model"]["name"] == "pets"
    assert header["title"] == seen.title
    assert header["images"] == ["cat.png", "dog.png"]


# The initial view


def initial_view(form="class", **choices):
    return build_image_scene(look(form), **choices).header["initial"]


def test_arguments_select_the_initial_view():
    last = {"attention": "blocks.2.attention", "head": None, "all": False, "over": "attention", "token": None}
    # By default, the sharpest head of the class token.
    seen = look("class")
    rows = {(name, head): one.ravel() for name in seen.maps for head, one in enumerate(seen.patch_weights(name))}
    name, head = min(rows, key=lambda key: entropy(rows[key][None] / rows[key].sum())[0])
    assert initial_view() == last | {"label": None, "attention": name, "head": head}
    assert initial_view("distilled", attention="blocks.0.attention", head=1, patch=(1, 2)) == last | {
        "attention": "blocks.0.attention",
        "head": 1,
        "token": 4 + 5,
        "label": None,
    }
    assert initial_view("query")["attention"] == "pooler.attention"
    assert initial_view("query", patch=(0, 1)) == last | {"token": 2, "label": None}
    assert initial_view(attention="all")["all"]
    assert initial_view(rollout=True)["over"] == "rollout"
    assert initial_view("queries", label="dog") == last | {
        "attention": "segmenter.blocks.1.attention",
        "token": 1,
        "label": 1,
    }
    assert initial_view("queries", label="dog", rollout=True)["over"] == "rollout"


@pytest.mark.parametrize(
    ("form", "choices", "message"),
    [
        ("class", dict(attention="nowhere"), "no attention 'nowhere'"),
        ("class", dict(head=2), "has no head 2. Choose a head from 0 to 1"),
        ("class", dict(patch=(2, 0)), "no patch in row 2"),
        ("class", dict(label="cow"), "has no label 'cow'"),
        ("class", dict(label="cat", head=1), "Rollout combines all"),
        ("class", dict(rollout=True, attention="blocks.0.attention"), "Rollout combines all"),
        ("class", dict(label="cat", patch=(0, 0)), "A patch and a label cannot be combined"),
        ("query", dict(attention="pooler.attention", patch=(0, 0)), "has no patches as queries"),
        ("queries", dict(attention="blocks.0.attention", label="cat"), "has no labels as queries"),
    ],
)
def test_invalid_initial_views_raise_errors(form, choices, message):
    with pytest.raises(RegardError, match=message):
        initial_view(form, **choices)


def test_save_writes_a_page(tmp_path):
    seen = look()
    seen.save(tmp_path / "page.html", label="dog")
    text = (tmp_path / "page.html").read_text()
    assert f'id="blob-{len(image_scene.build_image_scene(seen).blobs) - 1}"' in text
    assert '"over":"rollout"' in text
    with pytest.raises(RegardError, match=r"pages are .html, plots are .png, .svg or .pdf"):
        seen.save(tmp_path / "page.htm")


# What the page computes

LOOKS = 'import { Attentions } from "./weights/maps.js";\nimport { ImageAttention } from "./images/attention.js";'
BEGIN = (
    OPEN
    + """
const looks = new ImageAttention(attentions);
const all = (query) => {
  for (const _ of looks.prepare(looks.rolloutLayers(query)));
  return [...looks.rollout(query)];
};
"""
)


@pytest.mark.parametrize("form", FORMS)
def test_page_computes_the_weights_over_patches_of_the_look(form):
    seen = look(form)
    program = """
    const first = (name) => looks.firstPatch(name, "rows");
    const over = (name, head, token) => [...looks.overPatches(name, looks.weights({ attention: name, head }, token))];
    const result = given.header.attentions.map(({ name }) => ({
      whole: [over(name, 0, null), over(name, 1, null)],
      mean: over(name, "mean", null),
      patch: first(name) === null ? null : [over(name, 0, looks.rowOfPatch(name, 4)), over(name, 1, first(name) + 4)],
    }));
    """
    result = node(LOOKS, BEGIN + program + SHOW.format("result"), carried(build_image_scene(seen)))
    for name, one in zip(seen.maps, result, strict=True):
        np.testing.assert_allclose(one["whole"], seen.patch_weights(name).reshape(2, -1), atol=1e-6)
        np.testing.assert_allclose(one["mean"], seen.patch_weights(name).mean(0).flatten(), atol=1e-6)
        if one["patch"] is not None:
            np.testing.assert_allclose(one["patch"], seen.patch_weights(name, (1, 1)).reshape(2, -1), atol=1e-6)
        assert (one["patch"] is None) == (name == "pooler.attention")


@pytest.mark.parametrize("form", FORMS)
def test_page_computes_the_rollout_of_the_model(form):
    seen = look(form)
    found = attention_rollout(seen.run.model, images())
    labels = range(len(LABELS)) if form == "queries" else []
    program = "const result = { whole: all(null), tokens: given.tokens.map((token) => all({ token })), "
    program += "labels: given.labels.map((label) => all({ label })) };"
    given = carried(build_image_scene(seen)) | {"tokens": list(range(found.matrix.shape[1])), "labels": list(labels)}
    result = node(LOOKS, BEGIN + program + SHOW.format("result"), given)
    np.testing.assert_allclose(result["whole"], found.pooled[0], atol=1e-6)
    np.testing.assert_allclose(result["tokens"], found.matrix[0], atol=1e-6)
    if form == "queries":
        np.testing.assert_allclose(result["labels"], found.queries[0], atol=1e-6)
    assert sum(result["whole"]) == pytest.approx(1)


def test_page_computes_no_rollout_of_very_many_patches():
    model = model_of("mean", width=8, layers=1)
    seen = regard.look(model, torch.rand(3, 152, 160))  # 38 × 40 patches
    program = "const result = [looks.fitsRollout, looks.isSampled(SHOWN), looks.weights(SHOWN, null).length];".replace(
        "SHOWN", '{ attention: "blocks.0.attention", head: 0 }'
    )
    given = carried(build_image_scene(seen))
    for one in given["header"]["image"]["labels"]:
        one["rollout"] = None
    assert node(LOOKS, BEGIN + program + SHOW.format("result"), given) == [False, True, 1521]
