"""The walk of a picture: its numbers are those of the model, and a page that computes them again finds them again."""

import importlib
import json
import shutil
import subprocess

import numpy as np
import pytest
import torch

import regard
from regard.attention import SCORES, Score, record
from regard.errors import RegardError
from regard.models import ViT
from regard.models.vit import vit_pico
from regard.viewer import image_walking, walk_of, walking
from regard.viewer.image_scene import scene_of_picture
from regard.viewer.image_tape import PICTURE_OPERATIONS
from regard.viewer.image_walking import PictureWalker, walk_of_picture
from regard.viewer.image_words import PICTURE_WORDS
from regard.viewer.tape import OPERATIONS, difference
from tests.viewer.browsing import AXE, QUIET, hash_of, missing, node_program, said
from tests.viewer.seeing import KINDS, LABELS, SIZES, images
from tests.viewer.test_walking import SCRIPT, WEB, _worked_out, _write, opinionated

# Every way from pixels to tokens, every position, every way to an answer; and every score.
FORMS = {
    **KINDS,
    "convolution": dict(patches="convolution", registers=1, prefix_positions=False),
    "stem": dict(patches="stem", pooling="mean", positions="sinusoidal"),
    "rotary, class": dict(positions="rotary", registers=2, patches="stem"),
    "sinusoidal, query": dict(positions="sinusoidal", pooling="query", layer_scale=0.3),
    "grey, post": dict(channels=1, norm="post", qk_norm=True, norm_kind="rms", mean=(0.4,), std=(0.3,)),
    "means of channels": dict(mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.4), pooling="mean", activation="swiglu"),
    "distilled, mapped": dict(distilled=True, pooled_map=True, pooled_norm=True),
    "linear": dict(head="segment", pooling="class"),
    "queries": dict(head="segment", segmenter="queries", pooling="mean", registers=1, positions="rotary"),
    "features": dict(head="none", pooled_map=True),
    "pixels": dict(head="pixels", decoder_width=32, positions="none", pooling="mean"),
    **{score: dict(score=score) for score in SCORES},
}


def model_of(form: str) -> ViT:
    torch.manual_seed(0)
    return opinionated(ViT(vit_pico(**(SIZES | dict(layers=2, labels=LABELS, pooling="class") | FORMS[form]))))


def looked(form: str, model: ViT | None = None, height=8, width=12):
    model = model or model_of(form)
    picture = images(height=height, width=width)[0][: model.config.channels]
    return regard.look(model, picture)


def apart(walk, model: ViT, picture: torch.Tensor) -> float:
    """How far a walk is from the model, as whoever uses it would ask: from its output, and from its weights."""
    with torch.inference_mode(), record(model) as recording:
        own = (model.encode if model.config.head == "pixels" else model)(picture[None]).double()[0].numpy()
    tape = walk.tape
    last = tape[tape.steps[-1]["id"]]
    match model.config.head:
        case "segment":
            middles = slice(2, None, 4)  # the pixel below and right of the middle of each patch
            worst = difference(tape["output.l"], own[:, middles, middles].reshape(len(LABELS), -1).T)
        case "classify":
            worst = difference(tape["output.l"][0], own)
        case "none":
            worst = difference(last[0], own)
        case _:
            worst = difference(last, own)
    for name, one in recording.items():
        if one.calls:  # a class token answers for all in the last block
            found = one.weights()[0].numpy()
            worst = max(worst, difference(tape[f"{name}.a"][:, : found.shape[1]], found))
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_the_walk_ends_where_the_model_ends(form):
    model = model_of(form)
    for size in ((8, 12), (12, 8)):  # also on another grid than the model was made for
        seen = looked(form, model, *size)
        walk = walk_of_picture(seen)
        assert apart(walk, model, seen.run.images[0]) < 1e-5
        compared = [step["differs"] for step in walk.tape.steps if step["differs"] is not None]
        assert len(compared) > 10
        assert max(compared) < 1e-5
        assert walk.note is None


@pytest.mark.parametrize("form", ["class", "query", "stem", "queries", "distilled, mapped", "sinusoidal, query"])
def test_a_walk_is_no_copy_of_what_the_model_says(form):
    """Whichever weight changes in the model, the walk of the old one no longer fits it."""
    model = model_of(form)
    seen = looked(form, model)
    walk, picture = walk_of_picture(seen), seen.run.images[0]
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.05 * torch.randn_like(parameter)
            assert apart(walk, model, picture) > 1e-5, name
            parameter.copy_(before)
    assert apart(walk, model, picture) < 1e-5


def test_the_way_from_pixels_to_tokens():
    seen = looked("distilled")
    walk = walk_of_picture(seen)
    tape, model = walk.tape, seen.run.model
    steps = {step["id"]: step for step in tape.steps}
    names = [
        "pixels",
        "normalised",
        "token",
        "place",
        "with_place",
        "first",
        "first_place",
        "with_first_place",
        "tokens",
    ]
    assert list(steps)[:9] == [f"embedding.{name}" for name in names]
    pixels = seen.run.images[0].numpy()
    np.testing.assert_allclose(tape["embedding.pixels"][4], pixels[:, 4:, 4:8].flatten(), atol=1e-7)
    assert steps["embedding.token"]["where"] == "regard/layers/patches.py · Patches.forward"
    assert [one["name"] for one in steps["embedding.token"]["params"]] == [
        f"embedding.patches.project.{one}" for one in ("weight", "bias")
    ]
    assert tape["embedding.tokens"].shape == (4 + 6, model.config.width)
    assert walk.sides["pixels"].tokens[17] == "green 0,1"
    # A patch, its pixels and its token are followed together.
    assert walk.linked["patches"] == ("picture", [0, 0, 0, 0, 0, 1, 2, 3, 4, 5])
    assert walk.sides["picture"].tokens[4:6] == ["patch 0,0", "patch 0,1"]


def test_cells_of_a_stem_are_followed_along_with_their_patch():
    walk = walk_of_picture(looked("stem"))
    assert [name for name in walk.sides if name.startswith("cells")] == ["cells 8×12", "cells 4×6", "cells 2×3"]
    of, rows = walk.linked["cells 4×6"]
    assert of == "picture"
    assert walk.sides["cells 4×6"].tokens[rows[4]] == "cell 3,3"  # in the middle of patch 1,1


def test_it_begins_at_the_patch_that_matters_most():
    seen = looked("class")
    focus = walk_of(seen).focus
    over = seen.over_patches("blocks.1.attention")[focus["head"]]
    assert focus["attention"] == "blocks.1.attention"
    assert over.flatten()[focus["picture"] - 1] == over.max()


@pytest.mark.parametrize("form", list(FORMS)[::2])
def test_every_place_that_is_named_exists(form):
    for where in {step["where"] for step in walk_of_picture(looked(form)).tape.steps}:
        file, name = where.split(" · ")
        found = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_all_words_are_said(monkeypatch):
    heard = set()
    words = PictureWalker.words
    monkeypatch.setattr(PictureWalker, "words", lambda self, name: heard.add(name) or words(self, name))
    for form in FORMS:
        walk_of_picture(looked(form, height=12, width=8) if form == "class" else looked(form))
    assert set(PICTURE_WORDS) <= heard


# Large models and pictures


@pytest.mark.parametrize("form", ["class", "query", "queries"])
def test_of_large_models_one_layer_is_carried(monkeypatch, form):
    seen = looked(form)
    whole = walk_of_picture(seen)
    monkeypatch.setattr(walking, "WHOLE", 0)
    some = walk_of_picture(seen)
    assert some.note.startswith("The model is large: the walk carries blocks.1 alone")
    assert len(some.tape.params) < len(whole.tape.params)
    assert "blocks.1.attention.a" in some.tape
    assert "blocks.0.attention.a" not in some.tape
    assert max(step["differs"] for step in some.tape.steps if step["differs"] is not None) < 1e-5
    np.testing.assert_allclose(some.tape["output.p"], whole.tape["output.p"], atol=1e-12)


@pytest.mark.parametrize("form", ["class", "convolution", "stem"])
def test_what_is_too_large_is_shown_of_one_patch_or_given(monkeypatch, form):
    seen = looked(form)
    whole = walk_of_picture(seen)
    monkeypatch.setattr(image_walking, "STAGE", 0)
    some = walk_of_picture(seen)
    if form == "stem":
        assert "embedding.picture" not in some.tape
        assert "too large to carry" in some.tape.steps[0]["title"]
    else:
        patch = some.focus["picture"] - seen.run.model.config.prefix
        assert some.tape["embedding.pixels"].shape == (1, 48)
        np.testing.assert_array_equal(some.tape["embedding.pixels"][0], whole.tape["embedding.pixels"][patch])
        np.testing.assert_allclose(some.tape["embedding.token"][0], whole.tape["embedding.token"][patch])
    np.testing.assert_allclose(some.tape["output.p"], whole.tape["output.p"], atol=1e-6)


def test_pictures_that_are_too_large(monkeypatch):
    monkeypatch.setattr(walking, "LONGEST", 6)
    with pytest.raises(RegardError, match="7 tokens: a walk takes at most 6"):
        walk_of_picture(looked("class"))


def test_pages_of_small_models_have_a_walk(monkeypatch):
    seen = looked("query")
    header = scene_of_picture(seen).header["walk"]
    assert [one["id"] for one in header["steps"]] == [one["id"] for one in walk_of_picture(seen).tape.steps]
    assert header["sides"]["label"] == {"tokens": ["question"], "words": [-1], "of": "picture", "rows": [0] * 7}
    assert "of" not in header["sides"]["picture"]
    assert scene_of_picture(seen, walk=False).header["walk"] is None
    for module, name in ((image_walking, "FEW"), (walking, "SMALL"), (walking, "WHOLE")):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, 4)
            assert scene_of_picture(seen).header["walk"] is None
            assert scene_of_picture(seen, walk=True).header["walk"] is not None


def test_a_score_of_ones_own_has_no_walk():
    class Distance(Score):
        def pair(self, q, k):
            return -torch.cdist(q, k)

    model = model_of("class")
    model.blocks[0].attention.score = Distance()
    with pytest.raises(RegardError, match="cannot compute the score Distance"):
        walk_of_picture(looked("class", model))


# In the page


def test_the_page_finds_the_same_numbers(tmp_path):
    """One run of node for all forms; every operation says how its numbers are made."""
    for name in ("tape.js", "imagetape.js"):
        shutil.copy(WEB / name, tmp_path / name)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    forms = {str(i): form for i, form in enumerate(FORMS)}
    for number, form in forms.items():
        _write(tmp_path, number, walk_of_picture(looked(form)).tape)
    script = SCRIPT.replace("tape.mjs", "tape.js").replace(".outputs`));", ".outputs`), PICTURE_OPERATIONS);")
    script = 'import { PICTURE_OPERATIONS } from "FOLDER/imagetape.js";\n' + script
    (tmp_path / "run.mjs").write_text(script.replace("FOLDER", tmp_path.as_posix()))
    command = [node_program(), tmp_path / "run.mjs", json.dumps(list(forms))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(FORMS)
    for one in found:
        assert one["shapes"]
        assert one["worst"] < 1e-5, forms[one["name"]]
    made = [row for one in found for row in one["made"]]
    assert set(PICTURE_OPERATIONS) <= {op for op, *_ in made} <= set(PICTURE_OPERATIONS) | set(OPERATIONS)
    for op, told, number in made:
        if op in PICTURE_OPERATIONS or op == "rotate":
            assert _worked_out(told) == pytest.approx(number, abs=0.1, rel=0.1), (op, told, number)


DONE = ".walk .verdict[data-agrees]"


def test_it_is_walked_through_in_a_browser(opened):
    seen = looked("class")
    scene = scene_of_picture(seen)
    page = opened(scene, "#view=walk&at=blocks.0.attention:1")
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    steps = scene.header["walk"]["steps"]
    assert f"All {sum(step['op'] != 'given' for step in steps)} steps" in page.locator(".verdict").text_content()
    # A patch is chosen on the picture, with the pointer or with keys.
    assert page.locator(".picture-of [role=radio]").count() == 6
    page.get_by_role("radio", name="patch 0,1").click()
    assert hash_of(page)["pin"] == "2,2"
    pixels = page.locator(".step", has_text="The pixels of each patch")
    assert pixels.locator(".of").text_content().startswith("\u2068patch 0,1\u2069")
    wanted = seen.run.images[0, 0, 0, 4].item()
    assert float(pixels.locator(".cell .number").first.text_content()) == pytest.approx(wanted, abs=6e-4)
    page.get_by_role("radio", name="patch 0,1").focus()
    page.keyboard.press("ArrowDown")
    assert said(page) == "Following patch 1,1."
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "patch 1,2"
    weights = page.locator(".step[data-op=softmax]").first
    assert weights.locator(".picture-of canvas").count() == 2
    shown = [float(one) for one in weights.locator(".bar-of .number").all_text_contents()]
    assert sorted(shown) == pytest.approx(np.sort(seen.maps["blocks.0.attention"].weights[1, 6]), abs=6e-4)
    page.get_by_role("tab", name="Images").click()
    page.wait_for_selector(QUIET)
    assert page.locator(".images .reading h2").text_content() == "patch 1,2 looks atpinned"


@pytest.mark.parametrize("form", ["stem", "query", "queries", "distilled, mapped"])
def test_every_section_opens(opened, form):
    scene = scene_of_picture(looked(form))
    page = opened(scene, "#view=walk")
    page.wait_for_selector(DONE)
    assert page.locator(".verdict").get_attribute("data-agrees") == "yes"
    page.evaluate("for (const one of document.querySelectorAll('.stations details')) one.open = true")
    count = len(scene.header["walk"]["steps"])
    page.wait_for_function("count => document.querySelectorAll('.walk .step').length === count", arg=count)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_walk(opened, scheme):
    if not AXE.exists():
        missing("There is no axe-core here: npm install.")
    page = opened(scene_of_picture(looked("queries")), "#view=walk", color_scheme=scheme)
    page.wait_for_selector(DONE)
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_small_screens_scroll_only_down(opened):
    page = opened(scene_of_picture(looked("class")), "#view=walk", viewport={"width": 390, "height": 700})
    page.wait_for_selector(DONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
