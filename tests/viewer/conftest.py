"""Fixtures: Chromium, and pages opened from files without a network."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.viewer.page.html import render_page as html
from regard.viewer.page.text_scene import Scene
from tests.viewer import scenes
from tests.viewer.browser import FLAGS, LINKS, QUIET, missing


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        missing("Chromium is missing: apt-get install chromium.")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("Playwright is missing: pip install -r requirements-dev.txt.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens scenes as pages. Fails at the end if a page logged anything or requested another file."""
    messages: list[str] = []
    requested: list[str] = []
    contexts = []

    def open_page(scene: Scene, fragment: str = "", *, before: str = "", wait: str = QUIET, **options: Any) -> Any:
        file = tmp_path / f"{len(contexts)}.html"
        file.write_bytes(html(scene))
        options.setdefault("viewport", {"width": 1360, "height": 900})
        context = browser.new_context(accept_downloads=True, **options)
        contexts.append(context)
        context.set_offline(True)
        context.set_default_timeout(240_000)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
        if before:
            page.add_init_script(before)
        page.goto(file.as_uri() + fragment)
        page.wait_for_selector(wait)
        return page

    open_page.console_messages = messages  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert {url.split("#")[0] for url in requested if not url.startswith(("data:", "blob:"))} <= {
        (tmp_path / f"{i}.html").as_uri() for i in range(len(contexts))
    }


@pytest.fixture(scope="module")
def small() -> Scene:
    return scenes.small(links=LINKS)
