"""Makes the pictures of the page that README and docs show: python docs/screenshots.py MODEL

MODEL is the folder demo, which `make demo` leaves. Needs Chromium and Playwright (requirements-dev.txt).
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import regard
from regard.train import kept_steps

SENTENCE = "The cat chased the mouse."
VIEWS = {"Heads": "page-heads.png", "Walk": "page-walk.png", "Decode": "page-decode.png"}


def shoot_steps(page: Any, run: str, into: str) -> None:
    """A picture of an early step of a run beside its last, for the last one's translation."""
    models = [regard.load(one, "cpu") for one in kept_steps(run).values()]
    target = models[-1](SENTENCE)
    steps = regard.compare(*(regard.look(model, SENTENCE, target) for model in models))
    shown = f"{steps.looks[-1].alignment.name}:mean"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.html"
        steps.save(file)
        page.set_viewport_size({"width": 1280, "height": 960})
        page.goto(file.as_uri() + f"#at=2/{shown}&with={len(models) - 1}/{shown}")
        page.wait_for_timeout(1500)
        page.screenshot(path=str(Path(__file__).with_name(into)))


def main() -> None:
    seen = regard.look(regard.load(sys.argv[1], "cpu"), SENTENCE)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        seen.save(page_file)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(page_file.as_uri())
        for name, file in VIEWS.items():
            page.get_by_role("tab", name=name, exact=True).click()
            page.wait_for_timeout(1500)  # until small maps are drawn
            page.screenshot(path=str(Path(__file__).with_name(file)))
        shoot_steps(browser.new_page(), sys.argv[1], "page-steps.png")
        browser.close()


if __name__ == "__main__":
    main()
