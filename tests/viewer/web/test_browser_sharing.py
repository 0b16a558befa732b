"""Sharing a page: embedding in a frame, and what the first screen says without scrolling."""

import re

import pytest

from regard.data import Tokenizer
from regard.models import BertConfig, GPTConfig, make_model
from regard.pipelines import TextEncoder, TextGenerator
from regard.viewer import look
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.text_scene import build_scene
from tests.viewer.browser import HEAD, QUIET
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
        assert re.search(r"attention goes|attends most to|attention is almost uniform", text), kind
        assert len(text) < 220, kind
        if kind == "image":
            assert scene.header["image"]["labels"][0]["name"] in text
            continue
        named = set(summary.locator("q").all_text_contents())
        assert named or "uniform" in text
        assert named <= {token.strip() for side in scene.header["sides"].values() for token in side["tokens"]}
        # The output itself is above the fold too, and on a desktop the first row of every group of heads.
        output = page.locator(".output-token, .prediction .ranks li").first.bounding_box()
        assert output["y"] + output["height"] <= size[1]
        if size[0] == 1280:
            for grid in page.locator(".overview .grid").all():
                first = grid.locator(".thumb").first.bounding_box()
                assert first["y"] + first["height"] <= size[1], kind
