"""The first screen: the output with its alternatives, attention as lines, heads labeled by what they do."""

import numpy as np
import pytest

from regard.data import Tokenizer
from regard.models import BertConfig, GPTConfig, make_model
from regard.pipelines import TextEncoder, TextGenerator
from regard.viewer import look
from regard.viewer.page.text_scene import build_scene
from tests.viewer import scenes
from tests.viewer.browser import QUIET, hash_of

SENTENCE = "one two three"


def bars(page):
    names = page.locator(".prediction .name").all_text_contents()
    return dict(zip(names, page.locator(".prediction .weight").all_text_contents(), strict=True))


def test_output_tokens_show_their_alternatives(opened, transformer):
    seen = look(transformer, SENTENCE)
    scene = build_scene(seen)
    page = opened(scene)
    tokens = page.locator(".output-token")
    assert tokens.count() == len(scene.header["output"]["steps"])
    # The least certain token is selected at first; pointing at another one, or focusing it, shows its alternatives.
    steps = scene.header["output"]["steps"]
    assert page.locator(".prediction q").text_content() == min(steps[:-1], key=lambda one: one["probability"])["token"]
    tokens.nth(1).hover()
    assert page.locator(".prediction q").text_content() == steps[1]["token"]
    assert list(bars(page))[:5] == [name for name, _ in steps[1]["likeliest"]]
    # The lines of this token are highlighted.
    assert page.locator(".reading .subject").text_content() == steps[1]["token"]
    tokens.nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".prediction q").text_content() == steps[0]["token"]
    # The head is turned off in the experiment.
    head = page.locator(".panel select.head").first.input_value()
    page.get_by_role("button", name="Turn this head off").click()
    assert "This head is off" in page.locator(".off-note").text_content()
    assert page.get_by_label("Head", exact=True).locator("visible=true").input_value() == head
    assert page.get_by_role("button", name="This head").get_attribute("aria-pressed") == "false"
    assert "No weight" not in page.locator(".results").text_content()
    # The arithmetic opens at the token and layer on display.
    page.get_by_role("tab", name="Attention").click()
    page.get_by_role("button", name="Encoder 1").click()
    page.wait_for_selector(QUIET)
    attention = page.locator(".panel select.attention").first.input_value()
    page.locator(".figure.lines").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Show the arithmetic").click()
    page.wait_for_selector(QUIET)
    assert attention.startswith("encoder.0")
    assert page.get_by_label("Attention").locator("visible=true").input_value() == attention
    row = int(hash_of(page)["pin"].split(",")[0])
    chosen = page.locator('.chip-token[data-side="source"][aria-checked="true"]')
    assert chosen.get_attribute("data-token") == str(row)
    # A row of the decoder has the name that it has in the cross-attention.
    page.get_by_label("Attention").locator("visible=true").select_option("decoder.0.cross")
    chips = page.locator('.chip-token[data-side="target"]').all_text_contents()
    assert chips[0] == f"<sos> → {seen.maps['decoder.0.cross'].rows[0]}"


def test_next_token_of_a_language_model_has_a_temperature(opened):
    tokenizer = Tokenizer.train([SENTENCE], "word")
    model = make_model(GPTConfig(width=16, heads=2, layers=2, feedforward=16, vocab=tokenizer.vocab_size)).eval()
    generator = TextGenerator(model, tokenizer)
    page = opened(build_scene(look(generator, SENTENCE)))
    probabilities = model(generator.pack([generator.encode_prompt(SENTENCE)]))[-1].softmax(-1).detach().numpy()
    assert page.locator(".prediction h2").text_content() == "Next token"
    first = next(iter(bars(page).values()))
    assert float(first.rstrip("%")) == pytest.approx(100 * probabilities.max(), abs=0.06)
    page.get_by_label("Temperature").fill("0.1")
    sharper = np.exp(10 * np.log(probabilities)) / np.exp(10 * np.log(probabilities)).sum()
    assert float(next(iter(bars(page).values())).rstrip("%")) == pytest.approx(100 * sharper.max(), abs=0.06)


@pytest.mark.parametrize("width", [1440, 390])
def test_twelve_layers_of_twelve_heads_fit(opened, width):
    tokenizer = Tokenizer.train([SENTENCE], "word", mask=True)
    config = BertConfig(width=24, heads=12, layers=12, feedforward=8, vocab=tokenizer.vocab_size)
    scene = build_scene(look(TextEncoder(make_model(config).eval(), tokenizer), "one <mask> three"), trace=False)
    page = opened(scene, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    grid = page.locator(".overview .grid").bounding_box()
    last = page.locator(".thumb").last.bounding_box()
    assert last["x"] + last["width"] <= min(width, grid["x"] + grid["width"])
    assert last["width"] >= 18
    assert page.locator(".thumb[data-label]").count() == 144
    # The heads follow the figure, before the details.
    assert page.locator(".overview").bounding_box()["y"] < page.locator(".reading").bounding_box()["y"] + 1
    assert page.locator(".prediction q").text_content() == "<mask>"


def test_map_keeps_its_labels_and_fills_the_figure(opened):
    words = [f"w{i}" for i in range(62)]
    page = opened(scenes.translation(words, words, 1, 1), "#at=decoder.0.cross:0&as=map")
    labels = page.locator(".axes text").all_text_contents()
    assert {"w0", "w61"} <= set(labels)
    page = opened(scenes.translation(["x" * 500, "b", "قرأ"], ["Le", "y" * 500], 1, 1), "#as=map")
    figure, cells = page.locator(".figure").bounding_box(), page.locator("rect.square")
    right = max(cells.evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)"))
    assert right - figure["x"] > 0.6 * figure["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1360
    page.locator(".figure").press("l")
    assert page.evaluate("document.activeElement.className") == "figure lines"
    page.locator(".thumb").first.click()
    assert page.evaluate("document.activeElement.className") == "thumb"
