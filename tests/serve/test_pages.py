"""The page to try models, in a real browser."""

import re

import pytest
from playwright.sync_api import expect

from regard.serve.registry import ModelRegistry
from tests.serve.conftest import run_in_thread
from tests.serve.test_robustness import TOKEN
from tests.viewer.conftest import browser as browser  # a fixture


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 1400})
    context.set_default_timeout(240_000)
    page = context.new_page()
    page.messages = []
    page.on("console", lambda message: page.messages.append(message.text))
    page.on("pageerror", lambda error: page.messages.append(str(error)))
    yield page
    context.close()


def choose(page, server, model: str) -> None:
    page.goto(server.url)
    page.wait_for_selector("#model option", state="attached")
    page.select_option("#model", model)


def test_models_can_be_tried(page, server, local):
    choose(page, server, "numbers")
    page.fill("#text", "one two\nthree")
    page.click("#run")
    expected = f"{local['numbers']('one two')}\n{local['numbers']('three')}"
    expect(page.locator("#output")).to_have_text(expected, use_inner_text=True)
    page.click("#look")
    page.wait_for_selector("#attention:not([hidden])")
    frame = page.frame_locator("#attention")
    frame.locator(".regard:not([data-busy])").wait_for()
    assert frame.locator(".panel").count() > 0
    page.select_option("#model", "letters")
    page.fill("#text", "Un")
    page.click("#run")
    page.wait_for_selector("#run:not([disabled])")
    expect(page.locator("#output")).to_have_text(re.compile(".{4}"))
    page.select_option("#model", "answers")
    page.fill("#text", "the cat")
    page.fill("#context", "the old dog hears the cat")
    page.click("#run")
    expect(page.locator("#output")).not_to_be_empty()
    page.select_option("#model", "animals")
    page.click("#run")
    expect(page.locator("#error")).to_have_text("Choose an image.")
    assert page.messages == []


def test_texts_are_not_markup(page, server):
    choose(page, server, "letters")
    page.fill("#text", "<img src=x onerror=alert(1)>")
    page.click("#run")
    page.wait_for_selector("#run:not([disabled])")
    assert page.locator("#output img").count() == 0
    assert page.messages == []


def test_the_page_asks_for_a_token(page, folders):
    registry = ModelRegistry([folders["numbers"]], device="cpu", latency_target=30)
    with run_in_thread(registry, tokens=[TOKEN]) as server:
        page.goto(server.url)
        page.wait_for_selector("#token-row:not([hidden])")
        page.fill("#token", TOKEN)
        page.press("#token", "Tab")
        page.wait_for_selector("#model option", state="attached")
        page.fill("#text", "one two")
        page.click("#run")
        expect(page.locator("#output")).not_to_be_empty()
