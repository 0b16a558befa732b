"""A saved page runs its own model in Chromium: offline, from one file, in a worker."""

import re
from functools import cache

import pytest

from regard.decode import DecodeConfig
from regard.viewer import look
from regard.viewer.experiments import handle_experiment
from regard.viewer.page.html_page import render_page
from regard.viewer.page.page_model import build_page_model
from regard.viewer.page.text_scene import build_scene
from tests.viewer.browser import QUIET
from tests.viewer.text_models import SOURCE, make_pipeline

SENTENCE = "four three three one two"


@cache
def cached_pipeline(form: str):
    return make_pipeline(form)


@pytest.fixture
def engine_page(opened, monkeypatch):
    """Opens the page of a look with its model."""

    def open_page(form: str, **options):
        seen = look(cached_pipeline(form), SOURCE, name=form)
        model = build_page_model(seen, "float32")
        monkeypatch.setattr("tests.viewer.conftest.html", lambda scene: render_page(scene, model))
        return opened(build_scene(seen, tensors=model.tensors, **options))

    return open_page


def submit(page, text: str) -> None:
    page.fill("textarea[name=source]", text)
    page.click(".request-form button[type=submit]")
    page.wait_for_function("text => document.title.startsWith(text)", arg=text)
    page.wait_for_selector(QUIET)


def test_new_sentence_in_every_view(engine_page):
    page = engine_page("transformer")
    assert "float32 weights" in page.locator(".request-note").text_content()
    submit(page, SENTENCE)
    expected = cached_pipeline("transformer").translate(SENTENCE)[0].text
    assert page.title().endswith(expected[:20].strip()) or expected[:20] in page.title()
    page.get_by_label("Search", exact=True).select_option("Greedy search")
    submit(page, f"{SENTENCE} one")
    greedy = cached_pipeline("transformer").translate(f"{SENTENCE} one", DecodeConfig(method="greedy"))[0].text
    assert page.locator("h1").inner_text().replace("\n", " ").endswith(greedy)
    page.get_by_role("tab", name="Step by step").click()
    page.get_by_role("tab", name="Numbers").click()
    assert "steps are computed in this page" in page.locator(".verdict").text_content()
    assert page.locator(".step").count() > 5
    page.get_by_role("tab", name="Attention").click()
    page.locator(".search-section > summary").click()
    page.wait_for_selector(".tree")
    assert page.locator("text=" + SENTENCE.split()[0]).count() > 0
    assert page.locator(".output-token").count() == len(page.locator(".tree .item[data-state=best]").all())


def test_experiment_runs_in_the_page(engine_page):
    page = engine_page("transformer", walk=False)
    page.get_by_role("tab", name="Experiment").click()
    name = page.locator(".experiment select").first.input_value()
    page.get_by_role("button", name="This attention").click()
    page.wait_for_selector(".outcome .output-text")
    changes = [{"change": "layer", "layer": name}]
    expected = handle_experiment(cached_pipeline("transformer"), {"source": SOURCE, "changes": changes})
    texts = page.locator(".outcome .output-text").all_text_contents()
    assert [re.sub(r"\s+", " ", text) for text in texts] == [expected["before"]["text"], expected["after"]["text"]]


def test_language_model_reads_new_text(engine_page):
    page = engine_page("llama")
    submit(page, SENTENCE)
    labels = page.locator("svg text, .axis-label").all_text_contents()
    assert {"four", "three"} <= {label.strip() for label in labels}


def test_error_of_the_model_is_shown(engine_page):
    page = engine_page("transformer", walk=False)
    page.fill("textarea[name=source]", "   ")
    page.click(".request-form button[type=submit]")
    page.wait_for_selector(".request-form[data-failed]")
    assert "The text is empty" in page.locator(".request-status").text_content()
