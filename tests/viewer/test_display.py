"""The notebook widget: traits and responses. tests/viewer/web/test_browser_hosts.py shows it in a browser."""

import base64
import json
import re
import sys
from types import SimpleNamespace

import pytest
from IPython.core.formatters import DisplayFormatter

from regard.errors import RegardError
from regard.viewer import look
from regard.viewer.display import _widget_class
from regard.viewer.page import requests
from regard.viewer.page.text_scene import build_scene
from regard.viewer.text_look import Look
from regard.viewer.web import module

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def seen(transformer):
    return look(transformer, "one two three", "trois deux un", name="numbers")


def send_message(widget, message):
    """Messages that a widget sends in response; the receipt comes first and is removed."""
    sent = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))
    widget._handle_custom_msg(message, [])
    if sent:
        assert sent.pop(0) == ({"received": message["number"]}, [])
    return sent


def test_traits_contain_the_scene(seen):
    made, widget = build_scene(seen), seen.widget()
    assert widget.scene == made.header
    assert widget.blobs == made.blobs
    assert widget.fields == ["source", "target"]
    assert widget._esm == module()
    # The state sent to a notebook: JSON and binary blobs.
    state = widget.get_state()
    assert json.loads(json.dumps(state["scene"])) == json.loads(json.dumps(made.header))
    assert [bytes(blob) for blob in state["blobs"]] == made.blobs


def test_look_displays_its_single_widget(seen):
    data, _ = seen._repr_mimebundle_()
    assert data[VIEW]["model_id"] == seen.widget().model_id
    assert seen.widget() is seen.widget()


def test_response_is_the_scene_of_a_look(seen, transformer):
    request = {"look": {"source": "four five", "target": "cinq quatre"}}
    ((content, buffers),) = send_message(seen.widget(), {"number": "7", "request": request})
    made = build_scene(look(transformer, "four five", "cinq quatre", name="numbers"))
    assert content == {"response_to": "7", "response": {"scene": made.header}}
    assert buffers == made.blobs
    assert seen.widget().scene["texts"]["source"] == "one two three"


def test_response_has_the_attentions_of_the_look(transformer):
    widget = look(transformer, "one two", "deux un", layers="decoder.*.cross").widget()
    ((content, _),) = send_message(widget, {"number": "1", "request": {"look": {"source": "four five"}}})
    names = [one["name"] for one in content["response"]["scene"]["attentions"]]
    assert names == ["decoder.0.cross", "decoder.1.cross"]


def test_errors_are_sent_as_messages(seen, monkeypatch, caplog):
    ((content, _),) = send_message(seen.widget(), {"number": "1", "request": {"look": {"source": " "}}})
    assert content == {"response_to": "1", "error": "The text is empty: there is nothing to look at. Pass a sentence."}

    def broken(handler, arguments):
        raise KeyError("a secret")

    monkeypatch.setitem(requests.REQUESTS, "look", broken)
    ((content, _),) = send_message(seen.widget(), {"number": "2", "request": {"look": {}}})
    assert "Internal error" in content["error"]
    assert "a secret" in caplog.text
    assert "a secret" not in content["error"]


@pytest.mark.parametrize("message", [{}, {"number": 1}, "request", None, {"request": {"look": {"source": "one"}}}])
def test_invalid_messages_are_ignored(seen, message):
    assert send_message(seen.widget(), message) == []


def test_look_without_a_model_handles_no_requests(seen):
    alone = Look(seen.source, seen.translation, seen.source_pieces, seen.target_pieces, seen.maps)
    assert alone.widget().fields == []
    assert send_message(alone.widget(), {"number": "1", "request": {"look": {"source": "one"}}}) == []


def test_without_anywidget_only_the_plot_is_shown(seen, monkeypatch):
    _widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(
        RegardError, match=r'anywidget is not installed\. Install it with: \S+ -m pip install "anywidget>='
    ):
        seen.widget()
    assert seen._repr_mimebundle_() is None
    assert seen._repr_png_().startswith(b"\x89PNG")


def test_look_that_no_page_can_show_is_a_plot(seen, monkeypatch):
    def unfit(*_):
        raise RegardError("A page cannot compute this.", "Save a plot.")

    monkeypatch.setattr("regard.viewer.page.text_scene.build_scene", unfit)
    assert seen._repr_mimebundle_() is None


def test_ipython_displays_widget_plot_and_text(seen):
    """IPython gets the widget, the plot for viewers without a kernel, and the text."""
    data, _ = DisplayFormatter().format(seen)
    assert data[VIEW]["model_id"] == seen.widget().model_id
    assert data["image/png"]
    assert "text/plain" in data


def test_notebook_gets_a_hidden_picture_before_the_widget(seen, transformer, monkeypatch):
    """tests/viewer/page/test_jupyter.py shows it in JupyterLab."""
    published = []
    shell = SimpleNamespace(display_pub=SimpleNamespace(publish=published.append))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    hostile = look(transformer, '"><script>', "un")
    assert VIEW in hostile._repr_mimebundle_()[0]
    (markup,) = (data["text/html"] for data in published)
    assert re.findall(r"<\w+", markup) == ["<style", "<img"]
    assert base64.b64encode(hostile._repr_png_()).decode() in markup
