"""The widget: what its page is given and answered. tests/viewer/test_browser_hosts.py shows it in a browser."""

import json
import sys

import pytest
from IPython.core.formatters import DisplayFormatter

from regard.errors import RegardError
from regard.viewer import asking, look
from regard.viewer.looking import Look
from regard.viewer.scene import scene_of
from regard.viewer.web import module
from regard.viewer.widget import _widget_class

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def seen(transformer):
    return look(transformer, "one two three", "trois deux un", name="numbers")


def told(widget, message):
    """What a widget sends back to a page that sent a message; that it has heard comes first."""
    sent = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))
    widget._handle_custom_msg(message, [])
    if sent:
        assert sent.pop(0) == ({"heard": message["number"]}, [])
    return sent


def test_the_traits_hold_the_scene(seen):
    made, widget = scene_of(seen), seen.widget()
    assert widget.scene == made.header
    assert widget.blobs == made.blobs
    assert widget.asks == ["source", "target"]
    assert widget._esm == module()
    # What a notebook is sent: blobs as they are, beside the JSON.
    state = widget.get_state()
    assert json.loads(json.dumps(state["scene"])) == json.loads(json.dumps(made.header))
    assert [bytes(blob) for blob in state["blobs"]] == made.blobs


def test_a_look_has_one_widget_and_shows_it(seen):
    data, _ = seen._repr_mimebundle_()
    assert data[VIEW]["model_id"] == seen.widget().model_id
    assert seen.widget() is seen.widget()


def test_it_answers_as_a_look_does(seen, transformer):
    request = {"look": {"source": "four five", "target": "cinq quatre"}}
    ((content, buffers),) = told(seen.widget(), {"number": "7", "ask": request})
    made = scene_of(look(transformer, "four five", "cinq quatre", name="numbers"))
    assert content == {"answers": "7", "told": {"scene": made.header}}
    assert buffers == made.blobs
    assert seen.widget().scene["texts"]["source"] == "one two three"


def test_it_looks_at_the_attentions_that_the_look_had(transformer):
    widget = look(transformer, "one two", "deux un", layers="decoder.*.cross").widget()
    ((content, _),) = told(widget, {"number": "1", "ask": {"look": {"source": "four five"}}})
    names = [one["name"] for one in content["told"]["scene"]["attentions"]]
    assert names == ["decoder.0.cross", "decoder.1.cross"]


def test_errors_are_sentences(seen, monkeypatch, caplog):
    ((content, _),) = told(seen.widget(), {"number": "1", "ask": {"look": {"source": " "}}})
    assert content == {"answers": "1", "error": "The text is empty: there is nothing to look at. Give a sentence."}

    def broken(desk, wanted):
        raise KeyError("a secret")

    monkeypatch.setitem(asking.REQUESTS, "look", broken)
    ((content, _),) = told(seen.widget(), {"number": "2", "ask": {"look": {}}})
    assert "inside Regard" in content["error"]
    assert "a secret" in caplog.text
    assert "a secret" not in content["error"]


@pytest.mark.parametrize("message", [{}, {"number": 1}, "ask", None, {"ask": {"look": {"source": "one"}}}])
def test_other_messages_are_not_answered(seen, message):
    assert told(seen.widget(), message) == []


def test_a_look_that_does_not_know_its_model_cannot_be_asked(seen):
    alone = Look(seen.source, seen.translation, seen.source_pieces, seen.target_pieces, seen.maps)
    assert alone.widget().asks == []
    assert told(alone.widget(), {"number": "1", "ask": {"look": {"source": "one"}}}) == []


def test_without_anywidget_there_is_the_picture(seen, monkeypatch):
    _widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(
        RegardError, match=r'anywidget is not installed\. Get it with: pip install "regard\[notebook\]"'
    ):
        seen.widget()
    assert seen._repr_mimebundle_() is None
    assert seen._repr_png_().startswith(b"\x89PNG")


def test_what_no_page_can_show_is_a_picture(seen, monkeypatch):
    def unfit(*_):
        raise RegardError("A page cannot compute this.", "Save a picture.")

    monkeypatch.setattr("regard.viewer.widget.scene_of", unfit)
    assert seen._repr_mimebundle_() is None


def test_notebooks_show_it(seen):
    """As IPython asks for it: the widget, the picture for where there is no kernel, the text."""
    data, _ = DisplayFormatter().format(seen)
    assert data[VIEW]["model_id"] == seen.widget().model_id
    assert data["image/png"]
    assert "text/plain" in data
