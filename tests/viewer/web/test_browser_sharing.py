"""Sharing a page: embedding in a frame, lecture mode, animations, and what the first screen says without scrolling."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from regard.data import Tokenizer
from regard.models import BertConfig, GPTConfig, make_model
from regard.pipelines import TextEncoder, TextGenerator
from regard.viewer import compare, look
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.text_scene import build_scene
from tests.viewer.browser import HEAD, QUIET, axe_violations, hash_of
from tests.viewer.helpers import weights
from tests.viewer.image_models import cached_look as image_look

SENTENCE = "one two three"


def save_menu(page, name):
    page.locator(".tools .menu summary").click()
    page.get_by_role("button", name=name).click()


def test_embed_code_restores_the_view(opened, browser, small, tmp_path):
    page = opened(small, HEAD + "&as=lines")
    page.locator('.thumb[data-head="decoder.0.cross:1"]').click()
    page.locator(".figure").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    save_menu(page, "Embed")
    code = page.get_by_label("HTML code").input_value()
    assert code.startswith('<iframe src="0.html#at=decoder.0.cross:1&amp;as=lines&amp;pin=2,')
    assert 'title="' in code
    page.get_by_role("button", name="Close").locator("visible=true").click()
    (tmp_path / "host.html").write_text(f"<!doctype html><title>Host</title><p>Lesson</p>{code}")
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    host = context.new_page()
    host.goto((tmp_path / "host.html").as_uri())
    frame = host.frame_locator("iframe")
    frame.locator(QUIET).wait_for()
    assert frame.locator("select.attention").first.input_value() == "decoder.0.cross"
    assert frame.locator("select.head").first.input_value() == "1"
    assert frame.locator(".reading .subject").text_content() == "a"  # the third token of the translation
    assert frame.locator(".tokens text.on").first.text_content() == "a"
    context.close()


def test_lecture_mode_shows_one_thing_at_a_time(opened, transformer):
    seen = look(transformer, SENTENCE)
    scene = build_scene(seen)
    page = opened(scene, viewport={"width": 1280, "height": 720})
    page.locator(".figure").focus()
    page.keyboard.press("s")
    dialog = page.get_by_role("dialog", name="The input")
    assert dialog.locator(".slide-text").text_content() == SENTENCE
    titles = []
    for key in ("ArrowRight", "PageDown", "ArrowRight", "ArrowRight"):
        titles.append(page.locator(".lecture h2").text_content())
        page.keyboard.press(key)
    assert titles[1] == "The output"
    assert hash_of(page)["slide"] == "4"
    assert page.locator(".slide-count").text_content() == "5 / 5"
    # The arithmetic gives the weights of the head.
    name, head = hash_of(page)["at"].split(":")
    table = [row.split("\t") for row in page.locator(".score-table").inner_text().splitlines()]
    title = re.search("“(.*)”", titles[3])[1]
    rows = [weights(scene, name)[int(head)][i] for i, token in enumerate(seen.maps[name].rows) if token == title]
    shown = [float(one[3]) for one in table[1:-1]]
    assert any(shown == pytest.approx(row, abs=6e-4) for row in rows)
    # The type is large, black on white, and nothing is cut off.
    font = "parseFloat(getComputedStyle(document.querySelector('.score-table')).fontSize)"
    assert page.evaluate(font) >= 24
    assert page.evaluate("document.querySelector('.lecture').scrollHeight") <= 720
    page.keyboard.press("ArrowLeft")
    assert page.locator(".lecture path.strand").count() > 0
    link = page.evaluate("location.hash")
    page.keyboard.press("Escape")
    assert page.locator(".lecture").count() == 0
    assert "slide" not in hash_of(page)
    # A link opens at the slide; the buttons and the key S work too; dark pages are white on black.
    again = opened(scene, link, viewport={"width": 390, "height": 844}, color_scheme="dark")
    assert again.locator(".slide-count").text_content() == "4 / 5"
    again.get_by_role("button", name="Previous slide").click()
    assert again.locator(".slide-count").text_content() == "3 / 5"
    colors = again.locator(".lecture").evaluate("x => [getComputedStyle(x).color, getComputedStyle(x).backgroundColor]")
    assert colors == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert axe_violations(again) == []
    again.keyboard.press("s")
    assert again.locator(".lecture").count() == 0
    again.get_by_role("button", name="Lecture mode").click()
    assert again.locator(".slide-count").text_content() == "1 / 5"


def test_compared_looks_are_saved_as_an_animation(opened, transformer):
    looks = [look(transformer, SENTENCE, "trois deux un"), look(transformer, "three two one", "un deux trois")]
    page = opened(compare(looks[0], looks[1], looks[0]).scene(), "#at=decoder.0.cross:0&as=map")
    before = page.evaluate("location.hash")
    page.locator(".tools .menu summary").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Animation as GIF").click()
    image = Image.open(io.BytesIO(download.value.path().read_bytes()))
    assert (image.format, image.n_frames, image.info["loop"]) == ("GIF", 3, 0)
    frames = []
    for i in range(3):
        image.seek(i)
        frames.append(np.asarray(image.convert("RGB"), int))
        assert image.info["duration"] == (2500 if i == 2 else 700)
    # Each frame is the figure of its look: the same as on the screen, up to the palette.
    page.wait_for_selector(QUIET)
    page.evaluate(f"location.hash = '{before}'")
    box = page.locator(".card").bounding_box()
    assert image.size == (np.ceil(box["width"] + 48), np.ceil(box["height"] + 48))
    assert np.abs(frames[0] - frames[1]).max() > 60
    screen = Image.open(io.BytesIO(page.locator(".card").screenshot())).convert("RGB")
    found = frames[2][24 : 24 + screen.height, 24 : 24 + screen.width]
    difference = np.abs(found - np.asarray(screen, int)[: found.shape[0], : found.shape[1]]).max(-1)
    assert (difference > 60).mean() < 0.05


@pytest.fixture(scope="module")
def first_screens(transformer):
    """The scene of each kind of model, with a part of its output and the names of attended tokens."""
    tokenizer = Tokenizer.train([SENTENCE], "word", mask=True)
    sizes = dict(width=16, heads=2, layers=2, feedforward=16, vocab=tokenizer.vocab_size)
    generator = TextGenerator(make_model(GPTConfig(**sizes)).eval(), tokenizer)
    encoder = TextEncoder(make_model(BertConfig(**sizes)).eval(), tokenizer)
    return {
        "translator": build_scene(look(transformer, SENTENCE)),
        "language model": build_scene(look(generator, SENTENCE)),
        "masked word": build_scene(look(encoder, "one <mask> three")),
        "image": build_image_scene(image_look("class")),
    }


@pytest.mark.parametrize("size", [(1280, 860), (390, 844)])
def test_first_screen_says_what_the_model_output_and_what_it_attended_to(opened, first_screens, size):
    """Without scrolling or clicking: the output, its probability, and the tokens with the most attention."""
    for kind, scene in first_screens.items():
        page = opened(scene, viewport={"width": size[0], "height": size[1]})
        summary = page.locator(".headline")
        text = summary.text_content()
        box = summary.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= size[1], kind
        assert box["x"] + box["width"] <= size[0], kind
        assert re.search(r"[\d.]+%", text), kind
        assert re.search(r"attention goes|attends most to", text), kind
        assert len(text) < 220, kind
        if kind == "image":
            assert scene.header["image"]["labels"][0]["name"] in text
            continue
        named = set(summary.locator("q").all_text_contents())
        assert named
        assert named <= {token.strip() for side in scene.header["sides"].values() for token in side["tokens"]}
        # The output itself is above the fold too, and on a desktop the first row of every group of heads.
        output = page.locator(".output-token, .prediction .ranks li").first.bounding_box()
        assert output["y"] + output["height"] <= size[1]
        if size[0] == 1280:
            for grid in page.locator(".overview .grid").all():
                first = grid.locator(".thumb").first.bounding_box()
                assert first["y"] + first["height"] <= size[1], kind
