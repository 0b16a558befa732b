"""The search view in a browser: tree, keys, table and the attention at each step."""

import copy
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from regard.decode import DecodeConfig
from regard.viewer import look
from regard.viewer.page.text_scene import Scene, build_scene
from tests.viewer.browser import announced, axe_violations, hash_of, wait_for_announcement

SENTENCE = "one two three"
HOSTILE = "<img src=x onerror=alert(1)>"
VIEW = "#search=1"


@pytest.fixture(scope="module")
def scene(transformer) -> Scene:
    return build_scene(look(transformer, SENTENCE, config=DecodeConfig(beam=3, n_best=2, min_len=2), prefix="un"))


def node(page, number):
    return page.locator(f".tree .item[data-node='{number}']")


def chosen(page) -> int:
    (number,) = page.eval_on_selector_all(".tree .item.on", "items => items.map((item) => Number(item.dataset.node))")
    return number


def best_path(scene) -> list[int]:
    return [number for number, one in enumerate(scene.header["decode"]["nodes"]) if one["state"] == "best"]


def test_candidates_are_drawn_with_their_state(opened, scene):
    page = opened(scene)
    page.locator(".search-section > summary").click()
    page.wait_for_selector(".tree")
    search = scene.header["decode"]
    drawn = page.eval_on_selector_all(
        ".tree .item", "items => items.map((item) => [Number(item.dataset.node), item.dataset.state])"
    )
    assert drawn == [[number, one["state"]] for number, one in enumerate(search["nodes"])]
    assert page.locator(".tree .tree-edge").count() == len(search["nodes"])
    assert page.locator(".tree .flag").count() == sum(one["ends"] for one in search["nodes"])
    assert page.locator(".tree .step-number").all_text_contents()[:2] == ["1 prefix", "2"]
    # Candidates do not overlap.
    every = page.eval_on_selector_all(
        ".tree .item rect:first-child",
        "all => all.map((one) => one.getBBox()).map(({ x, y, width, height }) => [x, y, x + width, y + height])",
    )
    for i, (left, top, right, bottom) in enumerate(every):
        for x1, y1, x2, y2 in every[:i]:
            assert right <= x1 or left >= x2 or bottom <= y1 or top >= y2
    # The best hypothesis is a straight line to the right.
    best = [every[number] for number in best_path(scene)]
    assert len({top for _, top, _, _ in best}) == 1
    assert all(before[2] < after[0] for before, after in itertools.pairwise(best))
    assert "Beam search, beam width 3" in page.locator(".summary").text_content()
    assert "Prefix: un" in page.locator(".constraints").text_content()
    assert "Minimum length: 2 tokens" in page.locator(".constraints").text_content()


def test_page_without_a_search_has_no_search_section(opened, transformer):
    page = opened(build_scene(look(transformer, SENTENCE, "trois deux un")))
    assert page.locator(".search-section").count() == 0


def test_candidate_shows_its_numbers_and_attention(opened, scene):
    page = opened(scene, VIEW)
    search = scene.header["decode"]
    rows = np.frombuffer(scene.blobs[search["weights"]["at"]], "<f4").reshape(search["weights"]["shape"])
    number = best_path(scene)[1]
    one = search["nodes"][number]
    node(page, number).click()
    assert hash_of(page)["node"] == str(number)
    numbers = dict(
        zip(page.locator(".node dt").all_text_contents(), page.locator(".node dd").all_text_contents(), strict=True)
    )
    assert float(numbers["Probability"]) == pytest.approx(np.exp(one["logprob"]), rel=1e-5)
    total = float(numbers["Cumulative log-probability"].replace("−", "-"))
    assert total == pytest.approx(one["total"], abs=1e-4)
    assert float(numbers["Score if finished here"].replace("−", "-")) == pytest.approx(one["score"], abs=1e-4)
    assert page.locator(".step-attention li").all_text_contents()[0].startswith("one ")
    weights = [
        float(text) for text in page.eval_on_selector_all(".step-attention li", "all => all.map((one) => one.title)")
    ]
    np.testing.assert_allclose(weights, rows[one["row"]], rtol=1e-5, atol=1e-8)
    assert search["attention"] in page.locator(".step-attention").text_content()
    # A larger weight is darker.
    shades = page.eval_on_selector_all(
        ".step-attention li", "all => all.map((one) => Number(one.style.background.match(/\\d+/g)[0]))"
    )
    assert np.argmin(shades) == np.argmax(weights)
    again = opened(scene, page.evaluate("location.hash"))
    assert chosen(again) == number


def test_pointing_reads_a_candidate_without_selecting_it(opened, scene):
    page = opened(scene, f"{VIEW}&node={best_path(scene)[0]}")
    pruned = next(i for i, one in enumerate(scene.header["decode"]["nodes"]) if one["state"] == "pruned")
    node(page, pruned).hover()
    wait_for_announcement(page, "Pruned")
    assert chosen(page) == pruned
    assert "better candidates fill the beam" in page.locator(".node .node-outcome").text_content()
    page.mouse.move(5, 5)
    assert chosen(page) == best_path(scene)[0]


def test_keys_move_along_the_tree(opened, scene):
    page = opened(scene, VIEW)
    search, path = scene.header["decode"], best_path(scene)
    page.locator(".scroll-tree").focus()
    assert chosen(page) == path[0]
    page.keyboard.press("ArrowRight")
    assert chosen(page) == path[1]
    assert announced(page).startswith(f"Step 2 of {len(search['omitted'])}: {search['nodes'][path[1]]['token']}.")
    assert re.search(r"Attends most to \S+, [\d.]+\.$", announced(page))
    active = page.locator(".scroll-tree").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("data-node") == str(path[1])
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert chosen(page) == path[-1]
    assert "Finished: the best hypothesis" in announced(page)
    page.keyboard.press("Home")
    assert chosen(page) == path[0]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    below = search["nodes"][chosen(page)]
    assert below["step"] == 1
    assert below["state"] != "best"
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == below["parent"]
    page.keyboard.press("b")
    assert chosen(page) == path[-1]
    page.keyboard.press("ArrowRight")  # there are no children
    assert chosen(page) == path[-1]
    # Every candidate is reachable.
    reached = set()
    for step in range(len(search["omitted"])):
        page.keyboard.press("b")
        for _ in range(len(path) - 1 - step):
            page.keyboard.press("ArrowLeft")
        for _ in range(20):
            reached.add(chosen(page))
            page.keyboard.press("ArrowDown")
    assert {i for i, one in enumerate(search["nodes"]) if one["step"] < len(path)} <= reached


def test_pruned_candidates_can_be_hidden(opened, scene):
    page = opened(scene, VIEW)
    toggle = page.get_by_role("button", name="Pruned")
    assert toggle.get_attribute("aria-pressed") == "true"
    tall = page.locator("svg.tree").bounding_box()["height"]
    toggle.click()
    states = page.eval_on_selector_all(".tree .item", "items => items.map((item) => item.dataset.state)")
    assert set(states) == {"best", "kept", "finished"}
    assert page.locator("svg.tree").bounding_box()["height"] < tall


def test_table_lists_all_candidates(opened, scene):
    page = opened(scene, VIEW)
    page.locator(".scroll-tree").focus()
    page.keyboard.press("n")
    rows = page.locator(".search-table tbody tr")
    search = scene.header["decode"]["nodes"]
    assert rows.count() == len(search)
    cells = [rows.nth(i).locator("th, td").all_text_contents() for i in range(len(search))]
    assert [int(row[0]) for row in cells] == [one["step"] + 1 for one in search]
    assert [row[1] for row in cells] == [one["token"] for one in search]
    assert all("the prefix is given" in row[7] for row, one in zip(cells, search) if one["reason"] == "prefix")
    rows.nth(2).click()
    assert hash_of(page)["node"] == "2"
    page.get_by_role("tab", name="Tree").click()
    assert chosen(page) == 2


def test_results_select_their_last_token(opened, scene):
    page = opened(scene, VIEW)
    results = scene.header["decode"]["results"]
    buttons = page.locator(".result-list button")
    # All finished hypotheses are listed, the results first.
    finished = [one for one in scene.header["decode"]["nodes"] if one["ends"] and one["state"] != "pruned"]
    words = buttons.locator(".words").all_text_contents()
    assert words[: len(results)] == [one["text"] for one in results]
    assert len(words) == len(finished) > len(results)
    buttons.nth(1).click()
    assert chosen(page) == results[1]["node"]
    assert page.locator(".result-list button").nth(1).get_attribute("aria-pressed") == "true"


def test_figure_and_numbers_are_saved(opened, scene):
    page = opened(scene, VIEW)
    for choice, beginning in [
        ("Search tree as SVG", b"<svg"),
        ("Search tree as PNG", b"\x89PNG"),
        ("Search as TSV", b"step\t"),
    ]:
        page.locator(".tools .menu summary").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=choice).click()
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(beginning)
        if choice == "Search tree as SVG":
            for one in scene.header["decode"]["nodes"]:
                assert f">{one['token'].replace('<', '&lt;').replace('>', '&gt;')}<" in content.decode()
        if choice == "Search as TSV":
            assert len(content.decode().splitlines()) == 1 + len(scene.header["decode"]["nodes"])


def test_tokens_are_never_markup(opened, scene):
    header = copy.deepcopy(scene.header)
    search = header["decode"]
    for one in search["nodes"]:
        one["token"] = one["piece"] = HOSTILE
    search["source"] = [HOSTILE] * len(search["source"])
    search["prefix"] = [HOSTILE]
    for one in search["results"]:
        one["text"] = HOSTILE
    page = opened(Scene(header, scene.blobs), VIEW)
    assert page.locator(".regard img").count() == 0
    assert HOSTILE in page.locator(".step-attention").text_content()


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_greedy_search_and_sampling(opened, transformer, method):
    config = DecodeConfig("greedy") if method == "greedy" else DecodeConfig("sample", n_best=6, top_k=3)
    scene = build_scene(look(transformer, SENTENCE, config=config))
    page = opened(scene, VIEW)
    search = scene.header["decode"]
    assert page.locator(".tree .item").count() == len(search["nodes"])
    distinct = {one["node"] for one in search["results"]}
    assert page.locator(".result-list button").count() == len(distinct)
    assert page.locator(".constraints").count() == 0
    title = {"greedy": "Greedy search.", "sample": "Sampling, 6 samples."}[method]
    assert page.locator(".summary").text_content().startswith(title)


def test_narrow_window_scrolls_the_tree_and_not_the_page(opened, scene):
    page = opened(scene, VIEW, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Nothing is drawn beyond the edge of the tree.
    edges = page.locator(".tree").evaluate(
        "svg => [svg.getBoundingClientRect().right, ...[...svg.querySelectorAll('text, rect')]"
        ".map((one) => one.getBoundingClientRect().right)]"
    )
    assert max(edges[1:]) <= edges[0]
    tree = page.locator(".scroll-tree")
    tree.focus()
    page.keyboard.press("End")
    selected = page.locator(".tree .item.on").bounding_box()
    assert selected["x"] + selected["width"] <= 390


def test_axe_finds_no_violations(opened, scene):
    page = opened(scene, VIEW)
    for form in ("Tree", "Table"):
        page.get_by_role("tab", name=form).click()
        assert axe_violations(page) == []
