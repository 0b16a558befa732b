"""Comparison of sentences, models and training steps in a browser: selection, slider and difference."""

import copy
import dataclasses
import re
from threading import Thread

import numpy as np
import pytest
import torch

from regard.viewer import compare, look
from regard.viewer.comparison import ComparisonRequestHandler
from regard.viewer.page.live_server import LiveServer
from tests.viewer.browser import (
    QUIET,
    announced,
    axe_violations,
    hash_of,
    point_at,
    wait_for_announcement,
)

SOURCE, TARGET = "one two three", "trois deux un"
CROSS, STEPS = "decoder.1.cross", (0, 500, 1000, 1500)


@pytest.fixture(scope="module")
def run(transformer):
    """Models with increasingly sharp attention, as in training; the last one is the model itself."""
    models = []
    for step in STEPS:
        model = copy.deepcopy(transformer.model)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if ".query." in name:
                    weights *= step / STEPS[-1]
        models.append(dataclasses.replace(transformer, model=model, training={"step": step}))
    return models


@pytest.fixture(scope="module")
def steps(run):
    return compare(*(look(model, SOURCE, TARGET) for model in run))


def weights_of(one, head=1):
    return one.maps[CROSS].weights[head]


def table(page, figure=0):
    rows = page.locator(".panel").nth(figure).locator("tbody tr").all()
    return np.array([[float(x.replace("−", "-")) for x in row.locator("td").all_text_contents()] for row in rows])


def test_slider_selects_training_steps(opened, steps):
    page = opened(steps.scene(), f"#at=3/{CROSS}:1&as=table")
    slider = page.get_by_role("slider", name="Compared item")
    assert slider.get_attribute("aria-valuetext") == "step 1500"
    assert page.locator(".chooser output").first.text_content() == "step 1500"
    np.testing.assert_allclose(table(page), weights_of(steps.looks[3]), rtol=1e-3, atol=1e-6)
    slider.focus()
    for number, key in ((2, "ArrowLeft"), (0, "Home"), (1, "ArrowUp"), (3, "End"), (1, "ArrowDown")):
        if key == "ArrowDown":
            page.keyboard.press(key)
        page.keyboard.press(key)
        page.wait_for_function(
            "label => document.querySelector('input[type=range]').ariaValueText === label", arg=f"step {STEPS[number]}"
        )
        np.testing.assert_allclose(table(page), weights_of(steps.looks[number]), rtol=1e-3, atol=1e-6)
        assert hash_of(page)["at"] == (f"{number}/" if number else "") + f"{CROSS}:1"
    wait_for_announcement(page, "step 500: Cross-attention, layer 2, head 2")
    # The thumbnails are those of the step, and so is a head that is selected there.
    page.locator(f"[data-head='{CROSS}:0']").click()
    assert hash_of(page)["at"] == f"1/{CROSS}:0"
    # Two keys do the same on the figure.
    page.locator(".figure .scroll").focus()
    page.keyboard.press(".")
    assert hash_of(page)["at"] == f"2/{CROSS}:0"
    page.keyboard.press(",")
    page.keyboard.press(",")
    page.keyboard.press(",")
    assert hash_of(page)["at"] == f"3/{CROSS}:0"


def test_play_button_goes_through_the_steps(opened, steps):
    page = opened(steps.scene(), before="window.setInterval = (real => (f, t) => real(f, t / 10))(window.setInterval)")
    page.locator(".chooser output").first.evaluate("""one => {
        window.labels = [];
        new MutationObserver(() => labels.push(one.textContent)).observe(one, {childList: true});
    }""")
    play = page.get_by_role("button", name="Play")
    play.click()
    assert play.get_attribute("aria-pressed") == "true"
    page.wait_for_selector("[aria-label='Play'][aria-pressed=false]")
    assert list(dict.fromkeys(page.evaluate("labels"))) == list(steps.labels)


def test_two_looks_are_shown_with_their_difference(opened, steps):
    both = compare(steps.looks[0], steps.looks[3], labels=["before", "after"])
    page = opened(both.scene())
    assert page.locator(".panel:visible").count() == 2
    assert [one.input_value() for one in page.locator("select.member").all()] == ["0", "1"]
    page.goto(page.url.split("#")[0] + f"#at={CROSS}:1&with=1/{CROSS}:1&as=map")
    page.get_by_role("button", name="Difference").click()
    assert hash_of(page)["minus"] == "1"
    page.wait_for_selector(".difference rect.square")
    difference = both.difference(CROSS, 1)
    strongest = np.unravel_index(np.abs(difference).argmax(), difference.shape)
    cell = page.locator(".difference rect.square").nth(int(strongest[0]) * difference.shape[1] + int(strongest[1]))
    cell.scroll_into_view_if_needed()
    point_at(page, cell)
    wait_for_announcement(page, "A minus B: ")
    found = re.search(r"A minus B: ([−+])([\d.]+)\.", announced(page))
    assert float(f"{found[1]}{found[2]}".replace("−", "-")) == pytest.approx(difference[strongest], rel=1e-4)
    assert page.locator(".difference-value output").text_content().startswith("−" if difference[strongest] < 0 else "+")
    # All figures highlight the same cell.
    assert page.locator(".panel .ring.cursor").count() == 3
    # There is a difference table, but no difference as lines.
    page.locator(".difference .figure").focus()
    page.keyboard.press("n")
    page.wait_for_selector(".difference table")
    np.testing.assert_allclose(table(page, 2), difference, rtol=1e-3, atol=2e-6)
    page.get_by_role("tab", name="Lines").click()
    assert not page.locator(".difference").is_visible()
    page.get_by_role("tab", name="Map").click()
    page.locator(".panel .figure").first.focus()
    page.keyboard.press("d")
    assert not page.locator(".difference").is_visible()
    assert "minus" not in hash_of(page)


def test_differences_have_two_colors(opened, steps):
    page = opened(compare(steps.looks[0], steps.looks[3]).scene(), f"#at={CROSS}:1&with=1/{CROSS}:1&minus=1")
    page.wait_for_selector(".difference rect.square")
    difference = compare(steps.looks[0], steps.looks[3]).difference(CROSS, 1).ravel()
    fills = [one.get_attribute("fill") for one in page.locator(".difference rect.square").all()]
    for number, fill in zip(difference, fills):
        red, _, blue = map(int, re.findall(r"\d+", fill))
        if abs(number) > 0.05:
            assert (blue > red) == (number > 0)


def test_different_sentences_have_no_difference(opened, transformer):
    both = compare(look(transformer, "one two", "deux un"), look(transformer, "two one three", "trois un deux"))
    page = opened(both.scene())
    assert page.locator("h1").text_content() == "one two | two one three"
    assert page.locator(".panel .own-texts").all_text_contents() == ["deux un", "trois un deux"]
    assert not page.get_by_role("button", name="Difference").is_visible()
    # Each figure can show either sentence.
    page.locator("select.member").nth(1).select_option("0")
    assert page.get_by_role("button", name="Difference").is_visible()
    assert page.locator(".panel .own-texts").all_text_contents() == ["deux un", "deux un"]


def test_different_models_show_corresponding_heads(opened, transformer, seq2seq):
    both = compare(look(transformer, SOURCE, TARGET, name="t"), look(seq2seq, SOURCE, TARGET, name="<img src=x>"))
    page = opened(both.scene(), f"#at={CROSS}:1&as=table")
    page.get_by_role("button", name="Compare").click()
    # The recurrent model has one attention, which corresponds to any cross-attention.
    assert hash_of(page)["with"] == "1/decoder.attention:0"
    np.testing.assert_allclose(table(page, 1), both.looks[1].maps["decoder.attention"].weights[0], rtol=1e-3, atol=1e-6)
    page.locator("select.member").first.select_option("1")
    assert hash_of(page)["at"] == "1/decoder.attention:0"
    assert page.locator("select.member").first.evaluate("one => one.selectedOptions[0].textContent") == "<img src=x>"
    assert page.locator("img").count() == 0
    # The thumbnails are those of the model in the figure that was used last.
    page.locator(".panel .figure-container").nth(0).click(position={"x": 5, "y": 5})
    assert page.locator(".overview:visible").count() == 0
    page.locator("select.member").first.select_option("0")
    assert page.locator(".overview .thumb").count() > 4


def test_address_of_a_missing_look_is_ignored(opened, steps):
    page = opened(steps.scene(), f"#at=9/{CROSS}:1&with=7/{CROSS}:0")
    assert page.locator(".panel:visible").count() == 1
    assert page.locator(".chooser output").first.text_content() == "step 1500"


def test_axe_finds_no_violations(opened, steps):
    page = opened(steps.scene(), f"#at={CROSS}:1&with=3/{CROSS}:1&minus=1")
    page.wait_for_selector(".difference rect.square")
    assert axe_violations(page) == []
    found = axe_violations(page, kinds=["incomplete"])
    assert [one for one in found if one[1] != "color-contrast"] == []


def test_narrow_window_does_not_scroll_sideways(opened, steps):
    page = opened(steps.scene(), f"#at={CROSS}:1&with=3/{CROSS}:1&minus=1", viewport={"width": 390, "height": 844})
    page.wait_for_selector(".difference rect.square")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_saved_figure_contains_the_difference(opened, steps):
    page = opened(compare(steps.looks[0], steps.looks[3]).scene(), f"#at={CROSS}:1&with=1/{CROSS}:1&minus=1")
    page.wait_for_selector(".difference rect.square")
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Figure as SVG").click()
    text = waiting.value.path().read_text(encoding="utf-8")
    assert waiting.value.suggested_filename == f"regard-step_0-{CROSS}.1-step_1500-{CROSS}.1.svg"
    assert "A − B" in text
    assert "step 1500" in text


def test_live_page_runs_every_model(browser, run, transformer):
    models = [lambda model=model: model for model in run[::3]]
    handler = ComparisonRequestHandler(
        transformer, "numbers", models=models, labels=["step 0", "step 1500"], share_last_translation=True
    )
    live = LiveServer(handler, handler.look({"source": SOURCE}))
    thread = Thread(target=live.serve_forever, args=(0.01,))
    thread.start()
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(live.address)
        page.wait_for_selector(QUIET)
        assert page.locator(".panel:visible").count() == 2
        page.get_by_role("textbox", name="Sentence").fill("four five six")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1 .source:text-is('four five six')", state="attached")
        page.wait_for_selector(QUIET)
        assert page.locator("h1 .target").text_content() == look(transformer, "four five six").translation
        assert page.locator("select.member").count() == 2
        assert page.locator(".panel:visible").count() == 2
        assert page.get_by_role("tab", name="Experiment").count() == 0
    finally:
        context.close()
        live.shutdown()
        thread.join()
        live.server_close()


def test_live_page_of_two_sentences_has_two_fields(browser, transformer):
    handler = compare(look(transformer, "one two"), look(transformer, "two one")).handler
    live = LiveServer(handler, handler.look({"source": "one two", "beside": "two one"}))
    thread = Thread(target=live.serve_forever, args=(0.01,))
    thread.start()
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(live.address)
        page.wait_for_selector(QUIET)
        other = page.get_by_role("textbox", name="Other sentence")
        assert other.input_value() == "two one"
        other.fill("two one three")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('h1')?.textContent === 'one two | two one three'")
        assert other.input_value() == "two one three"
    finally:
        context.close()
        live.shutdown()
        thread.join()
        live.server_close()
