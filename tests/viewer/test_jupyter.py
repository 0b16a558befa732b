"""Display in a notebook: JupyterLab with its own kernel, in a browser."""

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.viewer.browser import missing

# No user settings, no network; regard is imported while the page loads.
CONFIG = """
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.extensions_in_dev_mode = False
c.LabServerApp.open_browser = False
c.ServerApp.terminals_enabled = False
"""
FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
FOLDERS += ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
CELLS = [
    'model = regard.load({folder!r}, "cpu")\nregard.look(model, "one two three", "trois deux un", name="numbers")',
    'regard.compare(*(regard.look(model, text) for text in ("one two", "two one", "three one")))',
]
# Shorten the ten seconds after which the page reports a dead kernel.
SHOWN = ".jp-Cell .regard:not([data-busy])"
SHORT_TIMEOUT = "window.setTimeout = (real => (f, t, ...more) => real(f, t === 10000 ? 3000 : t, ...more))(setTimeout)"


class Lab(NamedTuple):
    address: str
    token: str

    def request(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.address}api/{path}", data, headers, method=method)
        ) as answer:
            found = answer.read()
        return json.loads(found) if found else None


def _wait_for(lab: Lab) -> None:
    """Wait until the server responds: it prints its address earlier."""
    while True:
        try:
            lab.request("GET", "kernels")
            return
        except OSError:
            time.sleep(0.05)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, transformer_folder: Path) -> Iterator[Lab]:
    """JupyterLab with one notebook on the loopback address."""
    tmp_path = tmp_path_factory.mktemp("lab")
    if importlib.util.find_spec("jupyterlab") is None:
        missing("JupyterLab is missing: pip install -r requirements-dev.txt.")
    folders = {name: tmp_path / name.lower() for name in FOLDERS}
    startup = folders["IPYTHONDIR"] / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "first.py").write_text("import regard, regard.viewer.display\n")
    folders["JUPYTER_CONFIG_DIR"].mkdir()
    (folders["JUPYTER_CONFIG_DIR"] / "jupyter_lab_config.py").write_text(CONFIG)
    work = tmp_path / "work"
    work.mkdir()
    cells = [
        {"cell_type": "code", "id": f"c{number}", "metadata": {}, "execution_count": None, "outputs": []}
        | {"source": text.format(folder=str(transformer_folder))}
        for number, text in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    (work / "look.ipynb").write_text(json.dumps(notebook))
    token = secrets.token_urlsafe(16)
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={token}"]
    environment = os.environ | {name: str(folder) for name, folder in folders.items()} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={work}"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output_lines = []
        for line in process.stderr:
            output_lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                break
        else:
            pytest.fail("JupyterLab did not start: " + "".join(output_lines))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        made = Lab(found[0], token)
        _wait_for(made)
        made.request(
            "POST", "sessions", {"path": "look.ipynb", "name": "", "type": "notebook", "kernel": {"name": "python3"}}
        )
        yield made
        for one in made.request("GET", "kernels"):
            made.request("DELETE", f"kernels/{one['id']}")
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def notebook(browser: Any, lab: Lab) -> Iterator[Any]:
    """The page of the notebook after its first cell has run."""
    context = browser.new_context(viewport={"width": 1100, "height": 1000})
    context.set_default_timeout(60_000)
    requested_urls, errors = [], []
    page = context.new_page()
    page.on("request", lambda request: requested_urls.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(SHORT_TIMEOUT)
    page.goto(f"{lab.address}doc/tree/look.ipynb?token={lab.token}")
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.locator(SHOWN).first.wait_for()
    yield page
    context.close()
    assert errors == []
    assert {urlsplit(url).netloc for url in requested_urls if not url.startswith(("data:", "blob:"))} == {
        urlsplit(lab.address).netloc
    }


@pytest.mark.parametrize("target", ["button:text-is('Map')", ".figure", ".brand"])
def test_shortcuts_of_the_notebook_do_not_act_in_the_widget(notebook, target):
    notebook.locator(SHOWN).first.locator(target).first.click()
    for key in ("x", "d", "d", "b"):  # cut, delete, and insert a cell
        notebook.keyboard.press(key)
    notebook.locator(".jp-Cell").nth(1).locator(".cm-content").click()
    assert notebook.locator(".jp-Cell").count() == len(CELLS)


def test_look_and_comparison_in_a_notebook(notebook, lab):
    page = notebook
    seen = page.locator(SHOWN).first
    assert seen.locator("h1 .source").text_content() == "one two three"
    # Pointer and keyboard: a focused figure handles the keys, not the notebook.
    seen.locator(".figure").first.focus()
    page.keyboard.press("m")
    seen.locator("rect.square").first.hover()
    assert seen.locator(".reading .subject").first.text_content() == "trois"
    seen.locator(".figure").first.focus()
    page.keyboard.press("n")
    assert seen.locator("td[data-row]").count() > 4
    assert page.locator(".jp-Cell").count() == 2
    # Another sentence is sent to the kernel.
    seen.get_by_role("textbox", name="Sentence").fill("four five")
    page.keyboard.press("Enter")
    seen.locator("h1 .source:text-is('four five')").wait_for(state="attached")
    with page.expect_download() as waiting:
        seen.get_by_text("Save", exact=True).click()
        seen.get_by_role("button", name="Figure as SVG").click()
    assert waiting.value.suggested_filename.endswith(".svg")
    # A comparison, with its slider.
    page.locator(".jp-Cell .cm-content").nth(1).click()
    page.keyboard.press("Shift+Enter")
    compared = page.locator(".jp-Cell").nth(1).locator(".regard:not([data-busy])")
    compared.get_by_role("slider", name="Compared item").press("Home")
    assert compared.get_by_role("slider", name="Compared item").get_attribute("aria-valuetext") == "one two"
    # A kernel that has stopped.
    for kernel in lab.request("GET", "kernels"):
        lab.request("DELETE", f"kernels/{kernel['id']}")
    seen.get_by_role("textbox", name="Sentence").fill("one")
    seen.get_by_role("button", name="Run").click()
    seen.locator("form[data-failed]").wait_for()
    assert "run this cell again" in seen.locator(".request-status").text_content()


def test_reopened_notebook_without_its_kernel_shows_a_picture(notebook, lab):
    """JupyterLab looks for the widget, of which only its id is saved."""
    page, picture = notebook, notebook.get_by_role("img", name="Look('one two three'")
    assert picture.count() == 0  # the widget is shown instead
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    for kernel in lab.request("GET", "kernels"):
        lab.request("DELETE", f"kernels/{kernel['id']}")
    page.reload()
    picture.wait_for()
    page.wait_for_function("() => document.body.textContent.includes('model not found')")
    assert picture.evaluate("one => one.naturalWidth") > 300
    assert "model not found" not in page.locator(".jp-Cell").first.inner_text()
