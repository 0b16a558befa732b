"""Pages of images with a model: requests, the notebook widget, and the live page in a browser."""

import json
import sys
from threading import Thread

import numpy as np
import pytest
import torch

import regard
from regard.errors import RegardError
from regard.pipelines import ImageModel
from regard.viewer import AblateHead, AblateLayer, apply_interventions, run_experiment
from regard.viewer.display import _widget_class
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.live_server import LiveServer
from regard.viewer.page.requests import ImageRequestHandler
from tests.viewer.browser import QUIET, hash_of
from tests.viewer.image_helpers import LABELS, images, model_of, photo

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def image_files(tmp_path):
    return {"cat.png": photo(tmp_path / "cat.png"), "noise": images(seed=4)[0]}


@pytest.fixture
def handler(image_files):
    return ImageRequestHandler(ImageModel(model_of("class")), "animals", images=image_files)


def ablation_request(name):
    return {
        "experiment": {"source": name, "changes": [{"change": "head", "attention": "blocks.0.attention", "head": 1}]}
    }


def probabilities(outcome):
    return dict(outcome["steps"][0]["likeliest"])


# Requests


def test_look_request_returns_the_scene_of_another_image(handler, image_files):
    header, blobs = handler.handle({"look": {"image": "noise"}})
    seen = regard.look(handler.pipeline, image_files["noise"], name="animals")
    made = build_image_scene(seen, images=["cat.png", "noise"])
    assert header["scene"]["texts"]["source"] == "noise"
    for part in ("image", "images", "attentions", "model"):
        assert header["scene"][part] == made.header[part]
    assert blobs == made.blobs
    assert handler.fields == ["image"]


def test_ablated_head_changes_probabilities_like_the_intervention(handler, image_files):
    header, _ = handler.handle(ablation_request("noise"))
    model, batch = handler.pipeline.model, image_files["noise"][None]
    with torch.no_grad():
        before = model(batch).softmax(-1)[0].tolist()
        with apply_interventions(model, [AblateHead("blocks.0.attention", 1)]):
            after = model(batch).softmax(-1)[0].tolist()
    assert probabilities(header["before"]) == pytest.approx(dict(zip(LABELS, before)), abs=1e-6)
    assert probabilities(header["after"]) == pytest.approx(dict(zip(LABELS, after)), abs=1e-6)
    assert abs(np.array(before) - after).max() > 1e-3
    json.dumps(header, allow_nan=False)


def test_ablated_layer_of_a_segmenter_changes_the_areas_of_labels():
    model = ImageModel(model_of("mean", head="segment"))
    both = run_experiment(model, images()[0], [AblateLayer("blocks")])
    for outcome, changes in ((both.before, []), (both.after, [AblateLayer("blocks")])):
        with torch.no_grad(), apply_interventions(model.model, changes):
            best = model.model(images())[0].argmax(0)
        (step,) = outcome.steps
        shares = {LABELS[i]: (best == i).float().mean().item() for i in range(3)}
        assert step.likeliest == pytest.approx(shares)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"look": {"image": "/etc/passwd"}}, "Unknown image. Choose one of: cat.png, noise"),
        ({"look": {"image": ["cat.png"]}}, "Unknown image"),
        ({"look": {"image": "cat.png", "target": "x"}}, "Invalid request for a page of images"),
        ({"look": {"source": "cat.png"}}, "Invalid request for a page of images"),
        ({"look": {"image": "noise"}, "experiment": {}}, "Invalid request for a page of images"),
        ({"experiment": {"source": "/etc/passwd", "changes": []}}, "Unknown image"),
        ({"experiment": {"source": "noise", "instead": "/etc/passwd"}}, "takes no texts"),
        ({"experiment": {"source": "noise", "changes": [{"change": "mask"}]}}, "There is no causal mask"),
        ("noise", "Invalid request for a page of images"),
    ],
)
def test_invalid_requests_raise_errors(handler, request_, message):
    with pytest.raises(RegardError, match=message):
        handler.handle(request_)


# In a notebook


def send_message(widget, message):
    sent = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))
    widget._handle_custom_msg(message, [])
    return sent


def test_widget_contains_the_scene_and_handles_requests():
    seen = regard.look(model_of("class"), images()[0], name="animals")
    widget, made = seen.widget(), build_image_scene(seen)
    assert widget.scene == made.header
    assert widget.blobs == made.blobs
    assert widget.fields == ["image"]
    data, _ = seen._repr_mimebundle_()
    assert data[VIEW]["model_id"] == widget.model_id
    *_, (content, _) = send_message(widget, {"number": "3", "request": ablation_request("the image")})
    assert probabilities(content["response"]["before"]) == pytest.approx(seen.probabilities, abs=1e-6)


def test_without_anywidget_only_the_plot_is_shown(monkeypatch):
    _widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    seen = regard.look(model_of("class"), images()[0])
    with pytest.raises(RegardError, match="anywidget is not installed"):
        seen.widget()
    assert seen._repr_mimebundle_() is None


# In a browser


@pytest.fixture
def live(handler, image_files):
    seen = regard.look(handler.pipeline, image_files["cat.png"], name="animals")
    server = LiveServer(handler, build_image_scene(seen, images=list(image_files)))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_live_page_shows_other_images_and_runs_experiments(browser, live, handler, image_files):
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(live.address)
    page.wait_for_selector(QUIET)
    assert page.locator("h1 .source").text_content() == "cat.png"
    choice = page.get_by_role("combobox", name="Image", exact=True)
    choice.select_option("noise")
    page.wait_for_selector("h1 .source:text-is('noise')")
    page.wait_for_selector(QUIET)
    seen = regard.look(handler.pipeline, image_files["noise"])
    assert page.locator("h1 .target").text_content().startswith(f"{seen.label}, ")
    assert page.evaluate("document.activeElement.name") == "image"
    selected = hash_of(page)["at"].split(":")[0]
    page.get_by_role("tab", name="Experiment").click()
    assert page.get_by_role("textbox").count() == 0  # an image has no texts to edit
    page.get_by_role("button", name="This attention").click()
    page.wait_for_selector(".outcomes:not([hidden])")
    after = run_experiment(handler.pipeline, image_files["noise"], [AblateLayer(selected)]).after
    assert page.locator(".outcome .output-text").nth(1).text_content() == after.text
    weight = page.locator(".outcome").nth(1).locator(".steps .weight").first.text_content()
    assert float(weight) == pytest.approx(after.steps[0].probability, abs=0.006)
    page.close()
    assert complaints == []


def test_live_page_of_one_image_has_no_image_selector(browser, handler, image_files):
    alone = ImageRequestHandler(handler.pipeline, "animals", images={"cat.png": image_files["cat.png"]})
    seen = regard.look(handler.pipeline, image_files["cat.png"])
    server = LiveServer(alone, build_image_scene(seen, images=["cat.png"]))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    page = browser.new_page()
    page.goto(server.address)
    page.wait_for_selector(QUIET)
    assert page.locator("form.request-form").count() == 0
    page.get_by_role("tab", name="Experiment").click()
    assert page.get_by_role("button", name="Positional encoding").is_enabled()  # needs the model
    page.close()
    server.shutdown()
    thread.join()
    server.server_close()
