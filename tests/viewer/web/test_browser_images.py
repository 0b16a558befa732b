"""The image view in a browser: pointer, keys, selection and export, without network access."""

import base64
import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import regard
from regard.viewer.page.image_scene import build_image_scene
from tests.viewer.browser import QUIET, announced, axe_violations, hash_of
from tests.viewer.image_helpers import LABELS, images, model_of

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<img src=x onerror=alert(1)>\u202e&amp;"
IMAGES = "#view=images&at=blocks.1.attention:1&over=attention"


@pytest.fixture(scope="module")
def seen():
    return regard.look(model_of("class", registers=1), images()[0], name="animals")


@pytest.fixture(scope="module")
def segmented():
    return regard.look(model_of("mean", head="segment", segmenter="queries"), images()[0])


def point(page, row, column):
    box = page.locator(".figure.patches").bounding_box()
    page.mouse.move(box["x"] + box["width"] * (column + 0.5) / 3, box["y"] + box["height"] * (row + 0.5) / 2)


def overlay_pixels(page):
    """The overlay of the image as bytes of shape (rows, columns, 4)."""
    address = page.locator(".overlay").evaluate("(canvas) => canvas.toDataURL()")
    return np.array(Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))))


def brightness(pixels):
    return pixels[..., :3] @ np.array([0.2126, 0.7152, 0.0722])


def shows(page, weights):
    """Whether the brightness of patches increases with their weights."""
    found = brightness(overlay_pixels(page))
    assert found.shape == weights.shape
    steps = np.diff(found.flatten()[np.argsort(weights.flatten())])
    return steps.min() > -2 and steps.sum() > 80


def wait_for_announcement(page, text):
    text_of = "document.querySelector('.live').textContent.replace(/[\u2068\u2069]/g, '')"
    page.wait_for_function(f"text => {text_of}.includes(text)", arg=text)


def ranked(page):
    names = page.locator(".reading .ranks .name").all_text_contents()
    weights = page.locator(".reading .ranks .weight").all_text_contents()
    return dict(zip(names, map(float, weights), strict=True))


def test_image_page_opens_with_the_attention_of_the_class_token(opened, seen):
    page = opened(build_image_scene(seen))
    assert page.locator("h1 .source").text_content() == "the image"
    assert page.locator("h1 .target").text_content().startswith(f"{seen.label}, ")
    views = page.get_by_role("tablist", name="View").get_by_role("tab").all_text_contents()
    assert views == ["Attention", "Step by step", "Experiment"]
    # The page opens with the sharpest head of the class token, and names this query.
    rows = {(name, head): one[0, 2:] for name, shown in seen.maps.items() for head, one in enumerate(shown.weights)}
    entropies = {key: -(row / row.sum() * np.log(row / row.sum())).sum() for key, row in rows.items()}
    name, head = min(entropies, key=entropies.get)
    assert page.get_by_label("Layer", exact=True).input_value() == name
    assert page.get_by_label("Head", exact=True).input_value() == str(head)
    query = page.get_by_label("Query", exact=True).evaluate("select => select.selectedOptions[0].textContent")
    assert query == "class token (point at a patch to change it)"
    expected = seen.maps[name].weights[head, 0]
    assert page.locator(".reading h2").text_content() == "class token attends to"
    found = ranked(page)
    assert list(found.values()) == pytest.approx(np.sort(expected)[::-1][: len(found)], abs=6e-5)
    # The brightness of patches has the order of their weights.
    patches = expected[2:].reshape(2, 3)
    assert shows(page, patches)
    # Every layer and head has a thumbnail, and so has each mean.
    assert page.locator(".images .thumb[data-drawn]").count() == 3 * 3
    assert page.locator(".predictions button").count() == 3


def test_patch_under_the_pointer_is_the_query(opened, seen):
    page = opened(build_image_scene(seen), IMAGES)
    expected = seen.maps["blocks.1.attention"].weights[1]
    thumb = page.locator('.thumb[data-head="blocks.0.attention:1"] canvas')
    before = thumb.evaluate("(canvas) => canvas.toDataURL()")
    point(page, 1, 2)
    wait_for_announcement(page, "patch 1,2 attends to")
    assert page.locator(".reading h2").text_content() == "patch 1,2 attends to"
    row = expected[2 + 5]
    assert max(ranked(page).values()) == pytest.approx(row.max(), abs=6e-5)
    assert shows(page, row[2:].reshape(2, 3))
    assert float(re.search(r"most: ([\d.]+)\.", announced(page))[1]) == pytest.approx(row.max(), rel=1e-5)
    # The thumbnails follow the pointer too.
    page.wait_for_selector(QUIET)
    assert thumb.evaluate("(canvas) => canvas.toDataURL()") != before
    page.mouse.move(2, 2)
    assert page.locator(".reading h2").text_content() == "class token attends to"


def test_pinned_patch_stays_the_query(opened, seen):
    page = opened(build_image_scene(seen), IMAGES)
    expected = seen.maps["blocks.1.attention"].weights[1]
    point(page, 0, 1)
    page.mouse.down()
    page.mouse.up()
    wait_for_announcement(page, "Pinned: patch 0,1 is the query.")
    assert hash_of(page)["pin"] == "3,3"
    point(page, 1, 0)  # now the pointer reads weights
    wait_for_announcement(page, "patch 0,1 attends to patch 1,0")
    assert page.locator(".reading output").text_content() == f"{expected[3, 2 + 3]:#.6g}"
    assert page.get_by_label("Query", exact=True).input_value() == "patch"
    # It is the query of other layers as well.
    page.locator('.thumb[data-head="blocks.0.attention:0"]').click()
    assert (hash_of(page)["at"], hash_of(page)["pin"]) == ("blocks.0.attention:0", "3,3")
    first = seen.maps["blocks.0.attention"].weights[0, 3]
    assert max(ranked(page).values()) == pytest.approx(first.max(), abs=6e-5)
    # A link restores it.
    link = page.evaluate("location.hash")
    again = opened(build_image_scene(seen), link)
    assert again.locator(".reading h2").text_content() == "patch 0,1 attends topinned"
    point(page, 0, 1)
    page.mouse.down()
    page.mouse.up()
    assert "pin" not in hash_of(page)


def test_image_view_is_usable_with_the_keyboard(opened, seen):
    page = opened(build_image_scene(seen), IMAGES)
    page.locator(".figure.patches").focus()
    page.keyboard.press("ArrowUp")  # the first key press shows the current position: the center
    assert "Row 2 of 2, column 2 of 3." in announced(page)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    assert announced(page).startswith("patch 0,2 attends to")
    page.keyboard.press("Enter")
    assert announced(page) == "Pinned: patch 0,2 is the query."
    expected = seen.maps["blocks.1.attention"].weights[1, 2 + 2]
    page.keyboard.press("g")
    best = int(expected[2:].argmax())
    assert announced(page).startswith(f"patch 0,2 attends to patch {best // 3},{best % 3}: ")
    assert float(re.search(r": ([\d.]+)\. Row", announced(page))[1]) == pytest.approx(expected[2:].max(), rel=1e-5)
    page.keyboard.press("]")
    assert hash_of(page)["at"] == "blocks.1.attention:0"
    page.keyboard.press("}")
    assert hash_of(page)["at"] == "blocks.2.attention:0"
    assert announced(page) == "Layer 3, head 1"
    page.keyboard.press("Escape")
    assert "pin" not in hash_of(page)
    page.keyboard.press("f")
    assert page.get_by_label("Query", exact=True).input_value() == "whole"
    assert announced(page) == "Query: class token."
    for key, over in (("r", "rollout"), ("p", "image"), ("a", "attention")):
        page.keyboard.press(key)
        assert hash_of(page)["over"] == over
    page.locator(".thumb[tabindex='0']").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Home")
    assert hash_of(page)["at"] == "blocks.1.attention:mean"
    assert page.evaluate("document.activeElement.dataset.head") == "blocks.1.attention:mean"


def test_select_elements_keep_the_focus(opened, seen):
    page = opened(build_image_scene(seen), IMAGES)
    for name, value in (("Head", "0"), ("Layer", "blocks.0.attention"), ("Query", "1")):
        choice = page.get_by_label(name, exact=True)
        choice.focus()
        choice.select_option(value)
        assert choice.evaluate("(one) => one === document.activeElement")
    assert page.locator(".reading h2").text_content() == "register 0 attends topinned"
    expected = seen.maps["blocks.0.attention"].weights[0, 1]
    assert max(ranked(page).values()) == pytest.approx(expected.max(), abs=6e-5)


def test_rollout_of_the_image_a_patch_and_a_label(opened, seen):
    page = opened(build_image_scene(seen), IMAGES)
    page.get_by_role("tab", name="Rollout").click()
    page.wait_for_selector(QUIET)
    assert page.locator(".reading h2").text_content() == "entire image draws from"
    assert shows(page, seen.rollout())
    point(page, 1, 1)
    assert page.locator(".reading h2").text_content() == "patch 1,1 draws from"
    found = ranked(page)
    assert found["patch 1,1"] == pytest.approx(seen.rollout(patch=(1, 1))[1, 1], abs=6e-5)
    # The labels are listed with their probabilities.
    shares = page.locator(".predictions .share").all_text_contents()
    likely = sorted(seen.probabilities.values(), reverse=True)
    assert [float(one.rstrip("%")) for one in shares] == pytest.approx([100 * one for one in likely], abs=0.06)
    page.locator(".predictions button", has_text="dog").click()
    assert hash_of(page)["label"] == str(LABELS.index("dog"))
    expected = seen.rollout(label="dog")
    assert shows(page, expected)
    point(page, 0, 2)
    assert float(page.locator(".reading output").text_content()) == pytest.approx(expected[0, 2], rel=1e-4, abs=1e-9)
    page.locator(".predictions button", has_text="dog").click()
    assert "label" not in hash_of(page)


def test_overlay_is_shown_as_a_table_and_saved(opened, seen):
    page = opened(build_image_scene(seen), IMAGES)
    expected = seen.maps["blocks.1.attention"].weights[1, 0, 2:].reshape(2, 3)
    page.get_by_role("button", name="Table").click()
    cells = page.locator(".images table td[data-row]").all_text_contents()
    found = [float(one.replace("−", "-")) for one in cells]
    assert found == pytest.approx(expected.flatten(), rel=1e-5)
    assert page.locator(".images table thead th").all_text_contents() == ["column 0", "column 1", "column 2"]
    page.locator(".images table td[data-row='1'][data-column='2']").hover()
    wait_for_announcement(page, "class token attends to patch 1,2: ")
    page.locator("summary", has_text="Save").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Numbers as TSV").click()
    lines = download.value.path().read_text().splitlines()
    assert download.value.suggested_filename == "regard-the_image-blocks.1.attention.1.tsv"
    found = [[float(one) for one in line.split("\t")[1:]] for line in lines[1:]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def saved(page, what):
    page.locator("summary", has_text="Save").click()
    with page.expect_download() as download:
        page.get_by_role("button", name=what).click()
    return download.value.path().read_bytes()


def test_saved_figure_is_what_is_on_the_screen(opened, seen):
    page = opened(build_image_scene(seen), IMAGES + "&pin=4,4")
    drawing = ElementTree.fromstring(saved(page, "Figure as SVG"))
    texts = "".join("".join(one.itertext()) + "\n" for one in drawing.iter(f"{SVG}text"))
    assert "Layer 2" in texts
    assert "all patches" in texts
    assert len(list(drawing.iter(f"{SVG}image"))) == 3  # the image, the weights, the legend
    picture = np.asarray(Image.open(io.BytesIO(saved(page, "Figure as PNG"))).convert("RGB"))
    # Its brightest patch is the one of the page.
    box = page.locator(".figure.patches").bounding_box()
    sheet = page.locator(".card").bounding_box()
    left, top = (2 * (24 + box[side] - sheet[side]) for side in ("x", "y"))
    wide, high = 2 * box["width"] / 3, 2 * box["height"] / 2
    middles = [[picture[int(top + (r + 0.3) * high), int(left + (c + 0.3) * wide)] for c in range(3)] for r in range(2)]
    shown = brightness(np.array(middles).astype(float))
    assert shown.argmax() == seen.maps["blocks.1.attention"].weights[1, 4, 2:].argmax()


def test_segmenter_shows_labels_and_the_attention_of_their_queries(opened, segmented):
    page = opened(build_image_scene(segmented))
    mask = segmented.run.output[0].argmax(0).numpy()
    colors = np.array(build_image_scene(segmented).header["image"]["mask"]["colors"])
    assert overlay_pixels(page).shape == (8, 12, 4)
    np.testing.assert_allclose(overlay_pixels(page)[..., :3], colors[mask], atol=2)  # rounded by premultiplied alpha
    shares = np.bincount(mask.flatten(), minlength=3) / mask.size
    names = page.locator(".pixel-labels .name").all_text_contents()
    assert names == [LABELS[i] for i in np.argsort(-shares, kind="stable") if shares[i] > 0]
    point(page, 0, 0)
    wait_for_announcement(page, f"patch 0,0: {LABELS[mask[2, 2]]}. Row 1 of 2")
    # One label is highlighted.
    page.locator(".pixel-labels button").first.click()
    label = int(page.locator(".pixel-labels button").first.get_attribute("data-label"))
    opaque = overlay_pixels(page)[..., 3]
    assert opaque[mask == label].min() > 5 * opaque[mask != label].max()
    # Attention of the label queries.
    page.get_by_role("tablist", name="Overlay").get_by_role("tab", name="Attention").click()
    assert page.locator(".query-list button").count() == 3
    page.locator(".query-list button", has_text="owl").click()
    assert page.locator(".reading h2").text_content() == "the query of owl attends topinned"
    expected = segmented.patch_weights(label="owl").mean(0)
    assert shows(page, expected)
    page.get_by_role("tab", name="Rollout").click()
    page.get_by_label("Label", exact=True).select_option(label="owl")
    page.wait_for_selector(QUIET)
    assert page.locator(".reading h2").text_content() == "the query of owl draws from"
    found = ranked(page)
    assert max(found.values()) == pytest.approx(segmented.rollout(label="owl").max(), abs=6e-5)


def test_pooling_query_cannot_be_replaced_by_a_patch(opened):
    seen = regard.look(model_of("query"), images()[0])
    page = opened(build_image_scene(seen))
    assert page.get_by_label("Layer", exact=True).input_value() == "pooler.attention"
    query = page.get_by_label("Query", exact=True)
    assert query.count() == 0 or not query.is_visible()
    point(page, 0, 1)
    wait_for_announcement(page, "query attends to patch 0,1: ")
    expected = seen.patch_weights()[int(page.get_by_label("Head", exact=True).input_value())]
    assert float(page.locator(".reading output").text_content()) == pytest.approx(expected[0, 1], rel=1e-5)
    page.locator('.thumb[data-head="blocks.0.attention:1"]').click()
    assert page.get_by_label("Query", exact=True).is_visible()
    point(page, 1, 1)
    assert page.locator(".reading h2").text_content() == "patch 1,1 attends to"
    page.get_by_role("tab", name="Rollout").click()
    page.wait_for_selector(QUIET)
    page.mouse.move(2, 2)
    assert shows(page, seen.rollout())


def test_names_are_never_markup(opened):
    labels = (HOSTILE, "</script><script>alert(1)</script>", "dog")
    for form in (dict(), dict(head="segment", segmenter="queries")):
        seen = regard.look(model_of("mean", labels=labels, **form), images()[0], name=HOSTILE)
        scene = build_image_scene(seen)
        scene.header["texts"]["source"] = scene.header["images"] = HOSTILE
        page = opened(scene)
        for over in ("Rollout", "Attention"):
            page.get_by_role("tablist", name="Overlay").get_by_role("tab", name=over).click()
        page.wait_for_selector(QUIET)
        assert page.locator("img").count() == 0
        assert page.locator("h1 .source").text_content() == HOSTILE
        if not form:
            assert HOSTILE[:10] in " ".join(page.locator(".predictions .name").all_text_contents())


@pytest.mark.parametrize("over", ["attention", "rollout", "mask", "table"])
def test_axe_finds_no_violations(opened, seen, segmented, over):
    shown = build_image_scene(segmented if over == "mask" else seen)
    form = "&as=table" if over == "table" else f"&over={over}"
    assert axe_violations(opened(shown, f"#view=images&at=blocks.1.attention:1{form}")) == []


def test_explanations_of_a_label_side_by_side(opened, seen):
    page = opened(build_image_scene(seen, explain=None), viewport={"width": 390, "height": 700})
    page.locator(".why > summary").click()
    page.wait_for_selector(".lens table")
    label = LABELS[1]
    page.get_by_label("Label to explain").select_option(label=label)
    values = seen.attribution(label)
    row, column = np.unravel_index(np.abs(values).argmax(), values.shape)
    page.wait_for_selector(f'.patch-frame[aria-label*="Gradient × input, largest: patch {row},{column} "]')
    canvas = page.locator(".patch-frame .over").nth(2)
    address = canvas.evaluate("(canvas) => canvas.toDataURL()")
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(address.split(",")[1])))).astype(float)
    is_blue = pixels[..., 2] > pixels[..., 0]
    large = np.abs(values) > np.abs(values).max() / 3
    assert (is_blue == (values > 0))[large].all()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("tab", name="Experiment").click()
    page.wait_for_selector(".effect")
    assert page.locator(".effect").count() == sum(map(len, seen.head_effects().total.values()))


def test_small_screen_scrolls_only_vertically(opened, seen, segmented):
    for scene in (build_image_scene(seen), build_image_scene(segmented, label="cat")):
        page = opened(scene, viewport={"width": 390, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        box = page.locator(".figure.patches").bounding_box()
        assert box["width"] / box["height"] == pytest.approx(12 / 8, rel=0.02)


@pytest.mark.parametrize(
    "fragment",
    ["over=nothing", "over=mask", "label=99", "label=x", "pin=999,3", "at=blocks.9.attention:0", "follow=maybe"],
)
def test_invalid_address_is_ignored(opened, seen, fragment):
    page = opened(build_image_scene(seen), f"#view=images&{fragment}")
    assert page.locator(".images .thumb[data-drawn]").count() == 9
    assert page.locator(".reading h2").text_content() == "class token attends to"
    assert json.dumps(hash_of(page))


def test_head_of_an_image_is_turned_off(opened, seen):
    page = opened(build_image_scene(seen), IMAGES + "&pin=3,3")
    page.get_by_role("button", name="Turn this head off").click()
    assert "This head is off" in page.locator(".off-note").text_content()
    assert "regard look MODEL IMAGE --live" in page.locator(".interventions .note").text_content()
