"""Comparisons with `regard look --beside` and `--steps`."""

import dataclasses
import json
import re
import shutil

import pytest
import torch

from regard.pipelines import load, save
from regard.training.checkpoint import STEPS
from regard.viewer import look

SENTENCE = "one two three"


@pytest.fixture
def run_folder(tmp_path, transformer_folder):
    """A model folder with two saved training steps."""
    folder = tmp_path / "run"
    shutil.copytree(transformer_folder, folder)
    model = load(folder, "cpu")
    for step in (40, 5):
        save(folder / STEPS / f"{step:06}", dataclasses.replace(model, training={"step": step}))
    return folder


def header(path):
    match = re.search(r'id="scene">(.*?)</script>', path.read_text(encoding="utf-8"))
    return json.loads(match[1])


def labels(path):
    return [one["label"] for one in header(path)["compared"]]


def test_compare_two_models(run, tmp_path, transformer_folder, seq2seq_folder):
    out = run("look", transformer_folder, SENTENCE, "--beside", seq2seq_folder, "--out", tmp_path / "both.html")
    assert labels(tmp_path / "both.html") == ["transformer", "seq2seq"]
    translations = [look(load(folder, "cpu"), SENTENCE).translation for folder in (transformer_folder, seq2seq_folder)]
    assert out == f"transformer\t{translations[0]}\nseq2seq\t{translations[1]}\n"


def test_models_of_the_same_name_are_labeled_by_their_paths(run, tmp_path, transformer_folder):
    other = tmp_path / "other" / "transformer"
    save(other, load(transformer_folder, "cpu"))
    page = tmp_path / "both.html"
    run("look", transformer_folder, SENTENCE, "--target", "un", "--beside", other, "--out", page)
    assert labels(page) == [str(transformer_folder), str(other)]
    assert header(page)["texts"] == {"source": SENTENCE, "target": "un"}


def test_compare_two_sentences_with_a_selected_head(run, tmp_path, transformer_folder):
    page = tmp_path / "both.html"
    options = ("--beside", "two one", "--attention", "decoder.0.cross", "--head", 1)
    run("look", transformer_folder, SENTENCE, *options, "--out", page)
    assert labels(page) == [SENTENCE, "two one"]
    assert header(page)["initial"] == {"attention": "decoder.0.cross", "head": 1, "all": False}
    run("look", transformer_folder, SENTENCE, "--beside", "two one", "--out", tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_compare_training_steps(run, tmp_path, monkeypatch, run_folder):
    monkeypatch.chdir(tmp_path)
    out = run("look", run_folder, SENTENCE, "--steps", "--layers", "*.cross")
    assert labels(tmp_path / "page.html") == ["step 5", "step 40"]
    assert [one["name"] for one in header(tmp_path / "page.html")["attentions"]] == [
        "decoder.0.cross",
        "decoder.1.cross",
    ]
    assert out.splitlines()[0].partition("\t")[0] == "step 5"
    assert header(tmp_path / "page.html")["texts"]["target"]


def test_each_training_step_prints_its_own_output(run, tmp_path, run_folder):
    """And not the translation of the last step, which the maps of all steps are given."""
    early = load(run_folder / STEPS / "000005", "cpu")
    with torch.no_grad():
        for parameter in early.model.decoder.parameters():
            parameter.neg_()
    save(run_folder / STEPS / "000005", early)
    own = {"step 5": early(SENTENCE), "step 40": load(run_folder, "cpu")(SENTENCE)}
    assert own["step 5"] != own["step 40"]
    out = run("look", run_folder, SENTENCE, "--steps", "--layers", "*.cross", "--out", tmp_path / "page.html")
    assert dict(line.split("\t") for line in out.splitlines()) == {name: text for name, text in own.items() if text}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((SENTENCE, "--steps"), "no models of single steps were saved"),
        ((SENTENCE, "--steps", "--beside", "two"), "--beside and --steps cannot be combined"),
        ((SENTENCE, "--beside", "two", "--beam", "3"), "A comparison shows only attention"),
        ((SENTENCE, "--beside", "two", "--trace"), "A comparison shows only attention"),
        ((SENTENCE, "--beside", "two", "--target", "un"), "requires both of them, and no --target"),
        ((SENTENCE, "--beside", "no/such/folder"), "model folder not found"),
        ((SENTENCE, "--beside", " "), "--beside is empty"),
        (("--beside", "two", "--live"), "Pass two sentences"),
        (("--steps",), "The input text is missing"),
    ],
)
def test_invalid_comparisons(run_error, tmp_path, monkeypatch, transformer_folder, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in " ".join(run_error("look", transformer_folder, *words).split())


def test_comparison_with_unsuitable_models(run_error, transformer_folder, blind_folder, tmp_path):
    from regard.models.vit import ViT, ViTConfig
    from regard.pipelines import ImageModel

    sizes = dict(image_height=8, image_width=8, patch=4, width=8, heads=2, layers=1, feedforward=8)
    save(tmp_path / "image_model", ImageModel(ViT(ViTConfig(labels=("a", "b"), **sizes))))
    message = run_error("look", transformer_folder, SENTENCE, "--beside", tmp_path / "image_model")
    assert "--beside and --steps are not supported for image models" in message
    assert "no attention" in run_error("look", transformer_folder, SENTENCE, "--beside", blind_folder)


def test_live_comparisons(run, monkeypatch, run_folder, transformer_folder):
    """The arguments of the server; tests/viewer/web/test_browser_comparison.py sends requests to it."""
    served = []
    monkeypatch.setattr(
        "regard.cli.inference.look._serve", lambda handler, scene, options: served.append((handler, scene)) or 0
    )
    run("look", run_folder, SENTENCE, "--steps", "--live", "--head", 1)
    run("look", run_folder, "--steps", "--live")
    run("look", transformer_folder, SENTENCE, "--beside", "two one", "--live")
    (steps, scene), (_, empty), (sentences, _) = served
    assert steps.fields == ["source", "target"]
    assert scene.header["initial"]["head"] == 1
    assert [one["label"] for one in scene.header["compared"]] == ["step 5", "step 40"]
    assert empty is None
    assert sentences.fields == ["source", "beside"]
