"""What a page is given of a picture, and what it computes of it: weights over patches, rollout."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.errors import RegardError
from regard.viewer import roll_out
from regard.viewer.image_scene import LIKELIEST, scene_of_picture
from regard.viewer.masks import label_colours
from regard.viewer.scene import Scene
from tests.viewer.seeing import KINDS, LABELS, images, model_of, photo
from tests.viewer.test_scene import numbers, weights
from tests.viewer.test_web import OPEN, SHOW, carried, node

SEGMENTERS = {"linear": dict(head="segment"), "queries": dict(head="segment", segmenter="queries")}
FORMS = {**{kind: (kind, {}) for kind in KINDS}, **{name: ("mean", one) for name, one in SEGMENTERS.items()}}


def look(form="class", **changes):
    kind, own = FORMS[form]
    return regard.look(model_of(kind, **own, **changes), images()[0])


def whole(scene: Scene, blob: dict) -> np.ndarray:
    return np.frombuffer(scene.blobs[blob["at"]], blob["type"]).reshape(blob["shape"])


# What is carried


@pytest.mark.parametrize("form", FORMS)
def test_every_attention_is_carried_with_where_its_patches_begin(form):
    seen = look(form)
    scene = scene_of_picture(seen)
    header, picture = scene.header, scene.header["picture"]
    assert [one["name"] for one in header["attentions"]] == list(seen.maps)
    for one in header["attentions"]:
        shown = seen.maps[one["name"]]
        np.testing.assert_allclose(weights(scene, one["name"]), shown.weights, atol=1e-6)
        for axis, tokens in (("rows", shown.rows), ("columns", shown.columns)):
            assert header["sides"][one[axis]]["tokens"] == tokens
            first = picture["first"].get(one[axis])
            assert first == (tokens.index("0,0") if "0,0" in tokens else None)
        asks = picture["speaks"][one["name"]]
        rows = shown.weights[:, shown.rows.index("0,0") :].mean(1) if asks is None else shown.weights[:, asks]
        first = picture["first"][one["columns"]]
        np.testing.assert_allclose(rows[:, first:].reshape(-1, 2, 3), seen.over_patches(one["name"]))
    np.testing.assert_array_equal(whole(scene, picture["pixels"]), seen.pixels)
    assert (picture["grid"], picture["patch"]) == ([2, 3], 4)
    json.dumps(header, allow_nan=False)


@pytest.mark.parametrize("form", KINDS)
def test_the_likeliest_labels_come_with_what_speaks_for_them(form):
    seen = look(form)
    scene = scene_of_picture(seen)
    labels = scene.header["picture"]["labels"]
    assert [one["name"] for one in labels] == sorted(LABELS, key=lambda name: -seen.probabilities[name])
    for one in labels:
        assert (one["number"], one["probability"]) == (LABELS.index(one["name"]), seen.probabilities[one["name"]])
        np.testing.assert_allclose(numbers(scene, one["rollout"]), seen.rollout(label=one["name"]), atol=1e-7)
    share = 100 * seen.probabilities[seen.label]
    assert scene.header["picture"]["answer"] == f"{seen.label}, {share:.1f} %"


def test_of_many_labels_the_likeliest_and_the_one_that_is_asked_for():
    names = tuple(f"label {i}" for i in range(12))
    seen = regard.look(model_of(labels=names), images()[0])
    best = sorted(names, key=lambda name: -seen.probabilities[name])
    told = scene_of_picture(seen, label=best[9]).header
    assert [one["name"] for one in told["picture"]["labels"]] == [*best[:LIKELIEST], best[9]]
    assert (told["opens"]["over"], told["opens"]["label"]) == ("rollout", names.index(best[9]))


@pytest.mark.parametrize("form", SEGMENTERS)
def test_a_segmenter_comes_with_its_mask_and_the_labels_colours(form):
    seen = look(form)
    scene = scene_of_picture(seen)
    mask = scene.header["picture"]["mask"]
    np.testing.assert_array_equal(whole(scene, mask), seen.run.output[0].argmax(0))
    assert mask["colours"] == label_colours(3).tolist()
    assert scene.header["picture"]["labels"] == [{"number": i, "name": name} for i, name in enumerate(LABELS)]
    assert scene.header["opens"]["over"] == "mask"
    assert scene_of_picture(look()).header["picture"]["mask"] is None


def test_more_labels_than_a_byte_has_numbers():
    labels = tuple(f"l{i}" for i in range(300))
    seen = regard.look(model_of("mean", head="segment", labels=labels), images()[0])
    scene = scene_of_picture(seen)
    mask = scene.header["picture"]["mask"]
    assert mask["type"] == "uint16"
    np.testing.assert_array_equal(whole(scene, mask), seen.run.output[0].argmax(0))


def test_names_come_from_the_file_and_from_whoever_looks(tmp_path):
    seen = regard.look(model_of(), photo(tmp_path / "cat.png"), name="pets")
    header = scene_of_picture(seen, pictures=["cat.png", "dog.png"]).header
    assert header["texts"] == {"source": "cat.png", "target": ""}
    assert header["model"]["name"] == "pets"
    assert header["title"] == seen.title
    assert header["pictures"] == ["cat.png", "dog.png"]


# What it opens with


def opens(form="class", **choices):
    return scene_of_picture(look(form), **choices).header["opens"]


def test_choices_say_what_the_page_opens_with():
    last = {"attention": "blocks.2.attention", "head": None, "all": False, "over": "attention", "token": None}
    assert opens() == last | {"label": None}
    assert opens("distilled", attention="blocks.0.attention", head=1, patch=(1, 2)) == last | {
        "attention": "blocks.0.attention",
        "head": 1,
        "token": 4 + 5,
        "label": None,
    }
    assert opens("query")["attention"] == "pooler.attention"
    assert opens("query", patch=(0, 1)) == last | {"token": 2, "label": None}
    assert opens(attention="all")["all"]
    assert opens(rollout=True)["over"] == "rollout"
    assert opens("queries", label="dog") == last | {
        "attention": "segmenter.blocks.1.attention",
        "token": 1,
        "label": 1,
    }
    assert opens("queries", label="dog", rollout=True)["over"] == "rollout"


@pytest.mark.parametrize(
    ("form", "choices", "message"),
    [
        ("class", dict(attention="nowhere"), "no attention 'nowhere'"),
        ("class", dict(head=2), "has no head 2. There are 2"),
        ("class", dict(patch=(2, 0)), "no patch in row 2"),
        ("class", dict(label="cow"), "does not know the label 'cow'"),
        ("class", dict(label="cat", head=1), "Rollout goes through all"),
        ("class", dict(rollout=True, attention="blocks.0.attention"), "Rollout goes through all"),
        ("class", dict(label="cat", patch=(0, 0)), "Either a patch asks, or a label"),
        ("query", dict(attention="pooler.attention", patch=(0, 0)), "no patch asks"),
        ("queries", dict(attention="blocks.0.attention", label="cat"), "no label asks"),
    ],
)
def test_what_cannot_be_opened_with(form, choices, message):
    with pytest.raises(RegardError, match=message):
        opens(form, **choices)


def test_a_page_is_saved_as_the_other_pictures_are(tmp_path):
    seen = look()
    seen.save(tmp_path / "page.html", label="dog")
    text = (tmp_path / "page.html").read_text()
    assert f'id="blob-{len(scene_of_picture(seen).blobs) - 1}"' in text
    assert '"over":"rollout"' in text
    with pytest.raises(RegardError, match=r"pages are .html, pictures are .png or .svg"):
        seen.save(tmp_path / "page.htm")


# What the page computes of it

LOOKS = 'import { Attentions } from "./weights/maps.js";\nimport { ImageAttention } from "./images/image_attention.js";'
BEGIN = (
    OPEN
    + """
const looks = new ImageAttention(attentions);
const all = (asker) => {
  for (const _ of looks.prepare(looks.rolloutLayers(asker)));
  return [...looks.rollout(asker)];
};
"""
)


@pytest.mark.parametrize("form", FORMS)
def test_weights_over_patches_are_those_of_the_look(form):
    seen = look(form)
    program = """
    const first = (name) => looks.firstPatch(name, "rows");
    const over = (name, head, token) => [...looks.overPatches(name, looks.weights({ attention: name, head }, token))];
    const told = given.header.attentions.map(({ name }) => ({
      whole: [over(name, 0, null), over(name, 1, null)],
      mean: over(name, "mean", null),
      patch: first(name) === null ? null : [over(name, 0, looks.rowOfPatch(name, 4)), over(name, 1, first(name) + 4)],
    }));
    """
    told = node(LOOKS, BEGIN + program + SHOW.format("told"), carried(scene_of_picture(seen)))
    for name, one in zip(seen.maps, told, strict=True):
        np.testing.assert_allclose(one["whole"], seen.over_patches(name).reshape(2, -1), atol=1e-6)
        np.testing.assert_allclose(one["mean"], seen.over_patches(name).mean(0).flatten(), atol=1e-6)
        if one["patch"] is not None:
            np.testing.assert_allclose(one["patch"], seen.over_patches(name, (1, 1)).reshape(2, -1), atol=1e-6)
        assert (one["patch"] is None) == (name == "pooler.attention")


@pytest.mark.parametrize("form", FORMS)
def test_rollout_is_that_of_the_model(form):
    seen = look(form)
    found = roll_out(seen.run.model, images())
    labels = range(len(LABELS)) if form == "queries" else []
    program = "const told = { whole: all(null), tokens: given.tokens.map((token) => all({ token })), "
    program += "labels: given.labels.map((label) => all({ label })) };"
    given = carried(scene_of_picture(seen)) | {"tokens": list(range(found.matrix.shape[1])), "labels": list(labels)}
    told = node(LOOKS, BEGIN + program + SHOW.format("told"), given)
    np.testing.assert_allclose(told["whole"], found.whole[0], atol=1e-6)
    np.testing.assert_allclose(told["tokens"], found.matrix[0], atol=1e-6)
    if form == "queries":
        np.testing.assert_allclose(told["labels"], found.queries[0], atol=1e-6)
    assert sum(told["whole"]) == pytest.approx(1)


def test_a_picture_of_very_many_patches_is_not_multiplied():
    model = model_of("mean", width=8, layers=1)
    seen = regard.look(model, torch.rand(3, 152, 160))  # 38 × 40 patches
    program = "const told = [looks.fitsRollout, looks.isSampled(SHOWN), looks.weights(SHOWN, null).length];".replace(
        "SHOWN", '{ attention: "blocks.0.attention", head: 0 }'
    )
    given = carried(scene_of_picture(seen))
    for one in given["header"]["picture"]["labels"]:
        one["rollout"] = None
    assert node(LOOKS, BEGIN + program + SHOW.format("told"), given) == [False, True, 1521]
