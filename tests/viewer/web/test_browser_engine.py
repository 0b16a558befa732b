"""A saved page runs its own model in Chromium: offline, from one file, in a worker."""

import base64
import json
import re
from functools import cache

import pytest

from regard.decode import DecodeConfig
from regard.viewer import look
from regard.viewer.experiments import handle_experiment
from regard.viewer.explanations import attribution
from regard.viewer.page.html import render_page
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.model import build_page_model
from regard.viewer.page.text_scene import build_scene
from tests.viewer.browser import AXE, QUIET, missing
from tests.viewer.image_helpers import photo
from tests.viewer.image_models import cached_look as cached_image_look
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


def test_steps_of_a_recurrent_model_for_a_new_sentence(engine_page):
    page = engine_page("bahdanau")
    submit(page, SENTENCE)
    page.get_by_role("tab", name="Step by step").click()
    page.get_by_role("tab", name="Numbers").click()
    assert "steps are computed in this page" in page.locator(".verdict").text_content()
    page.locator(".all-steps > summary").click()
    assert page.locator(".all-steps .step", has_text="context vector").is_visible()


# Whether the log-probabilities before and after an intervention are these.
HAS_SCORES = """(expected) => {
  const texts = [...document.querySelectorAll(".outcome .score")].map((one) => one.textContent.split(" ")[1]);
  const scores = texts.map((text) => Number(text.replace("−", "-")));
  return scores.length === 2 && scores.every((score, i) => Math.abs(score - expected[i]) < 2e-3);
}"""


def test_experiments_run_in_the_page(engine_page):
    page = engine_page("transformer", trace=False)
    page.get_by_role("tab", name="Experiment").click()
    name, head = (page.locator(".experiment select").nth(i).input_value() for i in (0, 1))
    changes = {
        "This attention, all its heads": {"change": "layer", "layer": name},
        "This head": {"change": "head", "attention": name, "head": int(head)},
        "Causal mask, everywhere": {"change": "mask"},
        "Scaling by 1 ⁄ √d, everywhere": {"change": "scale"},
        "Positional encoding, everywhere": {"change": "positions"},
    }
    scores = set()
    for button, change in changes.items():
        page.get_by_role("button", name=button, exact=True).click()
        expected = handle_experiment(cached_pipeline("transformer"), {"source": SOURCE, "changes": [change]})
        page.wait_for_function(HAS_SCORES, arg=[expected[side]["logprob"] for side in ("before", "after")])
        scores.add(round(expected["after"]["logprob"], 2))
        page.get_by_role("button", name=button, exact=True).click()
    assert len(scores) == len(changes)


def test_language_model_reads_new_text(engine_page):
    page = engine_page("llama")
    submit(page, SENTENCE)
    labels = page.locator("svg text, .axis-label").all_text_contents()
    assert {"four", "three"} <= {label.strip() for label in labels}


def test_error_of_the_model_is_shown(engine_page):
    page = engine_page("transformer", trace=False)
    page.fill("textarea[name=source]", "   ")
    page.click(".request-form button[type=submit]")
    page.wait_for_selector(".request-form[data-failed]")
    assert "The text is empty" in page.locator(".request-status").text_content()


def test_new_image_file(opened, monkeypatch, tmp_path):
    """A file of the exact input size gives the numbers of Python; other files are scaled and cropped."""
    seen = cached_image_look("class")
    model = build_page_model(seen, "float32")
    monkeypatch.setattr("tests.viewer.conftest.html", lambda scene: render_page(scene, model))
    page = opened(build_image_scene(seen, trace=False))
    height, width, _ = seen.pixels.shape
    expected = look(seen.pipeline, photo(tmp_path / "exact.png", height, width))
    page.set_input_files(".file-form input", tmp_path / "exact.png")
    page.wait_for_function("() => document.title.startsWith('exact.png')")
    page.wait_for_selector(QUIET)
    best = sorted(expected.probabilities.values(), reverse=True)
    bars = page.evaluate(
        "[...document.querySelectorAll('.predictions .bar')].map((bar) => parseFloat(bar.style.width))"
    )
    assert [width / 100 for width in bars] == pytest.approx(best, abs=1e-4)
    page.locator(".file-form input").focus()
    page.set_input_files(".file-form input", photo(tmp_path / "large.png", 50, 40))
    page.wait_for_function("() => document.title.startsWith('large.png')")
    page.set_input_files(".file-form input", {"name": "no.png", "mimeType": "image/png", "buffer": b"no image"})
    page.wait_for_selector(".file-form[data-failed]")
    assert "not an image" in page.locator(".request-status").text_content()


DROP = """name => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(%s), (character) => character.charCodeAt(0));
    data.items.add(new File([bytes], name, { type: "image/png" }));
    document.querySelector(".file-form").dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
}"""


def test_last_dropped_image_is_shown(opened, monkeypatch, tmp_path):
    """An image whose decoding takes longer than that of a later one is not shown instead of it."""
    seen = cached_image_look("class")
    model = build_page_model(seen, "float32")
    monkeypatch.setattr("tests.viewer.conftest.html", lambda scene: render_page(scene, model))
    page = opened(build_image_scene(seen))
    page.evaluate(
        """() => {
            const decode = createImageBitmap;
            const released = new Promise((resolve) => (window.release = resolve));
            window.createImageBitmap = async (file, options) => {
                if (file.name === "slow.png") await released;
                return decode(file, options).finally(() => (window.decoded = file.name));
            };
            window.titles = [];
            const note = () => titles.push(document.title.split(":")[0]);
            new MutationObserver(note).observe(document.querySelector("title"), { childList: true });
        }"""
    )
    drop = DROP % json.dumps(base64.b64encode(photo(tmp_path / "image.png").read_bytes()).decode())
    for name in ("slow.png", "fast.png"):
        page.evaluate(drop, name)
    page.wait_for_function("() => titles.length")
    page.evaluate("release()")
    page.wait_for_function("() => decoded === 'slow.png'")
    page.evaluate(drop, "third.png")
    page.wait_for_function("() => titles.includes('third.png')")
    assert page.evaluate("titles") == ["fast.png", "third.png"]


def run_axe(page) -> list[str]:
    if not AXE.exists():
        missing("axe-core is not installed: run npm install.")
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found["violations"]]


def test_effects_of_heads_by_keyboard(engine_page):
    page = engine_page("transformer")
    page.get_by_role("tab", name="Experiment").click()
    page.wait_for_selector(".effect")
    total = look(cached_pipeline("transformer"), SOURCE).head_effects().total
    cells = page.locator(".effect")
    assert cells.count() == sum(map(len, total.values()))
    value = float(re.search(r": ([−+])(.*)", cells.nth(3).get_attribute("aria-label"))[0][2:].replace("−", "-"))
    assert value == pytest.approx(total["encoder.0.attention"][3], rel=0.06, abs=1e-3)
    assert run_axe(page) == []
    page.get_by_label("Output", exact=True).focus()
    page.keyboard.press("Tab")
    for key in ("End", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    assert "Decoder self-attention, layer 1, head 3" in page.locator(".effects .effect-reading").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".attention-view")
    assert "at=decoder.0.attention:2" in page.url


def test_contributions_and_lens_in_both_kinds_of_pages(engine_page, opened, monkeypatch):
    seen = look(cached_pipeline("transformer"), SOURCE)
    texts = []
    with_model = engine_page("transformer")
    monkeypatch.undo()
    for page in (with_model, opened(build_scene(seen, explain=None))):
        page.locator(".why > summary").click()
        page.locator(".explanation .passage").nth(2).wait_for()
        page.wait_for_selector(".lens table")
        page.get_by_label("Output token").select_option("1")
        values = [
            float(text.replace("−", "-")) for text in page.locator(".explanation:last-child .value").all_inner_texts()
        ]
        if page is with_model:
            monkeypatch.setattr(attribution, "INTEGRATION_POINTS", (32,))  # as in the page
            for method in ("occlusion", "integrated_gradients"):
                page.get_by_label("Method").select_option(method)
                page.locator(".explanation h3", has_text=re.compile(method.replace("_", " "), re.I)).wait_for()
                page.locator(".explanation:last-child .passage").wait_for()
                found = [
                    float(t.replace("−", "-")) for t in page.locator(".explanation:last-child .value").all_inner_texts()
                ]
                expected = seen.attribution(method).values
                assert found == pytest.approx([*expected["source"][1], *expected["target"][1][:2]], rel=0.03, abs=6e-3)
        expected = seen.attribution().values
        assert values == pytest.approx([*expected["source"][1], *expected["target"][1][:2]], rel=0.03, abs=6e-3)
        rollout = page.locator(".explanation").nth(1).locator(".value").all_inner_texts()
        wanted = [*seen.rollout()["source"][1], *seen.rollout()["target"][1][:2]]
        assert [float(text) for text in rollout] == pytest.approx(wanted, abs=6e-3)
        texts.append(page.locator(".lens table").inner_text())
        assert run_axe(page) == []
    assert texts[0].split()[:20] == texts[1].split()[:20]
