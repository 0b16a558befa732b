"""Helpers for tests of the page in a browser and under node."""

import os
import re
import shutil
from collections.abc import Sequence
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
HEAD = "#at=decoder.1.cross:2"
CROSS = f"{HEAD}&as=map"


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it if REGARD_BROWSER is set."""
    if os.environ.get("REGARD_BROWSER"):
        pytest.fail(f"{what} (REGARD_BROWSER is set, so the test is not skipped)")
    pytest.skip(what)


def node_program() -> str:
    """Return the path of node."""
    return shutil.which("node") or missing("node is not installed.")


def bundle_script(script: str) -> str:
    """Bundle a script for node with the page's sources that it imports ("./weights/maps.js")."""
    return web.bundle(web.read_sources() | {web.ENTRY: script})


def announced(page: Any) -> str:
    """Return the latest announcement to screen readers, without bidirectional isolates."""
    return re.sub("[\u2068\u2069]", "", page.locator(".live").text_content())


def open_settings(page: Any) -> None:
    """Open the settings of the figure."""
    page.locator(".bar .menu summary").click()


def hash_of(page: Any) -> dict[str, str]:
    """Return the keys of the part of the address after #."""
    return dict(part.split("=", 1) for part in page.evaluate("location.hash.slice(1)").split("&"))


def square(page: Any, row: int, column: int, columns: int, figure: int = 0) -> Any:
    """Return a cell of a map without masked cells."""
    return page.locator(".panel").nth(figure).locator("rect.square").nth(row * columns + column)


def point_at(page: Any, element: Any) -> None:
    """Move the pointer to the center of an element."""
    box = element.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def announced_weight(page: Any) -> float:
    """Return the weight of the latest announcement."""
    return float(re.search(r": ([\d.e−]+)\. Row", announced(page))[1].replace("−", "-"))


def wait_for_announcement(page: Any, text: str) -> None:
    page.wait_for_function("text => document.querySelector('.live').textContent.includes(text)", arg=text)


def axe_violations(page: Any, element: str = "document", kinds: Sequence[str] = ("violations",)) -> list[list[str]]:
    """Return the scheme, the rule and the elements of what axe-core finds: by all rules, and the contrast when dark."""
    if not AXE.exists():
        missing("axe-core is not installed: run npm install.")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = []
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_selector(QUIET)
        result = page.evaluate(f"options => axe.run({element}, options)", {"resultTypes": list(kinds)} | rules)
        assert len(result["passes"]) > (0 if rules else 5)  # axe did run
        found += [
            [scheme, one["id"], *(node["html"][:200] for node in one["nodes"])]
            for kind in kinds
            for one in result[kind]
        ]
    return found
