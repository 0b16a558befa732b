"""`regard look --beside` and `--steps`, as a user calls them."""

import json
import re
import shutil

import pytest

from regard.folder import load, save
from regard.training.checkpoint import keep_step
from regard.viewer import look

SENTENCE = "one two three"


@pytest.fixture
def run_folder(tmp_path, transformer_folder):
    """A model, and two steps on the way to it."""
    folder = tmp_path / "run"
    shutil.copytree(transformer_folder, folder)
    model = load(folder, "cpu")
    keep_step(folder, model, 40, {})
    keep_step(folder, model, 5, {})
    return folder


def header(path):
    found = re.search(r'id="scene">(.*?)</script>', path.read_text(encoding="utf-8"))
    return json.loads(found[1])


def labels(path):
    return [one["label"] for one in header(path)["compared"]]


def test_two_models(run, tmp_path, transformer_folder, seq2seq_folder):
    out = run("look", transformer_folder, SENTENCE, "--beside", seq2seq_folder, "--out", tmp_path / "both.html")
    assert labels(tmp_path / "both.html") == ["transformer", "seq2seq"]
    own = [look(load(folder, "cpu"), SENTENCE).translation for folder in (transformer_folder, seq2seq_folder)]
    assert out == f"transformer\t{own[0]}\nseq2seq\t{own[1]}\n"


def test_models_of_one_name_are_called_by_their_folders(run, tmp_path, transformer_folder):
    other = tmp_path / "other" / "transformer"
    save(other, load(transformer_folder, "cpu"))
    page = tmp_path / "both.html"
    run("look", transformer_folder, SENTENCE, "--target", "un", "--beside", other, "--out", page)
    assert labels(page) == [str(transformer_folder), str(other)]
    assert header(page)["texts"] == {"source": SENTENCE, "target": "un"}


def test_two_sentences_and_what_the_page_opens_with(run, tmp_path, transformer_folder):
    page = tmp_path / "both.html"
    given = ("--beside", "two one", "--attention", "decoder.0.cross", "--head", 1)
    run("look", transformer_folder, SENTENCE, *given, "--out", page)
    assert labels(page) == [SENTENCE, "two one"]
    assert header(page)["opens"] == {"attention": "decoder.0.cross", "head": 1, "all": False}
    run("look", transformer_folder, SENTENCE, "--beside", "two one", "--out", tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_the_steps_of_a_run(run, tmp_path, monkeypatch, run_folder):
    monkeypatch.chdir(tmp_path)
    out = run("look", run_folder, SENTENCE, "--steps", "--layers", "*.cross")
    assert labels(tmp_path / "page.html") == ["step 5", "step 40"]
    assert [one["name"] for one in header(tmp_path / "page.html")["attentions"]] == [
        "decoder.0.cross",
        "decoder.1.cross",
    ]
    assert out.splitlines()[0].partition("\t")[0] == "step 5"
    assert header(tmp_path / "page.html")["texts"]["target"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((SENTENCE, "--steps"), "no models of single steps were saved"),
        ((SENTENCE, "--steps", "--beside", "two"), "with another, or with its own steps"),
        ((SENTENCE, "--beside", "two", "--beam", "3"), "shows their heads alone"),
        ((SENTENCE, "--beside", "two", "--walk"), "shows their heads alone"),
        ((SENTENCE, "--beside", "two", "--target", "un"), "the model's own translation"),
        ((SENTENCE, "--beside", "no/such/folder"), "there is no such model folder"),
        ((SENTENCE, "--beside", " "), "The other sentence is empty"),
        (("--beside", "two", "--live"), "Give both of them"),
        (("--steps",), "no text to look at"),
    ],
)
def test_what_cannot_be_compared(refused, tmp_path, monkeypatch, transformer_folder, words, says):
    monkeypatch.chdir(tmp_path)
    assert says in " ".join(refused("look", transformer_folder, *words).split())


def test_models_without_attention_or_of_pictures(refused, transformer_folder, blind_folder, tmp_path):
    from regard.folder import ImageModel
    from regard.models.vit import ViT, ViTConfig

    sizes = dict(image_height=8, image_width=8, patch=4, width=8, heads=2, layers=1, feedforward=8)
    save(tmp_path / "eye", ImageModel(ViT(ViTConfig(labels=("a", "b"), **sizes))))
    said = refused("look", transformer_folder, SENTENCE, "--beside", tmp_path / "eye")
    assert "Looks at pictures cannot be compared" in said
    assert "no attention" in refused("look", transformer_folder, SENTENCE, "--beside", blind_folder)


def test_live_pages_of_what_is_compared(run, monkeypatch, run_folder, transformer_folder):
    """What the server is given; tests/viewer/test_browser_comparing.py asks it."""
    served = []
    monkeypatch.setattr("regard.cli.look._serve", lambda desk, scene, options: served.append((desk, scene)) or 0)
    run("look", run_folder, SENTENCE, "--steps", "--live", "--head", 1)
    run("look", run_folder, "--steps", "--live")
    run("look", transformer_folder, SENTENCE, "--beside", "two one", "--live")
    (steps, scene), (_, blank), (sentences, _) = served
    assert steps.fields == ["source", "target"]
    assert scene.header["opens"]["head"] == 1
    assert [one["label"] for one in scene.header["compared"]] == ["step 5", "step 40"]
    assert blank is None
    assert sentences.fields == ["source", "beside"]
