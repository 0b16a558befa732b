"""Explanations in scenes and in responses to requests of a page."""

import json
import re

import pytest

import regard
from regard.errors import RegardError
from regard.viewer.explanations import attribution
from regard.viewer.explanations.output import explain_output
from regard.viewer.page import explanations as page_explanations
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.requests import ImageRequestHandler, TextRequestHandler
from regard.viewer.page.text_scene import build_scene
from tests.viewer import image_models, text_models

FORMS = ["transformer", "luong", "gpt", "bert", "albert", "classify"]


@pytest.mark.parametrize("form", FORMS)
def test_requested_explanations_equal_those_computed_in_advance(form):
    look = text_models.cached_look(form)
    header = json.loads(json.dumps(build_scene(look, trace=False, explain=None).header["explained"]))
    assert header["measures"] == ["effects", *(["lens"] if form != "luong" else []), "attribution"]
    handler = TextRequestHandler(look.pipeline)
    request = {"inputs": header["inputs"], "steps": header["steps"]}
    for measure in header["measures"]:
        names = list(look.maps) if measure == "effects" else [None]
        for name in names:
            response = handler.handle({"explain": request | {"measure": measure, "attention": name}})
            found = json.loads(json.dumps(response.header))[measure]
            expected = header[measure] if name is None else {name: header[measure][name]}
            assert_close(found, expected)


@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion"])
def test_requested_methods_of_attribution(method, monkeypatch):
    monkeypatch.setattr(attribution, "INTEGRATION_POINTS", (2,))
    look = text_models.cached_look("gpt")
    output = explain_output(look)
    request = {"measure": "attribution", "method": method, "inputs": output.inputs, "steps": output.steps}
    found = TextRequestHandler(look.pipeline).handle({"explain": json.loads(json.dumps(request))})
    assert_close(found.header["attribution"], {"text": look.attribution(method).values["text"].tolist()})


def assert_close(found, expected):
    if isinstance(expected, dict | list):
        assert len(found) == len(expected)
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            assert_close(found[key], expected[key])
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-5)
    else:
        assert found == expected


def test_effects_sum_to_those_of_python():
    look = text_models.cached_look("transformer")
    header = build_scene(look, trace=False, explain=None).header["explained"]
    total = look.head_effects().total["decoder.1.cross"]
    assert [sum(row) for row in header["effects"]["decoder.1.cross"]] == pytest.approx(total.tolist(), abs=1e-4)


def test_expensive_explanations_are_left_out_unless_requested(monkeypatch):
    look = text_models.cached_look("gpt")
    monkeypatch.setattr(page_explanations, "MAX_MULTIPLICATIONS", 0)
    by_default = build_scene(look, trace=False, explain=None).header["explained"]
    assert [by_default[name] for name in ("effects", "lens", "attribution")] == [None] * 3
    assert build_scene(look, trace=False, explain=True).header["explained"]["effects"]
    monkeypatch.undo()
    monkeypatch.setattr(page_explanations, "MAX_NUMBERS", 60)
    bounded = build_scene(look, trace=False, explain=None).header["explained"]
    assert bounded["lens"] is None
    assert build_scene(look, trace=False).header["explained"]["effects"] is None


@pytest.mark.parametrize("form", ["transformer", "gpt", "bert", "classify"])
def test_costs_grow_with_the_square_of_a_long_text(form):
    """Five times as many tokens: per prediction, 25 times as many attention weights."""
    pipeline = text_models.cached_look(form).pipeline
    target = " ".join(["deux"] * 500) if form == "transformer" else None
    costs = {}
    for words in (100, 500):
        seen = regard.look(pipeline, " ".join(["two"] * words), target and target[: 5 * words - 1])
        output = explain_output(seen)
        costs[words] = page_explanations._costs(seen, output, "attribution")[0] / len(output.steps)
    assert costs[500] > 15 * costs[100]


def test_numbers_that_do_not_fit_are_not_computed(monkeypatch):
    look = text_models.cached_look("transformer")
    complete = build_scene(look, trace=False, explain=True).header["explained"]
    counts = {name: page_explanations._costs(look, explain_output(look), name)[1] for name in complete["measures"]}
    sizes = {name: len(re.findall(r"[-\d.e]+", json.dumps(list(complete[name].values())))) for name in counts}
    assert sizes | counts == counts | {name: sizes[name] for name in ("effects", "attribution")}
    monkeypatch.setattr(page_explanations, "MAX_NUMBERS", counts["attribution"] - 1)
    monkeypatch.delitem(page_explanations.MEASURES, "attribution")
    assert build_scene(look, trace=False, explain=None).header["explained"]["attribution"] is None


def test_models_without_an_output_have_no_explanation():
    assert build_scene(text_models.cached_look("embed"), trace=False, explain=True).header["explained"] is None
    assert build_image_scene(image_models.cached_look("linear"), trace=False).header["explained"] is None


def test_images():
    look = image_models.cached_look("class")
    scene = build_image_scene(look, trace=False, explain=True)
    header = json.loads(json.dumps(scene.header["explained"]))
    assert header["measures"] == ["effects", "lens"]
    assert header["tokens"] == [look.label]
    handler = ImageRequestHandler(look.pipeline, images={"photo": look.run.images[0]})
    request = {"measure": "effects", "inputs": [[]], "steps": header["steps"], "source": "photo"}
    found = handler.handle({"explain": request | {"attention": "blocks.1.attention"}}).header["effects"]
    assert_close(found["blocks.1.attention"], header["effects"]["blocks.1.attention"])
    blob = scene.header["image"]["labels"][0]["attribution"]
    assert tuple(blob["shape"]) == look.grid


@pytest.mark.parametrize(
    "change",
    [
        {"measure": "other"},
        {"measure": "attribution", "method": "other"},
        {"measure": "attribution", "method": []},
        {"attention": "decoder.7.cross"},
        {"attention": None},
        {"inputs": []},
        {"inputs": [[[1, 2]]]},
        {"inputs": [[[1, 2], [10**6]]]},
        {"inputs": [[[1, 2], ["a"]]]},
        {"inputs": [[[1, 2], []]]},
        {"inputs": "text"},
        {"steps": []},
        {"steps": [[0, 0]]},
        {"steps": [[1, 0, 0]]},
        {"steps": [[0, 99, 0]]},
        {"steps": [[0, 0, 10**6]]},
        {"steps": [[0, -1, 0]]},
    ],
)
def test_invalid_requests_are_errors(change):
    handler = TextRequestHandler(text_models.cached_look("transformer").pipeline)
    request = {"measure": "effects", "attention": "decoder.0.cross", "inputs": [[[1, 2], [1, 2]]], "steps": [[0, 0, 1]]}
    assert handler.handle({"explain": request}).header["effects"]
    with pytest.raises(RegardError):
        handler.handle({"explain": request | change})
