"""Saved pages: self-contained, without requests, and with all texts escaped."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from regard.attention import Recorded, ScaledDot
from regard.attention.backends.call import Call
from regard.attention.masks import NO_MASK
from regard.errors import RegardError
from regard.viewer import AttentionMap, Look, look, web
from regard.viewer.page import html as html_page
from regard.viewer.page.text_scene import Scene, build_scene
from regard.viewer.token_axis import TokenAxis

MODULE = 'function openPage() { document.title = "é"; }\nexport default { render: openPage };\n'
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "</title><b>",
    "&lt;i&gt; &amp;",
    "\"'`${7}",
    "line\u2028and\u2029paragraph",
    "\u202eright to left\u200f\u2066",
    "nul \0 and \r\n bell \x07",
    "unpaired surrogate \ud800",
    "]]>",
    "\\u003cb>",
    "🐈‍⬛ שלום",
]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """Replace the JavaScript module, which has its own tests."""
    monkeypatch.setattr(html_page, "module", lambda with_engine: MODULE)


class Elements(HTMLParser):
    """Every element with its attributes and its direct text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict, str]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))
        if tag != "meta":
            self.open.append(len(self.found) - 1)

    def handle_endtag(self, tag):
        assert self.found[self.open.pop()][0] == tag

    def handle_data(self, data):
        if self.open:
            tag, attributes, text = self.found[self.open[-1]]
            self.found[self.open[-1]] = tag, attributes, text + data

    def handle_comment(self, data):
        raise AssertionError(data)

    def named(self, tag: str) -> list[tuple[dict, str]]:
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def scene_with(texts: list[str]) -> Scene:
    """A scene in which every string is one of these texts."""
    q = torch.randn(1, 1, len(texts), 4)
    side = TokenAxis(texts[0], texts, [0] * len(texts))
    recorded = Recorded(texts[1], "self", calls=[Call(q, q, q, ScaledDot(), NO_MASK)])
    shown = AttentionMap(texts[1], "self", side, side, recorded)
    whole = " ".join(texts)
    return build_scene(Look(whole, texts[2], texts, texts, {texts[1]: shown}, family=texts[3], name=texts[4]))


def test_page_contains_header_blobs_and_module(transformer, tmp_path):
    seen = look(transformer, "one two three", "trois deux un")
    seen.save(tmp_path / "page.html", "decoder.0.cross", 1, with_model=False)
    made = build_scene(seen, "decoder.0.cross", 1, explain=None)
    content = (tmp_path / "page.html").read_bytes()
    assert content == html_page.render_page(made)
    elements = Elements(content.decode())
    header, *blobs, (module, script) = elements.named("script")
    assert header[0] == {"type": "application/json", "id": "scene"}
    assert json.loads(header[1]) == made.header
    assert [one for one, _ in blobs] == [{"type": "text/plain", "id": f"blob-{n}"} for n in range(len(made.blobs))]
    assert [base64.b64decode(text, validate=True) for _, text in blobs] == made.blobs
    assert module == {"type": "module"}
    assert script == f"{MODULE}\nif (globalThis.document) openPage();\n"
    assert elements.named("html")[0][0] == {"lang": "en"}
    assert elements.named("title")[0][1] == "one two three  →  trois deux un"
    assert elements.named("main")[0][0] == {"id": "regard"}


def test_page_fetches_nothing_and_runs_only_its_own_script(transformer):
    text = html_page.render_page(build_scene(look(transformer, "one", "un"))).decode()
    elements = Elements(text)
    named = {name for _, attributes, _ in elements.found for name in attributes}
    assert not named & {"src", "href", "style", "srcset"}
    assert not any(name.startswith("on") for name in named)
    (policy,) = (one["content"] for one, _ in elements.named("meta") if "http-equiv" in one)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    script = elements.named("script")[-1][1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}' 'wasm-unsafe-eval'"
    assert [rules[one] for one in ("default-src", "connect-src", "base-uri", "form-action")] == ["'none'"] * 4
    # The policy must precede what it applies to.
    assert text.index("Content-Security-Policy") < text.index("<title>") < text.index("<script")


def test_hostile_texts_are_escaped():
    made = scene_with(HOSTILE)
    content = html_page.render_page(made)
    elements = Elements(content.decode())
    count = {
        "html": 1,
        "head": 1,
        "meta": 5,
        "title": 1,
        "body": 1,
        "main": 1,
        "noscript": 1,
        "script": 2 + len(made.blobs),
    }
    tags = [tag for tag, _, _ in elements.found]
    assert {tag: tags.count(tag) for tag in tags} == count
    header_text = elements.named("script")[0][1]
    assert json.loads(header_text) == made.header
    assert json.loads(header_text)["sides"][HOSTILE[0]]["tokens"] == HOSTILE
    assert header_text.isascii()
    assert header_text.isprintable()
    assert not re.search("[<>&]", header_text)


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_is_a_valid_title(text):
    """Control characters and unpaired surrogates, invalid in HTML, become spaces."""
    made = scene_with(HOSTILE)
    made.header["title"] = text
    (title,) = (text for _, text in Elements(html_page.render_page(made).decode()).named("title"))
    assert len(title) == len(text)
    assert all(shown in (char, " ") for shown, char in zip(title, text))
    assert title.isprintable() or any(char in title for char in "\u202e\u200f\u2066\u200d")


@pytest.mark.parametrize("unfit", ["</script>", "</SCRIPT", "<!-- x", "a\r\nb", "\0"])
def test_module_that_would_end_its_element_is_refused(monkeypatch, unfit):
    monkeypatch.setattr(html_page, "module", lambda with_engine: f"/* {unfit} */")
    with pytest.raises(ValueError, match="script element"):
        html_page.render_page(scene_with(HOSTILE))


def big_look(layers: int, heads: int, width: int, length: int) -> Look:
    """A look at an encoder-decoder: layers per stack, tokens per text."""
    drawn = torch.randn(2, 1, heads, length, width // heads)
    tokens = [f"token{i}" for i in range(length)]
    side, maps = TokenAxis("source", tokens, list(range(length))), {}
    names = [f"encoder.{i}.attention" for i in range(layers)]
    names += [f"decoder.{i}.{part}" for i in range(layers) for part in ("attention", "cross")]
    for number, name in enumerate(names):
        q, k = drawn.roll(number, dims=-1)
        recorded = Recorded(name, "self", calls=[Call(q, k, k, ScaledDot(), NO_MASK)])
        maps[name] = AttentionMap(name, "self", side, side, recorded)
    text = " ".join(tokens)
    return Look(text, text, tokens, tokens, maps)


def test_real_module_fits_into_a_page(monkeypatch, transformer):
    monkeypatch.setattr(html_page, "module", web.module)
    elements = Elements(html_page.render_page(build_scene(look(transformer, "one", "un"))).decode())
    script = elements.named("script")[-1][1]
    assert script == f"{web.module()}\nif (globalThis.document) openPage();\n"
    assert "function openPage()" in script


def test_page_of_a_base_model_on_512_tokens_is_under_30_megabytes():
    made = build_scene(big_look(layers=6, heads=8, width=512, length=512), "decoder.0.cross")
    assert len(made.header["attentions"]) == 18
    assert {one["q"]["type"] for one in made.header["attentions"]} == {"uint16"}
    assert len(html_page.render_page(made)) < 26e6  # leaves 4 MB for the module


def test_page_size_grows_linearly_with_the_length():
    sizes = [
        sum(map(len, build_scene(big_look(1, 2, 32, length), "encoder.0.attention").blobs)) for length in (500, 1000)
    ]
    assert sizes[1] == 2 * sizes[0]


def test_too_large_pages_raise_an_error(monkeypatch, transformer, tmp_path):
    seen = look(transformer, "one two three", "trois deux un")
    monkeypatch.setattr(html_page, "MAX_BYTES", 1000)
    with pytest.raises(RegardError, match=r"more than most browsers can open\. Select fewer attentions"):
        seen.save(tmp_path / "page.html", with_model=False)
    assert not list(tmp_path.iterdir())


def test_initial_view_is_checked_and_saved(transformer, tmp_path):
    seen = look(transformer, "one", "un")
    for choice, message in [(("decoder.9.cross",), "no attention 'decoder.9.cross'"), ((None, 7), "has no head 7")]:
        with pytest.raises(RegardError, match=message):
            seen.save(tmp_path / "page.html", *choice, with_model=False)
    seen.save(tmp_path / "page.HTML", "all", with_model=False)
    header_text = Elements((tmp_path / "page.HTML").read_text(encoding="utf-8")).named("script")[0][1]
    assert json.loads(header_text)["initial"] == {"attention": None, "head": None, "all": True}


def test_equal_looks_give_equal_pages(transformer):
    first, second = (html_page.render_page(build_scene(look(transformer, "one two", "deux un"))) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("text", ['const a = "</Script>";', "// <!--"])
def test_module_with_a_closing_tag_is_refused(monkeypatch, text):
    monkeypatch.setattr(html_page, "module", lambda with_engine: text)
    with pytest.raises(ValueError, match="end its script element"):
        html_page.render_page(Scene({"title": ""}, []))
