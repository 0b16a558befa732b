"""Makes the pictures of the page that README and docs show: python docs/screenshots.py MODEL

MODEL is the folder demo, which `make demo` leaves. Needs Chromium and Playwright (requirements-dev.txt).
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import regard

SENTENCE = "The cat chased the mouse."
VIEWS = {"Heads": "page-heads.png", "Walk": "page-walk.png", "Decode": "page-decode.png"}


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
        browser.close()


if __name__ == "__main__":
    main()
