"""The step-by-step view in a browser: every number is recomputed and has a derivation."""

import copy
import re

import pytest

from regard.viewer.page.text_scene import Scene, build_scene
from tests.viewer.browser import QUIET, announced, axe_violations, hash_of
from tests.viewer.text_models import cached_look

DONE = ".steps-view .verdict[data-agrees]"
HOSTILE = "<img src=x onerror=alert(1)>"


def scene_for(form: str) -> Scene:
    return build_scene(cached_look(form), trace=True)


def test_steps_view_opens_at_the_clearest_token_and_all_steps_agree(opened):
    scene = scene_for("rotary, grouped")
    page = opened(scene, "#depth=numbers")
    page.get_by_role("tab", name="Step by step").click()
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    steps = [step for step in scene.header["trace"]["steps"] if step["title"]]
    assert f"All {len(steps)} steps" in page.locator(".verdict").text_content()
    assert page.locator(".sections .section-mark[data-agrees=no]").count() == 0
    focus = scene.header["trace"]["focus"]
    for side in ("source", "target"):
        chosen = page.locator(f"[data-side={side}][aria-checked=true]")
        assert chosen.count() == 1
        assert chosen.get_attribute("data-token") == str(focus[side])
    card = page.locator(".sections li[data-part=attention] details[open] .step[data-op=softmax]")
    assert card.locator(".formula").text_content() == "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"
    assert card.locator("footer code").first.text_content() == "regard/layers/attention.py · MultiHeadAttention.forward"
    assert sum(float(text) for text in card.locator(".bar-button .number").all_text_contents()) == pytest.approx(
        1, abs=0.01
    )


def test_corrupted_parameter_is_detected(opened):
    scene = scene_for("transformer")
    at = scene.header["trace"]["params"]["at"]
    spoilt = bytearray(scene.blobs[at])
    spoilt[2000:2004] = b"\x00\x00\x80\x40"  # 4.0
    blobs = [*scene.blobs[:at], bytes(spoilt), *scene.blobs[at + 1 :]]
    page = opened(Scene(scene.header, blobs), "#depth=numbers")
    page.get_by_role("tab", name="Step by step").click()
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "no"
    assert page.locator(".sections .section-mark[data-agrees=no]").count() > 0


def test_tokens_layers_and_heads_are_selected_with_keys(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers&at=decoder.0.cross:1&pin=1,2")
    page.wait_for_selector(DONE)
    token = page.locator("[data-side=target][aria-checked=true]")
    assert token.get_attribute("data-token") == "1"
    assert page.locator("[data-side=source][aria-checked=true]").get_attribute("data-token") == "2"
    before = page.locator(".step[data-op=softmax] .value-subject").first.text_content()
    token.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-side=target][aria-checked=true]").get_attribute("data-token") == "2"
    assert "trois" in announced(page)
    assert hash_of(page)["pin"] == "2,2"
    assert page.locator(".step[data-op=softmax] .value-subject").first.text_content() != before
    page.keyboard.press("]")
    assert hash_of(page)["at"] == "decoder.0.cross:2"
    assert "Head 2" in announced(page)
    page.keyboard.press("}")
    assert hash_of(page)["at"] == "decoder.1.attention:2"
    page.get_by_label("Attention").select_option("encoder.0.attention")
    assert page.locator(".sections li", has_text="Encoder, layer 0: self-attention").locator(".step").count() > 8


def test_number_shows_its_derivation(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers&at=decoder.0.cross:0")
    page.wait_for_selector(DONE)
    card = page.locator(".sections details[open] .step", has_text="q = x W_q")
    assert card.locator(".cell").count() == 8
    card.get_by_role("button", name="… 8 more").click()
    assert card.locator(".cell").count() == 16
    card.locator(".cell").nth(3).click()
    making = card.locator(".derivation")
    assert making.text_content().startswith("q[3] = ")
    making.get_by_role("button", name="… 12 more").click()
    text = making.text_content().replace("−", "-").replace("·", "*")
    right, result = re.fullmatch(r"q\[3\] = (.*) = ([-\d.]+)", text).groups()
    assert right.count("*") == 16
    assert eval(right) == pytest.approx(float(result), abs=0.02)
    assert float(card.locator(".cell").nth(3).text_content().replace("−", "-")) == float(result)
    page.keyboard.press("Shift+Tab")
    card.locator(".cell").nth(3).focus()
    page.keyboard.press("ArrowRight")
    assert making.text_content().startswith("q[4] = ")


@pytest.mark.parametrize("form", ["bahdanau lstm of two layers", "luong lstm of two layers", "T5", "albert", "answer"])
def test_every_section_of_every_family_opens(opened, form):
    scene = scene_for(form)
    page = opened(scene, "#view=steps&depth=numbers")
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    page.evaluate("for (const one of document.querySelectorAll('.sections li:not([hidden]) details')) one.open = true")
    sections = scene.header["trace"]["sections"]
    mine = {n for n, one in enumerate(sections) if "token" not in one}
    page.wait_for_function(
        "count => document.querySelectorAll('.steps-view .step').length >= count",
        arg=sum(step["section"] in mine for step in scene.header["trace"]["steps"]),
    )
    # Of a recurrent model, only the steps of the selected tokens.
    hidden = page.locator(".sections > li[hidden]").count()
    assert (hidden > 0) == any("token" in one for one in sections)


def test_texts_are_never_markup(opened):
    scene = copy.deepcopy(build_scene(cached_look("transformer"), trace=True))
    trace = scene.header["trace"]
    trace["sides"]["source"]["tokens"][1] = trace["note"] = trace["names"]["5"] = HOSTILE
    first = next(step for step in trace["steps"] if step["title"])
    trace["sections"][0]["title"] = first["formula"] = first["where"] = HOSTILE
    page = opened(scene, "#view=steps&depth=numbers")
    page.wait_for_selector(DONE)
    assert page.locator("img").count() == 0
    assert page.locator("[data-side=source]").nth(1).text_content() == HOSTILE


def test_axe_finds_no_violations(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers")
    page.wait_for_selector(DONE)
    for depth in ("Numbers", "Formula", "Idea"):
        page.get_by_role("tab", name=depth).click()
        assert axe_violations(page) == []


def test_three_depths(opened):
    """A stage has one sentence and a figure, its equations with shapes, or its numbers; the choice is remembered."""
    scene = scene_for("transformer")
    page = opened(scene)
    page.get_by_role("button", name="Encoder 0").click()
    page.wait_for_selector(QUIET)
    page.locator(".figure.lines").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Step by step").click()
    page.wait_for_selector(QUIET)
    # The stage and the token on display before, without a pin; the other stages are collapsed.
    assert page.locator(".sections details[open] h2").all_text_contents() == ["Encoder, layer 0: self-attention"]
    assert page.locator("[data-side=source][aria-checked=true]").get_attribute("data-token") == "2"
    sections = page.locator(".sections > li:visible")
    assert page.locator(".idea:visible").count() == sections.count()
    assert page.locator(".step, .formula-row").count() == 0
    weights = cached_look("transformer").maps["encoder.0.attention"].weights
    head = int(hash_of(page)["at"].split(":")[1])
    tokens = cached_look("transformer").maps["encoder.0.attention"].columns
    label = page.locator(".idea-lines").get_attribute("aria-label")
    assert label.endswith(f"attends most to {tokens[weights[head][2].argmax()]}.")
    page.get_by_role("tab", name="Formula").focus()
    page.keyboard.press("Enter")
    row = page.locator('.formula-row[data-op="softmax"]')
    assert row.locator(".formula").text_content() == "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)"
    shape = " × ".join(map(str, weights.shape))
    assert row.locator(".shape").text_content() == f"a {shape} (heads × source × source)"
    assert page.locator(".idea:visible").count() == 1
    page.keyboard.press("ArrowRight")
    assert hash_of(page)["depth"] == "numbers"
    assert page.locator(".step .cell").count() > 8
    # Another page of the same browser opens at the same depth.
    page.evaluate("history.replaceState(null, '', location.pathname)")
    page.reload()
    page.get_by_role("tab", name="Step by step").click()
    assert page.locator(".step .cell").count() > 8


def test_small_screen_scrolls_only_vertically(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers", viewport={"width": 380, "height": 700})
    page.wait_for_selector(DONE)
    right = (
        "Math.max(...[...document.querySelectorAll('.steps-view *')].map((one) => one.getBoundingClientRect().right))"
    )
    assert page.evaluate(right) <= 380


def test_page_without_a_trace_says_how_to_include_one(opened):
    page = opened(build_scene(cached_look("transformer"), trace=False), "#view=steps&depth=numbers")
    assert "regard look MODEL TEXT --trace" in page.locator(".missing-steps").text_content()


def test_substitute_for_a_layer_without_numbers_is_named(opened):
    scene = build_scene(cached_look("transformer"))
    for section in scene.header["trace"]["sections"]:
        if section.get("attention") == "encoder.0.attention":
            del section["attention"]
    page = opened(scene, "#view=steps&depth=numbers&at=encoder.0.attention:1")
    note = page.locator(".steps-view [role=note]").first
    assert note.text_content().startswith("This page has no numbers of encoder.0.attention")
    # A table of which the page has some rows has its full size.
    page.locator(".sections summary").first.click()
    page.locator(".sections details").first.locator(".param").first.wait_for()
    params = " ".join(page.locator(".step .param").all_text_contents())
    vocab, width = cached_look("transformer").pipeline.model.config.source_vocab, 16
    assert f"{vocab}×{width}" in params
    assert "rows in this page" in params
