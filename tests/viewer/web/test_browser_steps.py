"""The step-by-step view in a browser: every number is recomputed and has a derivation."""

import copy
import re

import pytest
import torch

from regard.layers.packed import pack
from regard.viewer.page.text_scene import Scene, build_scene
from tests.viewer.browser import QUIET, announced, axe_violations, hash_of
from tests.viewer.text_models import cached_look

DONE = ".steps-view .verdict[data-agrees]"
HOSTILE = "<img src=x onerror=alert(1)>"


def open_list(page):
    """Open the list of all steps, and in it the section of the attention on display."""
    page.wait_for_selector(DONE, state="attached")
    page.evaluate("""() => {
        document.querySelector('.all-steps').open = true;
        const name = document.querySelector('.choice select[aria-label=Attention]')?.selectedOptions[0].textContent;
        for (const one of document.querySelectorAll('.sections > li:not([hidden])'))
            if (one.querySelector('h2').textContent.startsWith(name)) one.querySelector('details').open = true;
    }""")
    page.wait_for_selector(".sections details[open] .cards > *")


def scene_for(form: str) -> Scene:
    return build_scene(cached_look(form), trace=True)


def test_steps_view_opens_at_the_clearest_token_and_all_steps_agree(opened):
    scene = scene_for("rotary, grouped")
    page = opened(scene, "#depth=numbers")
    page.get_by_role("tab", name="Step by step").click()
    open_list(page)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    steps = [step for step in scene.header["trace"]["steps"] if step["title"]]
    assert f"All {len(steps)} steps" in page.locator(".verdict").text_content()
    assert page.locator(".sections .section-mark[data-agrees=no]").count() == 0
    # The longest word, in the first attention.
    chosen = page.locator("[data-side=source][aria-checked=true]")
    assert chosen.text_content() == "three"
    assert page.get_by_label("Attention").locator("visible=true").input_value() == "encoder.0.attention"
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
    open_list(page)
    assert page.locator(".verdict").get_attribute("data-agrees") == "no"
    assert page.locator(".sections .section-mark[data-agrees=no]").count() > 0


def test_tokens_layers_and_heads_are_selected_with_keys(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers&at=decoder.0.cross:1&pin=1,2")
    open_list(page)
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
    assert "Head 3" in announced(page)
    page.keyboard.press("}")
    assert hash_of(page)["at"] == "decoder.1.attention:2"
    page.get_by_label("Attention").select_option("encoder.0.attention")
    page.locator(".sections li", has_text="Encoder, layer 1: self-attention").locator("summary").click()
    assert page.locator(".sections details[open] .step").count() > 8


def test_number_shows_its_derivation(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers&at=decoder.0.cross:0")
    open_list(page)
    card = page.locator(".sections details[open] .step", has=page.locator(".formula", has_text="q = n WQ"))
    # Of the queries of all heads, those of the chosen one.
    assert card.locator(".cell").count() == 4
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
    page.keyboard.press("ArrowLeft")
    assert making.text_content().startswith("q[2] = ")


@pytest.mark.parametrize("form", ["bahdanau lstm of two layers", "luong lstm of two layers", "T5", "albert", "answer"])
def test_every_section_of_every_family_opens(opened, form):
    scene = scene_for(form)
    page = opened(scene, "#view=steps&depth=numbers")
    open_list(page)
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
    open_list(page)
    assert page.locator("img").count() == 0
    assert page.locator("[data-side=source]").nth(1).text_content() == HOSTILE


def test_axe_finds_no_violations(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers", reduced_motion="reduce")
    open_list(page)
    for depth in ("Numbers", "Formula", "Idea"):
        page.get_by_role("tab", name=depth).click()
        assert axe_violations(page) == []


def test_three_depths(opened):
    """The chosen number has a sentence, the equations or its sum of products; the choice is remembered."""
    page = opened(scene_for("transformer"))
    page.get_by_role("button", name="Encoder 1").click()
    page.wait_for_selector(QUIET)
    page.locator(".figure.lines").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Step by step").click()
    page.wait_for_selector(QUIET)
    # The attention and the token on display before, without a pin; the list of all steps is closed.
    assert page.get_by_label("Attention").locator("visible=true").input_value() == "encoder.0.attention"
    assert page.locator("[data-side=source][aria-checked=true]").get_attribute("data-token") == "2"
    assert page.evaluate("scrollY") == 0
    assert page.locator(".sections h2:visible").count() == 0
    assert page.locator(".product:visible").count() == 5  # four products and their sum
    page.get_by_role("tab", name="Formula").focus()
    page.keyboard.press("Enter")
    assert "exp(ets) / Σ exp(eti)" in page.locator(".walk-detail").text_content()
    assert page.locator(".product").count() == 0
    page.keyboard.press("ArrowLeft")
    assert hash_of(page)["depth"] == "idea"
    assert "the sum of the products is their score" in page.locator(".walk-detail").text_content()
    # Another page of the same browser opens at the same depth.
    page.evaluate("history.replaceState(null, '', location.pathname)")
    page.reload()
    page.get_by_role("tab", name="Step by step").click()
    assert "the sum of the products is their score" in page.locator(".walk-detail").text_content()


def amounts(text):
    """The decimal numbers of a text."""
    return [float(one.replace("−", "-")) for one in re.findall(r"−?\d+\.\d+", text)]


def test_a_reader_finds_the_whole_score_in_six_actions(opened):
    """Which vectors make a score, its value, √d_k, the weight, and what the head gives to the token."""
    seen = cached_look("transformer")
    model = seen.pipeline.model
    page = opened(scene_for("transformer"), viewport={"width": 1280, "height": 800})
    page.get_by_role("tab", name="Step by step").click()  # action 1
    page.wait_for_selector(QUIET)
    assert page.evaluate("scrollY") == 0
    head = int(hash_of(page)["at"].split(":")[1])
    tokens = seen.maps["encoder.0.attention"].rows
    t, s = tokens.index("three"), tokens.index("two")
    # The same numbers, from the weights of the model.
    inputs = {}
    attention = model.encoder[0].attention
    hook = attention.register_forward_hook(lambda module, args, out: inputs.update(n=args[0]))
    with torch.no_grad():
        model(*[pack([ids]) for ids in seen.ids])
        hook.remove()
        n = inputs["n"]
        own = slice(4 * head, 4 * head + 4)
        q = attention.query(n)[:, own]
        k, v = (one[:, own] for one in attention.key_value(n).chunk(2, dim=-1))
    scores = (q @ k.T)[t]
    weights = (scores / 2).softmax(-1)
    page.locator(f'.walk-cell[data-kind="e"][data-row="{s}"]').click()  # action 2
    detail = page.locator(".walk-detail")
    box = detail.bounding_box()
    assert box["y"] + box["height"] <= 800
    equation = detail.locator(".equation").text_content()
    assert equation.startswith("qthree · ktwo = ")
    assert "÷ √dk = √4 = 2" in equation
    product, scaled, weight = amounts(equation)
    assert product == pytest.approx(float(scores[s]), abs=0.0051)
    assert scaled == pytest.approx(float(scores[s] / 2), abs=0.0051)
    assert weight == pytest.approx(float(weights[s]), abs=0.00051)
    assert weight == pytest.approx(float(seen.maps["encoder.0.attention"].weights[head, t, s]), abs=0.00051)
    for one, a, b in zip(detail.locator(".product:not(.total)").all_text_contents(), q[t], k[s], strict=True):
        assert amounts(one) == pytest.approx([float(a), float(b), float(a * b)], abs=0.0051)
    # Its sources are marked and connected with it.
    assert page.locator(".walk-cell.source").count() == page.locator(".walk-arrows path").count() == 2
    page.locator('.walk-cell[data-kind="z"]').click()  # action 3
    i = int(re.match(r"Number (\d+)", detail.locator(".equation").text_content())[1]) - 1
    assert amounts(detail.locator(".total").text_content()) == pytest.approx([float(weights @ v[:, i])], abs=0.0051)
    # Keys: arrows move, Enter opens.
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.locator(".walk-cell[aria-selected=true]").get_attribute("data-row") == str(len(tokens) - 1)
    # A symbol lights the cells that it stands for.
    page.locator('.heading .symbol[data-kind="k"]').first.focus()
    assert page.locator(".walk").get_attribute("data-lit") == "k"


def test_playing_shows_one_phase_after_the_other(opened):
    page = opened(scene_for("transformer"), "#view=steps", reduced_motion="reduce")
    page.locator(".walk").wait_for()
    hidden = page.locator('.walk-cell.later[data-kind="a"]')
    assert hidden.count() == 0
    page.get_by_role("button", name="Next phase").click()
    assert hidden.count() > 0
    assert "asks with its query, 4 numbers" in page.locator(".walk-caption").text_content()
    for _ in range(4):
        page.get_by_role("button", name="Next phase").click()
    assert hidden.count() == 0
    assert "Softmax" in page.locator(".walk-caption").text_content()
    assert page.locator('.walk-cell.later[data-kind="v"]').count() > 0


def test_small_screen_scrolls_only_vertically(opened):
    page = opened(scene_for("transformer"), "#view=steps&depth=numbers", viewport={"width": 380, "height": 700})
    open_list(page)
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
    open_list(page)
    note = page.locator(".steps-view [role=note]").first
    assert note.text_content().startswith("This page has no numbers of encoder.0.attention")
    # A table of which the page has some rows has its full size.
    page.locator(".sections summary").first.click()
    page.locator(".sections details").first.locator(".param").first.wait_for()
    params = " ".join(page.locator(".step .param").all_text_contents())
    vocab, width = cached_look("transformer").pipeline.model.config.source_vocab, 16
    assert f"{vocab}×{width}" in params
    assert "rows in this page" in params
