"""Traces of images agree with the model, and the page computes the same numbers."""

import importlib

import numpy as np
import pytest
import torch

from regard.attention import record
from regard.errors import RegardError
from regard.models import ViT
from regard.viewer import build_trace, model_run
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.trace import build
from regard.viewer.trace.steps import Trace, difference
from tests.viewer.browser import QUIET, announced, axe_violations, hash_of
from tests.viewer.image_helpers import LABELS
from tests.viewer.image_models import FORMS, cached_look, make_look, model_of
from tests.viewer.trace.test_text import Distance, check_expressions, in_node, shown
from tests.viewer.web.test_browser_steps import open_list


def max_difference(trace: Trace, model: ViT, image: torch.Tensor) -> float:
    """The largest difference of a trace from the output and the attention weights of the model."""
    with torch.inference_mode(), record(model) as recording:
        own = (model.encode if model.config.head == "pixels" else model)(image[None]).double()[0].numpy()
    last = trace[shown(trace)[-1]["id"]]
    match model.config.head:
        case "segment":
            centers = slice(2, None, 4)  # the pixel below and to the right of the center of each patch
            worst = difference(trace["output.l"], own[:, centers, centers].reshape(len(LABELS), -1).T)
        case "classify":
            worst = difference(trace["output.l_mean" if model.config.distilled else "output.l"], own)
        case _:
            worst = difference(last, own)
    for name, one in recording.items():
        if one.calls:  # the last block of the forward computes the class token only
            found = one.weights()[0].numpy()
            worst = max(worst, difference(trace[f"{name}.a"][:, : found.shape[1]], found))
    return worst


# Includes grids other than that of the config.
@pytest.mark.parametrize(
    ("form", "size"), [*((form, (8, 12)) for form in FORMS), *((form, (12, 8)) for form in ("class", "stem", "rotary"))]
)
def test_trace_agrees_with_the_model(form, size):
    seen = cached_look(form, *size)
    made = build_trace(seen)
    assert max_difference(made, seen.run.model, seen.run.images[0]) < 1e-5
    compared = [step["differs"] for step in made.steps if step["differs"] is not None]
    assert len(compared) > 10
    assert max(compared) < 1e-5
    assert made.note is None
    titles = {step["title"] for step in shown(made)}
    assert not titles & {"Add", "Multiply", "Divide", "Matrix product", "Linear layer", "Concatenate", "Stack", "Mask"}
    for where in {step["where"] for step in shown(made)}:
        file, name = where.split(" · ")
        found = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


@pytest.mark.parametrize("form", ["class", "query", "stem", "queries", "distilled"])
def test_trace_depends_on_every_parameter(form):
    """A trace of the old weights no longer agrees after any parameter has changed."""
    seen = make_look(model_of(form))
    model, image = seen.run.model, seen.run.images[0]
    trace = build_trace(cached_look(form))
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.05 * torch.randn_like(parameter)
            assert max_difference(trace, model, image) > 1e-5, name
            parameter.copy_(before)
    assert max_difference(trace, model, image) < 1e-5


def test_steps_from_pixels_to_tokens():
    seen = cached_look("distilled")
    made = build_trace(seen)
    trace, model = made, seen.run.model
    steps = {step["id"]: step for step in shown(trace)}
    names = ["image", "normalized", "pixels", "token", "with_position", "prefix", "tokens"]
    assert list(steps)[:7] == [f"embedding.{name}" for name in names]
    image = seen.run.images[0].numpy()
    np.testing.assert_allclose(trace["embedding.image"], image, atol=1e-7)
    np.testing.assert_allclose(trace["embedding.pixels"][4], (image[:, 4:, 4:8].flatten() - 0.5) / 0.5, atol=1e-6)
    assert steps["embedding.token"]["where"] == "regard/layers/patches.py · PatchEmbedding.forward"
    assert [one["name"] for one in steps["embedding.token"]["inputs"][1:]] == [
        f"embedding.patches.project.{one}" for one in ("weight", "bias")
    ]
    assert trace["embedding.tokens"].shape == (4 + 6, model.config.width)
    assert made.sides["pixels"].tokens[17] == "green 0,1"
    # The selection of a patch selects its pixels and its token.
    assert made.linked["patches"] == ("image", [0, 0, 0, 0, 0, 1, 2, 3, 4, 5])
    assert made.sides["image"].tokens[4:6] == ["patch 0,0", "patch 0,1"]


def test_cells_of_a_stem_follow_the_selected_patch():
    made = build_trace(cached_look("stem"))
    assert {name for name in made.sides if name.startswith("cells")} == {"cells 8×12", "cells 4×6"}
    of, rows = made.linked["cells 4×6"]
    assert of == "image"
    assert made.sides["cells 4×6"].tokens[rows[4]] == "cell 3,3"  # at the center of patch 1,1


def test_initial_selection_is_the_patch_with_the_largest_weight():
    seen = cached_look("class")
    focus = build_trace(seen).focus
    over = seen.patch_weights("blocks.1.attention")[focus["head"]]
    assert focus["attention"] == "blocks.1.attention"
    assert over.flatten()[focus["image"] - 1] == over.max()


# Large models and images


@pytest.mark.parametrize("form", ["class", "query", "queries"])
def test_trace_of_a_large_model_contains_one_layer(monkeypatch, form):
    seen = cached_look(form)
    whole = build_trace(seen)
    monkeypatch.setattr(model_run, "MAX_MODEL_BYTES", 0)
    made = build_trace(seen)
    assert made.note.startswith("The model is large: only the steps of blocks.1 are shown")
    assert len(made.params) < len(whole.params)
    assert "blocks.1.attention.a" in made
    assert "blocks.0.attention.a" not in made
    assert max(step["differs"] for step in made.steps if step["differs"] is not None) < 1e-5
    np.testing.assert_allclose(made["output.p"], whole["output.p"], atol=1e-12)


@pytest.mark.parametrize("form", ["class", "convolution", "stem"])
def test_patch_embeddings_of_large_images_are_precomputed(monkeypatch, form):
    seen = cached_look(form)
    whole = build_trace(seen)
    monkeypatch.setattr(build, "MAX_PIXEL_BYTES", 0)
    some = build_trace(seen)
    assert "embedding.image" not in some
    assert "too large to include" in shown(some)[0]["title"]
    assert len(some.params) + len(some.outputs) < len(whole.params) + len(whole.outputs)
    np.testing.assert_allclose(some["output.p"], whole["output.p"], atol=1e-6)


def test_too_large_images_raise_an_error(monkeypatch):
    monkeypatch.setattr(build, "MAX_TOKENS", 6)
    with pytest.raises(RegardError, match="7 tokens; the step-by-step view supports at most 6"):
        build_trace(cached_look("class"))


def test_scenes_of_small_models_contain_a_trace(monkeypatch):
    seen = cached_look("query")
    header = build_image_scene(seen).header["trace"]
    assert [one["id"] for one in header["steps"]] == [one["id"] for one in build_trace(seen).steps]
    assert header["sides"]["label"] == {"tokens": ["query"], "words": [-1], "of": "image", "rows": [0] * 7}
    assert "of" not in header["sides"]["image"]
    assert build_image_scene(seen, trace=False).header["trace"] is None
    for module, name in ((model_run, "MAX_PATCHES"), (build, "MAX_DEFAULT_BYTES"), (model_run, "MAX_MODEL_BYTES")):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, 4)
            assert build_image_scene(seen).header["trace"] is None
            assert build_image_scene(seen, trace=True).header["trace"] is not None


def test_custom_score_without_labels():
    model = model_of("class")
    model.blocks[0].attention.score = Distance()
    seen = make_look(model)
    assert max_difference(build_trace(seen), model, seen.run.images[0]) < 1e-5


# In the page


def test_page_computes_the_same_numbers(tmp_path):
    for form, one in in_node(tmp_path, {form: build_trace(cached_look(form)) for form in FORMS}).items():
        assert one["worst"] < 1e-5, form
        check_expressions(form, one["made"])


DONE = ".steps-view .verdict[data-agrees]"


def test_trace_in_a_browser(opened):
    seen = cached_look("class")
    scene = build_image_scene(seen)
    page = opened(scene, "#view=steps&depth=numbers&at=blocks.0.attention:1")
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    steps = [step for step in scene.header["trace"]["steps"] if step["title"] and step["op"] != "given"]
    assert f"All {len(steps)} steps" in page.locator(".verdict").text_content()
    # A patch is selected on the image by pointer or keys.
    assert page.locator(".small-image [role=radio]").count() == 6
    page.get_by_role("radio", name="patch 0,1").click()
    assert hash_of(page)["pin"] == "2,2"
    open_list(page)
    page.locator(".sections summary").first.click()  # the other sections are collapsed
    pixels = page.locator(".step", has_text="Pixels per patch")
    assert pixels.locator(".value-subject").text_content().startswith("\u2068patch 0,1\u2069")
    wanted = (seen.run.images[0, 0, 0, 4].item() - 0.5) / 0.5
    assert float(pixels.locator(".cell .number").first.text_content().replace("−", "-")) == pytest.approx(
        wanted, abs=6e-4
    )
    page.get_by_role("radio", name="patch 0,1").focus()
    page.keyboard.press("ArrowDown")
    assert announced(page) == "Selected patch 1,1."
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "patch 1,2"
    weights = page.locator(".step[data-op=softmax]").first
    assert weights.locator(".small-image canvas").count() == 2
    shown = [float(one) for one in weights.locator(".bar-button .number").all_text_contents()]
    assert sorted(shown) == pytest.approx(np.sort(seen.maps["blocks.0.attention"].weights[1, 6]), abs=6e-4)
    page.get_by_role("tab", name="Attention", exact=True).first.click()
    page.wait_for_selector(QUIET)
    assert page.locator(".images .reading h2").text_content() == "patch 1,2 attends topinned"


@pytest.mark.parametrize("form", ["stem", "query", "queries", "distilled"])
def test_every_section_opens(opened, form):
    scene = build_image_scene(cached_look(form))
    page = opened(scene, "#view=steps&depth=numbers")
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    page.evaluate("for (const one of document.querySelectorAll('.sections details')) one.open = true")
    count = sum(bool(step["title"]) for step in scene.header["trace"]["steps"])
    page.wait_for_function("count => document.querySelectorAll('.steps-view .step').length === count", arg=count)


def test_axe_reports_no_violations_in_the_trace(opened):
    page = opened(build_image_scene(cached_look("queries")), "#view=steps&depth=numbers")
    page.wait_for_selector(DONE)
    assert axe_violations(page) == []


def test_small_screens_need_no_horizontal_scrolling(opened):
    page = opened(
        build_image_scene(cached_look("class")), "#view=steps&depth=numbers", viewport={"width": 390, "height": 700}
    )
    page.wait_for_selector(DONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
