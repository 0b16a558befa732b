"""The saved page in a browser, opened from a file without network access: figures and selection."""

import numpy as np
import pytest

from tests.viewer import scenes
from tests.viewer.browser import (
    CROSS,
    HEAD,
    LINKS,
    QUIET,
    announced,
    announced_weight,
    hash_of,
    open_settings,
    point_at,
    square,
    wait_for_announcement,
)
from tests.viewer.helpers import weights
from tests.viewer.web.measures import agreement


def test_saved_page_opens_with_the_most_informative_head(opened, small):
    page = opened(small)
    assert page.locator("h1 .source").text_content() == " ".join(scenes.SOURCE)
    assert page.locator("h1 .target").text_content() == " ".join(scenes.TARGET)
    attention, head = page.locator(".panel select.attention"), page.locator(".panel select.head")
    from regard.evaluation.teacher_forcing import mutual_information

    information_of = {
        (name, h): mutual_information(one)
        for name in ("decoder.0.cross", "decoder.1.cross")
        for h, one in enumerate(weights(small, name))
    }
    assert (attention.first.input_value(), int(head.first.input_value())) == max(information_of, key=information_of.get)
    assert page.locator(".panel").first.locator("path.thread").count() > 10  # as lines
    # Each layer and head has a thumbnail, and so has each mean.
    page.locator(".thumb[data-drawn]").nth(29).wait_for()
    assert page.locator(".thumb[data-drawn]").count() == 3 * 2 * 5


def test_content_security_policy_blocks_other_scripts(opened, small):
    page = opened(small)
    page.evaluate("""() => {
      window.ran = false;
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.body.append(script);
    }""")
    assert page.evaluate("window.ran") is False
    page.evaluate("fetch('https://example.org/').catch(() => 0)")
    page.wait_for_timeout(50)
    assert len(opened.console_messages) >= 2  # both were refused
    assert all("Content Security Policy" in one or "Failed to" in one for one in opened.console_messages)
    opened.console_messages.clear()


def test_pointing_at_a_cell_shows_and_announces_its_weight(opened, small):
    page = opened(small, CROSS)
    expected = weights(small, "decoder.1.cross")[2]
    point_at(page, square(page, 7, 4, 10))
    wait_for_announcement(page, "souris")
    assert announced(page).startswith("souris attends to mouse: ")
    assert announced(page).endswith("Row 8 of 14, column 5 of 10.")
    assert announced_weight(page) == pytest.approx(expected[7, 4], rel=1e-5)
    assert page.locator(".reading output").text_content() == f"{expected[7, 4]:#.6g}"
    ranks = page.locator(".ranks li .weight").all_text_contents()
    assert [float(one) for one in ranks] == pytest.approx(np.sort(expected[7])[::-1][: len(ranks)], abs=6e-5)
    # The labels of the cell are highlighted.
    assert page.locator("text.label.on").all_text_contents() == ["souris", "mouse"]
    page.mouse.move(5, 5)
    assert page.locator(".reading h2").text_content() == "Largest weights"


def test_arrow_keys_move_between_cells(opened, small):
    page = opened(small, CROSS)
    expected = weights(small, "decoder.1.cross")[2]
    page.locator(".figure").focus()
    page.keyboard.press(
        "ArrowDown"
    )  # the first key press shows the current position: the largest weight of the first row
    assert f"column {expected[0].argmax() + 1} of 10" in announced(page)
    for key in ("ArrowDown", "ArrowDown", "Home", "ArrowRight"):
        page.keyboard.press(key)
    assert announced(page).endswith("Row 3 of 14, column 2 of 10.")
    assert announced_weight(page) == pytest.approx(expected[2, 1], rel=1e-5)
    page.keyboard.press("End")
    assert "column 10 of 10" in announced(page)
    page.keyboard.press("g")
    assert announced_weight(page) == pytest.approx(expected[2].max(), rel=1e-5)
    page.keyboard.press("Shift+ArrowDown")
    assert "Row 13 of 14" in announced(page)
    page.keyboard.press("Enter")
    assert announced(page).startswith("Pinned: .")
    assert hash_of(page)["pin"].startswith("12,")
    page.keyboard.press("Escape")
    assert "pin" not in hash_of(page)
    page.keyboard.press("]")
    assert hash_of(page)["at"] == "decoder.1.cross:3"
    page.keyboard.press("{")
    assert hash_of(page)["at"] == "decoder.0.cross:3"


def test_all_controls_are_reachable_with_tab(opened, small):
    """Tab alone reaches every control, and nothing traps the focus."""
    page = opened(small)
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("""() => {
              const one = document.activeElement;
              return one === document.body ? null
                : (one.getAttribute("aria-label") ?? one.textContent).trim().split(/[:,]/)[0];
            }""")
        )
        if seen[-1] is None:
            break
    controls = (
        *("Toggle dark mode", "Keyboard shortcuts", "Save", "Lines", "Compare", "Encoder 1", "Settings", "Attention"),
        *("Head", "Next head", "Turn this head off", "Lines of Cross-attention", "Cross-attention"),
    )
    for name in controls:
        assert name in seen
    assert seen[-1] is None


def test_arrow_keys_move_between_tabs(opened, small):
    page = opened(small, CROSS)
    tabs = page.get_by_role("tablist", name="Show as").get_by_role("tab")
    page.get_by_role("tab", name="Map").focus()
    for key, form in (("ArrowRight", "text"), ("ArrowRight", "lines"), ("ArrowLeft", "text"), ("ArrowLeft", "map"),
                      ("Home", "lines"), ("End", "text")):  # fmt: skip
        page.keyboard.press(key)
        assert hash_of(page)["as"] == form
        assert page.evaluate("document.activeElement.dataset.value") == form
        assert [tab.get_attribute("aria-selected") for tab in tabs.all()].count("true") == 1
        kind = {"text": "shaded-text", "map": "heat"}.get(form, form)
        assert page.locator(f".figure.{kind}").count() == 1
    # The table is opened by the Save menu.
    page.locator(".tools .menu summary").click()
    page.get_by_role("button", name="Show the numbers as a table").click()
    panel = page.get_by_role("tabpanel", name="Table")
    assert panel.get_attribute("aria-labelledby") == page.get_by_role("tab", name="Table").get_attribute("id")


def test_table_has_exact_weights(opened, small):
    page = opened(small, HEAD + "&as=table")
    expected = weights(small, "decoder.1.cross")[2]
    cells = page.locator("tbody td").all_text_contents()
    np.testing.assert_allclose(
        np.reshape([float(one.replace("−", "-")) for one in cells], (14, 10)), expected, rtol=2e-4, atol=1e-9
    )
    assert page.locator("tbody th").all_text_contents() == [*scenes.TARGET, "<eos>"]
    assert page.locator("thead th").all_text_contents() == [*scenes.SOURCE, "<eos>"]


def test_long_table_has_pages(opened):
    page = opened(scenes.translation([f"s{i}" for i in range(99)], [f"t{i}" for i in range(59)], 1, 1), "#as=table")
    assert page.locator("tbody tr").count() == 40
    page.get_by_role("button", name="Next columns").click()
    page.get_by_role("button", name="Next rows").click()
    assert page.locator("tbody th").all_text_contents()[-1] == "<eos>"
    assert page.locator("thead th").first.text_content() == "s24"


def test_pin_stays_until_the_second_click(opened, small):
    page = opened(small, CROSS)
    square(page, 1, 1, 10).click()
    assert hash_of(page)["pin"] == "1,1"
    page.mouse.move(5, 5)
    assert page.locator(".reading .pinned").count() == 1
    assert page.locator(".reading .subject").text_content() == "chat"
    page.get_by_role("button", name="Next head").click()
    assert page.locator(".reading output").text_content() == f"{weights(small, 'decoder.1.cross')[3][1, 1]:#.6g}"
    # The same token stays pinned when word pieces are merged: chas and sé become one position.
    open_settings(page)
    page.get_by_role("button", name="Merge word pieces").click()
    assert page.locator(".reading .subject").text_content() == "chat"
    page.get_by_role("button", name="Merge word pieces").click()
    page.keyboard.press("Escape")
    square(page, 1, 1, 10).click()
    assert "pin" not in hash_of(page)


def test_two_heads_are_compared_side_by_side(opened, small):
    page = opened(small, CROSS)
    page.get_by_role("button", name="Compare").click()
    assert page.locator(".panel:visible").count() == 2
    assert hash_of(page)["with"] == "decoder.1.cross:3"
    # The cell under the pointer is highlighted and read in both figures.
    point_at(page, square(page, 7, 4, 10, figure=1))
    assert page.locator("text.label.on").all_text_contents() == ["souris", "mouse"] * 2
    both = [float(one) for one in page.locator(".reading output").all_text_contents()]
    assert both == pytest.approx([weights(small, "decoder.1.cross")[h][7, 4] for h in (2, 3)], rel=1e-5)
    wait_for_announcement(page, "B: ")
    page.wait_for_selector(QUIET)
    a, b = weights(small, "decoder.1.cross")[2:4]
    common = page.locator(".measure", has_text="Overlap").locator(".value").text_content()
    assert float(common) == pytest.approx(agreement(a, b), abs=0.006)
    # The overview controls the figure that was used last.
    page.locator('.thumb[data-head="decoder.0.cross:1"]').click()
    assert hash_of(page)["with"] == "decoder.0.cross:1"
    square(page, 0, 0, 10).click()
    page.locator('.thumb[data-head="decoder.0.cross:0"]').click()
    assert hash_of(page)["at"] == "decoder.0.cross:0"
    # Maps with different axes share no cells.
    page.locator('.thumb[data-head="encoder.0.attention:0"]').click(modifiers=["Shift"])
    assert hash_of(page)["with"] == "encoder.0.attention:0"
    point_at(page, square(page, 3, 2, 10))
    assert page.locator(".panel").nth(1).locator("text.label.on").count() == 0
    page.get_by_role("button", name="Compare").click()
    assert page.locator(".panel:visible").count() == 1
    assert "with" not in hash_of(page)


def test_overview_selects_heads(opened, small):
    page = opened(small, CROSS)
    thumb = page.locator('.thumb[data-head="encoder.1.attention:0"]')
    thumb.click()
    assert page.locator(".panel select.attention").first.input_value() == "encoder.1.attention"
    assert thumb.get_attribute("aria-selected") == "true"
    thumb.focus()
    page.keyboard.press("ArrowRight")
    assert hash_of(page)["at"] == "encoder.1.attention:1"
    page.keyboard.press("ArrowDown")  # from the last row of a group to the first of the next one
    assert hash_of(page)["at"] == "decoder.0.attention:1"
    page.keyboard.press("Home")
    assert hash_of(page)["at"] == "decoder.0.attention:mean"
    expected = weights(small, "decoder.0.attention").mean(0)
    page.wait_for_selector(QUIET)
    page.locator(".figure").focus()
    page.keyboard.press("ArrowUp")
    assert announced_weight(page) == pytest.approx(expected[0].max(), rel=1e-5)
    # A thumbnail has the colors of the map's weights.
    pixels = page.evaluate(
        """name => {
          const canvas = document.querySelector(`.thumb[data-head="${name}"] canvas`);
          return [canvas.width, canvas.height, [...canvas.getContext("2d").getImageData(0, 0, 14, 14).data]];
        }""",
        "decoder.0.attention:1",
    )
    assert pixels[:2] == [14, 14]
    light = np.reshape(pixels[2], (14, 14, 4))[..., :3].sum(-1)
    order = np.argsort(weights(small, "decoder.0.attention")[1].ravel())
    assert np.all(np.diff(light.ravel()[order]) <= 3)  # a larger weight is never lighter, up to rounding


def test_masked_cells_are_blank(opened, small):
    page = opened(small, "#at=decoder.0.attention:0&as=map")
    assert page.locator("rect.square").count() == 14 * 15 / 2


def test_word_pieces_are_merged(opened, small):
    page = opened(small, CROSS)
    open_settings(page)
    page.get_by_role("button", name="Merge word pieces").click()
    page.keyboard.press("Escape")
    labels = page.locator(".axes text.label").all_text_contents()
    assert labels[4] == "chassé"
    assert page.locator("rect.square").count() == 13 * 10
    point_at(page, square(page, 4, 2, 10))
    wait_for_announcement(page, "chassé")
    expected = weights(small, "decoder.1.cross")[2][4:6, 2].mean()
    assert announced_weight(page) == pytest.approx(expected, rel=1e-5)
    # Words can be compared with the gold links.
    page.wait_for_selector(QUIET)
    assert page.locator(".measure", has_text="Alignment error").count() == 1


def test_gold_links_are_marked(opened, small):
    page = opened(small, CROSS)
    cells = [[t, s] for t, s in LINKS]
    assert page.locator("circle.gold").count() == len(cells) + 1  # the word in two pieces has two cells


def test_lines_show_the_weights_of_a_token(opened, small):
    page = opened(small, HEAD + "&as=lines")
    expected = weights(small, "decoder.1.cross")[2]
    assert page.locator("path.thread").count() == (expected >= 1.2 / 10).sum()
    point_at(page, page.locator(".tokens text.label").nth(7))
    assert page.locator("path.strand").count() == (expected[7] >= 0.004).sum()
    wait_for_announcement(page, "souris")
    assert page.locator(".reading .subject").text_content() == "souris"
    # A key token shows the queries that attend to it.
    point_at(page, page.locator(".tokens text.label").nth(14 + 4))
    assert page.locator(".reading h2").text_content() == "What attends to mouse"
    assert page.locator("path.strand").count() == (expected[:, 4] >= 0.004).sum()
    page.locator(".figure").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".tokens text.on").count() == 2


def test_lines_of_a_long_text_end_at_the_edge_of_the_window(opened):
    scene = scenes.translation([f"s{i}" for i in range(150)], [f"t{i}" for i in range(150)], 1, 2)
    page = opened(scene, "#at=decoder.0.cross:0&as=lines&pin=75,75")
    labels = page.locator(".tokens text.label").all_text_contents()
    assert len(labels) == 80
    assert "t75" in labels
    row = weights(scene, "decoder.0.cross")[0][75]
    shown = [int(label[1:]) for label in labels[40:]]
    outside = page.locator("text.outside").all_text_contents()
    before, after = row[: shown[0]].sum(), row[shown[-1] + 1 :].sum()
    assert outside == [name for name, part in (("… before", before), ("… after", after)) if part >= 0.004]
    assert outside  # otherwise the test checks nothing
    page.locator(".figure").focus()
    for _ in range(4):
        page.keyboard.press("Shift+ArrowDown")
    assert "t115" in page.locator(".tokens text.on").all_text_contents()


def test_text_is_shaded_by_weight(opened, small):
    page = opened(small, HEAD + "&as=text")
    expected = weights(small, "decoder.1.cross")[2][7]
    page.locator('.token[data-row="7"]').hover()
    shades = page.locator(".token[data-column]").evaluate_all(
        "all => all.map(one => one.style.background.match(/\\d+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0))"
    )
    assert np.all(np.diff(np.array(shades)[np.argsort(expected)]) <= 3)
    assert shades[expected.argmax()] < 500
    assert page.locator(".words").first.inner_text().split() == [
        *(["Le", "chat", "a", "pour", "chassé", "la", "souris", "à", "travers", "le", "jardin", "."]),
        "<eos>",
    ]


def test_right_to_left_text(opened):
    target = ["قرأ", "الأطفال", "كتابا", "قديما"]
    scene = scenes.translation(["The", "children", "read", "an", "old", "book"], target, 1, 1)
    page = opened(scene, "#at=decoder.0.attention:0&as=map")
    box = [square.bounding_box()["x"] for square in page.locator("rect.square").all()]
    # The first token is at the right and attends to itself alone; the last row reaches to the left.
    assert box[0] == max(box)
    assert box[-1] == min(box)
    labels = page.locator(".axes text.label")
    assert labels.nth(5).get_attribute("direction") == "rtl"
    page.locator(".figure").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")  # on a map the key moves to the right: to an earlier token
    assert "column 4 of 5" in announced(page)
    point_at(page, page.locator("rect.square").nth(1))
    wait_for_announcement(page, "Row 2 of 5, column 1 of 5")
    page.goto(page.url.split("#")[0] + "#at=decoder.0.cross:0&as=text")
    page.reload()
    assert page.locator(".words").first.get_attribute("dir") == "rtl"
    assert page.locator("h1 .target").get_attribute("dir") == "rtl"
