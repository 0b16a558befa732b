"""Several heads in one figure: selection, colors, legend, links and saved figures."""

import re

import numpy as np
import pytest

from regard.viewer import web
from tests.viewer.browser import HEAD, announced, axe_violations, hash_of, point_at
from tests.viewer.helpers import weights

CROSS_2 = '.thumb[data-head="decoder.1.cross:2"]'
CROSS_3 = '.thumb[data-head="decoder.1.cross:3"]'
EARLIER = '.thumb[data-head="decoder.0.cross:1"]'


def chips(page):
    return [text.rstrip("×") for text in page.locator(".head-chip").all_text_contents()]


def colors(page, selector):
    return page.locator(selector).evaluate_all("all => all.map((one) => getComputedStyle(one).stroke)")


def test_heads_are_added_in_colors(opened, small):
    page = opened(small, HEAD + "&as=lines")
    alone = page.locator("path.thread").count()
    page.locator(CROSS_3).click(modifiers=["Shift"])
    page.locator(EARLIER).click(modifiers=["Control"])
    assert chips(page) == ["layer 2, head 3", "layer 2, head 4", "layer 1, head 2"]
    # Each head has the lines of its weights, in its own color, which is also the frame of its thumbnail.
    for color, (name, head) in enumerate((("decoder.1.cross", 2), ("decoder.1.cross", 3), ("decoder.0.cross", 1))):
        expected = weights(small, name)[head]
        assert page.locator(f'path.thread[data-color="{color}"]').count() == (expected >= 1.2 / 10).sum()
    assert page.locator('path.thread[data-color="0"]').count() == alone
    assert len({colors(page, f'path.thread[data-color="{i}"]')[0] for i in range(3)}) == 3
    marked = page.locator(".thumb[aria-selected=true]").evaluate_all("all => all.map((one) => one.dataset.head)")
    assert set(marked) == {"decoder.1.cross:2", "decoder.1.cross:3", "decoder.0.cross:1"}
    # Pointing at a token shows and reads all heads.
    point_at(page, page.locator(".tokens text.label").nth(7))
    strands = page.locator("path.strand")
    assert set(strands.evaluate_all("all => all.map((one) => one.dataset.color)")) == {"0", "1", "2"}
    assert page.locator(".reading .head-name").all_text_contents() == chips(page)
    # A link restores the heads; removing the first one leaves the others.
    again = opened(small, page.evaluate("location.hash"))
    assert chips(again) == chips(page)
    again.get_by_role("button", name="Remove layer 2, head 3").click()
    assert chips(again) == ["layer 2, head 4", "layer 1, head 2"]
    assert hash_of(again)["at"] == "decoder.1.cross:3"
    # In the text form, tokens are underlined once per head.
    again.get_by_role("tab", name="Text").click()
    again.locator('.token[data-row="7"]').hover()
    expected = [weights(small, name)[head][7] for name, head in (("decoder.1.cross", 3), ("decoder.0.cross", 1))]
    for color, row in enumerate(expected):
        assert again.locator(f'.stripe[data-color="{color}"]').count() == (row >= 0.02).sum()
    # A plain click selects one head again.
    again.locator(CROSS_2).click()
    assert chips(again) == []


def test_heads_are_added_by_keyboard_and_button(opened, small):
    page = opened(small, HEAD + "&as=lines")
    page.get_by_role("button", name="+ Add a head").click()
    assert chips(page) == ["layer 2, head 3", "layer 2, head 4"]
    page.locator(CROSS_2).focus()
    page.keyboard.press("ArrowLeft")  # while several heads are selected, arrow keys move the focus alone
    assert chips(page) == ["layer 2, head 3", "layer 2, head 4"]
    page.keyboard.press("Space")
    assert announced(page) == "Added layer 2, head 2. 3 heads."
    page.keyboard.press("Space")
    assert chips(page) == ["layer 2, head 3", "layer 2, head 4"]
    page.keyboard.press("Enter")
    assert hash_of(page)["at"] == "decoder.1.cross:1"
    assert chips(page) == []
    # Heads with other tokens open in a second figure; a figure has at most six heads.
    page.locator('.thumb[data-head="encoder.0.attention:0"]').click(modifiers=["Shift"])
    assert hash_of(page)["with"] == "encoder.0.attention:0"
    page.get_by_role("button", name="Compare").click()
    for _ in range(5):
        page.get_by_role("button", name="+ Add a head").click()
    assert len(chips(page)) == 6
    assert page.get_by_role("button", name="+ Add a head").count() == 0


def test_axe_finds_no_violations_on_a_phone(opened, small):
    fragment = HEAD + "&as=lines&and=decoder.1.cross:3&and=decoder.0.cross:0&pin=7,4"
    page = opened(small, fragment, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert axe_violations(page) == []


def test_saved_figure_has_the_colors_and_the_legend(opened, small):
    page = opened(small, HEAD + "&as=lines&and=decoder.1.cross:3")
    page.locator(".tools .menu summary").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Figure as SVG").click()
    svg = download.value.path().read_text()
    for color in {*colors(page, "path.thread")}:
        assert f'stroke="{color}"' in svg
    assert "head 3" in svg
    assert "layer 2, head 4" in svg
    assert "×" not in svg


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(linear):
    """CIELAB of linear sRGB, whose differences of 10 and more are seen at a glance."""
    x = XYZ @ linear / (XYZ @ np.ones(3))
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colors_of_heads_differ_for_color_blind_readers(deficiency):
    style = web.read_sources()["page.css"]
    for background, palette in zip(
        re.findall(r"--sheet: (#\w{6})", style),
        re.findall(r"--head-0: .*?--head-5: #\w{6}", style, re.DOTALL),
        strict=True,
    ):
        found = [background, *re.findall(r"#\w{6}", palette)]
        assert len(found) == 7
        srgb = np.array([[int(one[i : i + 2], 16) / 255 for i in (1, 3, 5)] for one in found])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        seen = [lab(np.clip(DEFICIENCIES[deficiency] @ one, 0, 1)) for one in linear]
        distances = [np.linalg.norm(a - b) for i, a in enumerate(seen[1:]) for b in seen[2 + i :]]
        assert min(distances) > 15
        luminance = linear @ XYZ[1]
        contrast = (np.maximum(luminance, luminance[0]) + 0.05) / (np.minimum(luminance, luminance[0]) + 0.05)
        assert contrast[1:].min() > 3  # WCAG 2.1, non-text contrast
