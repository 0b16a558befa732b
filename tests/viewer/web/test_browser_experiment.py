"""The experiment view in a browser: a saved page recomputes weights, the live page sends requests to the model."""

import copy
import csv
import io
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from regard.pipelines import Translator
from regard.viewer import (
    AblateHead,
    AblateLayer,
    RemoveMask,
    RemovePositions,
    RemoveScale,
    SetAttentionRow,
    look,
    run_experiment,
)
from regard.viewer.page.live_server import LiveServer
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.page.text_scene import Scene, build_scene
from tests.viewer import scenes
from tests.viewer.browser import QUIET, announced, axe_violations, wait_for_announcement
from tests.viewer.helpers import weights

MASKED = "#view=experiment&at=decoder.0.attention:1"
CROSS = "#view=experiment&at=decoder.1.cross:2"
SETTLED = ".experiment:not([data-requesting])"


def shown(page: Any, tmp_path: Any) -> np.ndarray:
    """The map after the interventions, as saved by the page."""
    page.locator("summary", has_text="Save").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Numbers as TSV").click()
    saved.value.save_as(tmp_path / "numbers.tsv")
    rows = list(csv.reader(io.StringIO((tmp_path / "numbers.tsv").read_text("utf-8")), delimiter="\t"))
    return np.array([row[1:] for row in rows[1:]], float)


def changed(scene: Scene, name: str, **parts: Any) -> np.ndarray:
    """The weights of a scene after replacing some keys of an attention's header."""
    header = copy.deepcopy(scene.header)
    for one in header["attentions"]:
        if one["name"] == name:
            one.update(parts)
    return weights(Scene(header, scene.blobs), name)


@pytest.fixture(scope="module")
def small() -> Scene:
    return scenes.small()


# The saved page


def test_disabled_mask_exposes_all_tokens(opened, small, tmp_path):
    page = opened(small, MASKED)
    np.testing.assert_allclose(shown(page, tmp_path), weights(small, "decoder.0.attention")[1], atol=1e-6)
    assert "No changes yet" in page.locator(".largest-changes").text_content()
    mask = page.get_by_role("button", name="Mask")
    assert mask.get_attribute("aria-pressed") == "true"
    mask.click()
    assert mask.get_attribute("aria-pressed") == "false"
    expected = changed(small, "decoder.0.attention", mask=None)[1]
    np.testing.assert_allclose(shown(page, tmp_path), expected, atol=1e-6)
    # Both maps are complete.
    assert [page.locator(".experiment .panel").nth(i).locator("rect.square").count() for i in (0, 1)] == [105, 196]
    first = page.locator(".largest-changes li .weight").first.text_content()
    was, now = (float(number) for number in first.split(" → "))
    assert abs(now - was) == pytest.approx(np.abs(expected - weights(small, "decoder.0.attention")[1]).max(), abs=0.01)
    mask.click()
    np.testing.assert_allclose(shown(page, tmp_path), weights(small, "decoder.0.attention")[1], atol=1e-6)


def test_disabled_scale_sharpens_heads(opened, small, tmp_path):
    page = opened(small, CROSS)
    assert page.get_by_role("button", name="Mask").is_disabled()
    page.get_by_role("button", name="Scaling").click()
    score = {"name": "scaled_dot", "form": "dot", "scale": 1.0}
    expected = changed(small, "decoder.1.cross", score=score)[2]
    np.testing.assert_allclose(shown(page, tmp_path), expected, atol=1e-5)
    assert expected.max() > weights(small, "decoder.1.cross")[2].max()


def test_attention_row_is_edited_and_reset(opened, small, tmp_path):
    page = opened(small, CROSS)
    before = weights(small, "decoder.1.cross")[2]
    page.get_by_role("combobox", name="Query token").select_option(label="souris")
    page.get_by_role("combobox", name="Attend only to").select_option(label="garden")
    after = shown(page, tmp_path)
    assert after[7].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(np.delete(after, 7, 0), np.delete(before, 7, 0), atol=1e-6)
    # With a slider, the other weights keep their proportions.
    page.get_by_role("button", name="Reset row").click()
    np.testing.assert_allclose(shown(page, tmp_path), before, atol=1e-6)
    slider = page.get_by_role("slider", name="garden")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    after = shown(page, tmp_path)
    assert after[7].sum() == pytest.approx(1)
    others = [i for i in range(10) if i != 7]
    shares = before[7, others] / before[7, others].sum()
    np.testing.assert_allclose(after[7, others] / after[7, others].sum(), shares, atol=1e-5)
    assert after[7, 7] > before[7, 7]
    page.get_by_role("button", name="Uniform").click()
    np.testing.assert_allclose(shown(page, tmp_path)[7], 0.1, atol=1e-6)
    page.get_by_role("button", name="Reset all").click()
    assert announced(page) == "All changes reset."
    np.testing.assert_allclose(shown(page, tmp_path), before, atol=1e-6)


def test_uniform_row_respects_the_mask(opened, small, tmp_path):
    page = opened(small, MASKED)
    page.get_by_role("combobox", name="Query token").select_option(label="a")
    page.get_by_role("button", name="Uniform").click()
    np.testing.assert_allclose(shown(page, tmp_path)[3], [0.25] * 4 + [0] * 10, atol=1e-6)


def test_keys_select_the_row_and_announce_both_weights(opened, small):
    page = opened(small, CROSS)
    page.get_by_role("button", name="Scaling").click()
    page.locator(".experiment .figure").nth(1).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):  # the first key press shows the current position
        page.keyboard.press(key)
    wait_for_announcement(page, "Row 3 of 14, column 2")
    score = {"name": "scaled_dot", "form": "dot", "scale": 1.0}
    before, after = weights(small, "decoder.1.cross")[2], changed(small, "decoder.1.cross", score=score)[2]
    response = re.search(
        r"^a attends to cat: ([\d.e-]+) before, ([\d.e-]+) after\. Row 3 of 14, column 2 of 10\.", announced(page)
    )
    assert [float(one) for one in response.groups()] == pytest.approx([before[2, 1], after[2, 1]], rel=1e-4)
    page.keyboard.press("Enter")
    assert page.get_by_role("combobox", name="Query token").input_value() == "2"
    assert announced(page) == "The row of a can be edited."


def test_saved_page_refers_to_the_live_page(opened, small):
    page = opened(small, CROSS)
    assert "regard look MODEL --live" in page.locator(".interventions .note").text_content()
    assert page.get_by_role("button", name="This attention").count() == 0
    assert page.get_by_role("textbox").count() == 0
    assert page.get_by_role("tab", name="Experiment").get_attribute("aria-selected") == "true"


def test_tokens_are_never_markup(opened):
    hostile = '"><img src=x onerror=alert(1)>'
    page = opened(scenes.translation([hostile, "cat"], ["chat", hostile]), CROSS)
    assert page.locator("img").count() == 0
    assert hostile in page.get_by_role("combobox", name="Attend only to").text_content()


def test_lists_of_a_long_text_are_limited(opened):
    page = opened(scenes.long(3000), "#view=experiment")
    assert page.get_by_role("combobox", name="Query token").locator("option").count() == 1001
    assert page.get_by_role("slider").count() == 0
    page.get_by_role("button", name="Mask").click()
    assert "Too many weights to compare" in page.locator(".largest-changes").text_content()


@pytest.mark.parametrize("width", [390, 800])
def test_narrow_window_does_not_scroll_sideways(opened, small, width):
    page = opened(small, MASKED, viewport={"width": width, "height": 800})
    page.get_by_role("button", name="Mask").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_axe_finds_no_violations_in_the_saved_page(opened, small):
    page = opened(small, MASKED)
    page.get_by_role("button", name="Mask").click()
    page.get_by_role("combobox", name="Attend only to").select_option(index=3)
    assert axe_violations(page) == []


# The live page


@pytest.fixture
def live(browser, transformer) -> Iterator[Any]:
    """A live page of a model that reverses number words; no page may log an error."""
    complaints: list[str] = []
    scene = build_scene(look(transformer, "one two three"), trace=False)
    server = LiveServer(TextRequestHandler(transformer), scene)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    context.set_default_timeout(240_000)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{server.address}#view=experiment&at=decoder.1.cross:1")
    page.wait_for_selector(".experiment .figure svg")
    yield page
    context.close()
    server.shutdown()
    server.server_close()
    thread.join()
    assert [one for one in complaints if "422" not in one] == []


def request(page: Any, act: Any) -> dict[str, Any]:
    """The model's response to the experiment that `act` triggers, after the page shows it."""
    page.wait_for_selector(QUIET)  # nothing is redrawn between mouse down and mouse up
    with page.expect_response(
        lambda reply: reply.url.endswith("/request") and '"experiment"' in (reply.request.post_data or "")
    ) as answer:
        act()
    response = answer.value.json()
    page.wait_for_selector(SETTLED)
    return response


def outcomes(page: Any) -> list[str]:
    return page.locator(".outcome .output-text").all_text_contents()


def steps(page: Any, number: int) -> list[tuple[str, float]]:
    names = page.locator(".outcome").nth(number).locator(".steps li .name").all_text_contents()
    numbers = page.locator(".outcome").nth(number).locator(".steps li .weight").all_text_contents()
    return [(name.removesuffix(", changed"), float(one)) for name, one in zip(names, numbers)]


@torch.no_grad()
def test_disabled_head_changes_the_output_as_zeroing_it_in_pytorch(live, transformer):
    response = request(live, lambda: live.get_by_role("button", name="This head").click())
    twin = copy.deepcopy(transformer)
    cross = twin.model.decoder[1].cross
    cross.out.weight[:, cross.head_width :] = 0  # head 1 is the last one
    before, after = transformer("one two three"), twin("one two three")
    assert outcomes(live) == [before, after] == [response["before"]["text"], response["after"]["text"]]
    for number, (translator, text) in enumerate(((transformer, before), (twin, after))):
        pair = translator.encode_source("one two three"), translator.encode_target(text)
        shares = translator.model(*translator.teacher_forced([pair])).softmax(-1)
        expected = [float(row[token]) for row, token in zip(shares, [*pair[1], translator.special.eos])]
        answered = response["after" if number else "before"]["steps"]
        assert [one["probability"] for one in answered] == pytest.approx(expected, abs=1e-6)
        assert [share for _, share in steps(live, number)] == pytest.approx(expected, abs=0.006)


def test_every_switch_requests_its_intervention(live, transformer):
    head = ("decoder.1.cross", 1)
    switches = [
        ("Mask", RemoveMask()),
        ("Scaling", RemoveScale()),
        ("Positional encoding", RemovePositions()),
        ("This head", AblateHead(*head)),
        ("This attention", AblateLayer("decoder.1.cross")),
        ("Feed-forward network", AblateLayer("decoder.1.feedforward")),
    ]
    for name, change in switches:
        button = live.get_by_role("button", name=name)
        response = request(live, button.click)
        expected = run_experiment(transformer, "one two three", [change])
        assert response["after"]["text"] == expected.after.text
        assert response["after"]["logprob"] == pytest.approx(expected.after.logprob, abs=1e-5)
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        live.wait_for_selector(".outcomes[hidden]", state="attached")


def test_disabled_heads_of_other_layers_are_listed(live, transformer):
    request(live, lambda: live.get_by_role("button", name="This head").click())
    request(live, lambda: live.get_by_role("combobox", name="Head").select_option("0"))
    response = request(live, lambda: live.get_by_role("button", name="This head").click())
    off = [AblateHead("decoder.1.cross", 0), AblateHead("decoder.1.cross", 1)]
    assert response["after"]["logprob"] == pytest.approx(
        run_experiment(transformer, "one two three", off).after.logprob, abs=1e-5
    )
    other = live.get_by_role("button", name="Enable Cross-attention, layer 2, head 2")
    response = request(live, other.click)
    assert response["after"]["logprob"] == pytest.approx(
        run_experiment(transformer, "one two three", off[:1]).after.logprob, abs=1e-5
    )
    other.wait_for(state="detached")


def test_edited_row_prefix_and_another_sentence(live, transformer):
    columns = len(look(transformer, "one two three").maps["decoder.1.cross"].columns)
    response = request(live, lambda: live.get_by_role("combobox", name="Attend only to").select_option(label="one"))
    row = SetAttentionRow("decoder.1.cross", 1, 0, (1, *[0] * (columns - 1)))
    expected = run_experiment(transformer, "one two three", [row])
    assert response["after"]["text"] == expected.after.text
    assert response["after"]["map"]["weights"][0] == list(row.weights)
    keep = live.get_by_role("button", name="Keep the translation")
    response = request(live, keep.click)
    kept = run_experiment(transformer, "one two three", [row], target=expected.before.text)
    assert outcomes(live) == [expected.before.text] * 2
    assert response["after"]["logprob"] == pytest.approx(kept.after.logprob, abs=1e-5)
    live.get_by_role("button", name="Reset all").click()
    prefix = live.get_by_role("textbox", name="Output prefix")
    prefix.fill("dix")
    request(live, lambda: prefix.press("Enter"))
    assert outcomes(live)[1] == run_experiment(transformer, "one two three", prefix="dix").after.text
    live.get_by_role("button", name="Reset all").click()
    sentence = live.locator(".interventions").get_by_role("textbox", name="Sentence")
    assert sentence.input_value() == "one two three"
    sentence.fill("four five")
    request(live, lambda: sentence.press("Enter"))
    assert outcomes(live)[1] == transformer("four five")
    wait_for_announcement(live, "changes: ")


def test_errors_of_the_model_are_shown(live, monkeypatch):
    monkeypatch.setattr(Translator, "length_limit", 16)  # as with learned positions
    sentence = live.locator(".interventions").get_by_role("textbox", name="Sentence")
    sentence.fill("one " * 99)
    request(live, lambda: sentence.press("Enter"))
    assert "tokens; the model supports at most" in live.get_by_role("alert").text_content()
    live.get_by_role("button", name="Reset all").click()
    assert not live.get_by_role("alert").is_visible()


def test_axe_finds_no_violations_in_the_live_page(live):
    request(live, lambda: live.get_by_role("button", name="This head").click())
    assert axe_violations(live, "document.querySelector('.experiment')") == []
