"""Pictures with a model behind the page: live, in a notebook, and in a real browser."""

import json
import sys
from threading import Thread

import numpy as np
import pytest
import torch

import regard
from regard.errors import RegardError
from regard.folder import ImageModel
from regard.viewer import HeadOff, LayerOff, tried, try_it
from regard.viewer.image_asking import PictureDesk
from regard.viewer.image_scene import scene_of_picture
from regard.viewer.live import Live
from regard.viewer.widget import _kind
from tests.viewer.browsing import QUIET, hash_of
from tests.viewer.seeing import LABELS, images, model_of, photo

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def pictures(tmp_path):
    return {"cat.png": photo(tmp_path / "cat.png"), "noise": images(seed=4)[0]}


@pytest.fixture
def desk(pictures):
    return PictureDesk(ImageModel(model_of("class")), "animals", pictures=pictures)


def head_off(name):
    return {"try": {"source": name, "changes": [{"change": "head", "attention": "blocks.0.attention", "head": 1}]}}


def probabilities(outcome):
    return dict(outcome["steps"][0]["likeliest"])


# What it answers


def test_another_picture_is_looked_at(desk, pictures):
    told, blobs = desk.answer({"look": {"picture": "noise"}})
    seen = regard.look(desk.bundle, pictures["noise"], name="animals")
    made = scene_of_picture(seen, pictures=["cat.png", "noise"])
    assert told["scene"]["texts"]["source"] == "noise"
    for part in ("picture", "pictures", "attentions", "model"):
        assert told["scene"][part] == made.header[part]
    assert blobs == made.blobs
    assert desk.fields == ["picture"]


def test_a_head_that_is_off_changes_the_labels_as_zeroing_it_does(desk, pictures):
    told, _ = desk.answer(head_off("noise"))
    model, batch = desk.bundle.model, pictures["noise"][None]
    with torch.no_grad():
        before = model(batch).softmax(-1)[0].tolist()
        with tried(model, [HeadOff("blocks.0.attention", 1)]):
            after = model(batch).softmax(-1)[0].tolist()
    assert probabilities(told["before"]) == pytest.approx(dict(zip(LABELS, before)), abs=1e-6)
    assert probabilities(told["after"]) == pytest.approx(dict(zip(LABELS, after)), abs=1e-6)
    assert abs(np.array(before) - after).max() > 1e-3
    json.dumps(told, allow_nan=False)


def test_what_is_off_in_a_segmenter_changes_how_many_pixels_a_label_has():
    model = ImageModel(model_of("mean", head="segment"))
    both = try_it(model, images()[0], [LayerOff("blocks")])
    for outcome, changes in ((both.before, []), (both.after, [LayerOff("blocks")])):
        with torch.no_grad(), tried(model.model, changes):
            best = model.model(images())[0].argmax(0)
        (step,) = outcome.steps
        shares = {LABELS[i]: (best == i).float().mean().item() for i in range(3)}
        assert step.likeliest == pytest.approx(shares)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"look": {"picture": "/etc/passwd"}}, "none of the pictures. There are: cat.png, noise"),
        ({"look": {"picture": ["cat.png"]}}, "none of the pictures"),
        ({"look": {"picture": "cat.png", "target": "x"}}, "nothing that a page of pictures can ask"),
        ({"look": {"source": "cat.png"}}, "nothing that a page of pictures can ask"),
        ({"look": {"picture": "noise"}, "try": {}}, "nothing that a page of pictures can ask"),
        ({"try": {"source": "/etc/passwd", "changes": []}}, "none of the pictures"),
        ({"try": {"source": "noise", "instead": "/etc/passwd"}}, "has no other text"),
        ({"try": {"source": "noise", "changes": [{"change": "mask"}]}}, "There is no mask"),
        ("noise", "nothing that a page of pictures can ask"),
    ],
)
def test_what_it_does_not_answer(desk, request_, message):
    with pytest.raises(RegardError, match=message):
        desk.answer(request_)


# In a notebook


def told(widget, message):
    sent = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))
    widget._handle_custom_msg(message, [])
    return sent


def test_a_look_is_a_widget():
    seen = regard.look(model_of("class"), images()[0], name="animals")
    widget, made = seen.widget(), scene_of_picture(seen)
    assert widget.scene == made.header
    assert widget.blobs == made.blobs
    assert widget.asks == ["picture"]
    data, _ = seen._repr_mimebundle_()
    assert data[VIEW]["model_id"] == widget.model_id
    *_, (content, _) = told(widget, {"number": "3", "ask": head_off("the picture")})
    assert probabilities(content["told"]["before"]) == pytest.approx(seen.probabilities, abs=1e-6)


def test_without_anywidget_there_is_the_picture(monkeypatch):
    _kind.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    seen = regard.look(model_of("class"), images()[0])
    with pytest.raises(RegardError, match="anywidget is not installed"):
        seen.widget()
    assert seen._repr_mimebundle_() is None


# In a browser


@pytest.fixture
def live(desk, pictures):
    seen = regard.look(desk.bundle, pictures["cat.png"], name="animals")
    server = Live(desk, scene_of_picture(seen, pictures=list(pictures)))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_live_page_shows_other_pictures_and_tries_changes(browser, live, desk, pictures):
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
    seen = regard.look(desk.bundle, pictures["noise"])
    assert page.locator("h1 .target").text_content().startswith(f"{seen.label}, ")
    assert page.evaluate("document.activeElement.name") == "picture"
    assert hash_of(page)["view"] == "images"
    page.get_by_role("tab", name="Experiment").click()
    assert page.get_by_role("textbox").count() == 0  # a picture has no texts to change
    page.get_by_role("button", name="This attention").click()
    page.wait_for_selector(".outcomes:not([hidden])")
    after = try_it(desk.bundle, pictures["noise"], [LayerOff("blocks.2.attention")]).after
    assert page.locator(".outcome .output-text").nth(1).text_content() == after.text
    weight = page.locator(".outcome").nth(1).locator(".steps .weight").first.text_content()
    assert float(weight) == pytest.approx(after.steps[0].probability, abs=0.006)
    page.close()
    assert complaints == []


def test_a_live_page_of_one_picture_has_no_choice(browser, desk, pictures):
    alone = PictureDesk(desk.bundle, "animals", pictures={"cat.png": pictures["cat.png"]})
    seen = regard.look(desk.bundle, pictures["cat.png"])
    server = Live(alone, scene_of_picture(seen, pictures=["cat.png"]))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    page = browser.new_page()
    page.goto(server.address)
    page.wait_for_selector(QUIET)
    assert page.locator("form.request-form").count() == 0
    page.get_by_role("tab", name="Experiment").click()
    assert page.get_by_role("button", name="Positional encoding").is_enabled()  # only a model can do without them
    page.close()
    server.shutdown()
    thread.join()
    server.server_close()
