"""What tests of the page in a real browser share: how Chromium is started, and how the page is asked."""

import os
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from regard.viewer import web

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
AXE = Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"
LINKS = [[0, 0], [1, 1], [4, 2], [5, 3], [6, 4], [7, 5], [8, 5], [9, 6], [10, 7], [11, 8]]
QUIET = ".regard:not([data-busy])"
CROSS = "#at=decoder.1.cross:2"


def missing(what: str) -> NoReturn:
    """Skips a test, unless nothing may be skipped here."""
    if os.environ.get("REGARD_BROWSER"):
        pytest.fail(f"{what} (REGARD_BROWSER is set: nothing is skipped)")
    pytest.skip(what)


def node_program() -> str:
    """Where node is, which runs JavaScript without a page."""
    return shutil.which("node") or missing("There is no node here to run JavaScript with.")


def bundle_script(script: str) -> str:
    """Pipeline a script for node with the page's sources that it imports ("./weights/maps.js")."""
    return web.bundle(web.read_sources() | {web.ENTRY: script})


def said(page: Any) -> str:
    """What a screen reader would read, without the marks that keep directions apart."""
    return re.sub("[\u2068\u2069]", "", page.locator(".live").text_content())


def hash_of(page: Any) -> dict[str, str]:
    return dict(part.split("=", 1) for part in page.evaluate("location.hash.slice(1)").split("&"))


def square(page: Any, row: int, column: int, columns: int, figure: int = 0) -> Any:
    """A cell of a map in which every cell may be looked at."""
    return page.locator(".panel").nth(figure).locator("rect.square").nth(row * columns + column)


def point_at(page: Any, place: Any) -> None:
    box = place.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def weight_said(page: Any) -> float:
    return float(re.search(r": ([\d.e-]+)\. Row", said(page))[1])


def wait_said(page: Any, text: str) -> None:
    page.wait_for_function("text => document.querySelector('.live').textContent.includes(text)", arg=text)
