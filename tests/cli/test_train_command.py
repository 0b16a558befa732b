"""`regard train` and `regard demo` as a user calls them."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image

from regard.cli import demo, main
from regard.data import phrasebook_pairs
from regard.models import FAMILIES, TransformerConfig
from regard.train.recipe import DERIVED, FAMILIES_FOR

SMALL = [
    "--train.workers",
    "1",
    "--train.steps",
    "2",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--train.device",
    "cpu",
]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{p.source}\t{p.target}\n" for p in phrasebook_pairs("train", 120)), encoding="utf-8")
    return path


def recipe_of(folder):
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))["recipe"]


def test_files_alone_give_a_model(pairs, tmp_path, capfd):
    out = tmp_path / "model"
    assert main(["train", "--data", str(pairs), "--out", str(out), *SMALL]) == 0
    assert recipe_of(out)["data"]["files"] == [str(pairs)]
    assert main(["translate", str(out), "The cat sleeps.", "--method", "greedy"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 1


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_suggestion(pairs, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[train]\nlr = 0.5\nsteps = 9\n[tokenizer]\nvocab_size = 321\n")
    assert main(["train", str(recipe), "--data", str(pairs), "--out", str(tmp_path / "m"), *SMALL]) == 0
    made = recipe_of(tmp_path / "m")
    assert (made["train"]["lr"], made["train"]["steps"], made["tokenizer"]["vocab_size"]) == (0.5, 2, 321)
    assert made["tokenizer"]["kind"] == "bpe"


def test_another_family_brings_its_own_options(pairs, tmp_path):
    family = ["--model.family", "seq2seq", "--model.score", "concat", "--model.width", "16"]
    small = ["--train.workers", "1", "--train.steps", "2", "--train.device", "cpu"]
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "m"), *family, *small]) == 0
    assert recipe_of(tmp_path / "m")["model"]["score"] == "concat"


def test_going_on_from_a_trained_model_keeps_its_sizes(pairs, tmp_path):
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "a"), *SMALL]) == 0
    again = ["--from", str(tmp_path / "a"), "--train.workers", "1", "--train.steps", "2", "--train.device", "cpu"]
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "b"), *again]) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["width"] == 16
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model.family", "perceptron"], "model.family must be one of transformer, "),
        (["--model.family"], "--model.family wants a name"),
        (["--data", "missing.tsv"], "missing.tsv"),
        (["missing.toml"], "no such recipe"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_names_the_nearest(pairs, capsys):
    assert main(["train", "--data", str(pairs), "--train.stepz", "3"]) == 2
    assert "--train.steps" in capsys.readouterr().err


def test_the_demo_measures_shows_and_draws(tmp_path, capfd, monkeypatch):
    whole = demo.demo_recipe()
    short = dataclasses.replace(
        whole,
        data=dataclasses.replace(whole.data, phrasebook_size=200),
        model=TransformerConfig(width=16, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1, max_len=64),
        train=dataclasses.replace(whole.train, steps=2, workers=1),
    )
    monkeypatch.setattr(demo, "demo_recipe", lambda seed: short)
    monkeypatch.setattr(demo, "TEST_SENTENCES", 20)
    for _ in range(2):  # a second call finds the model there
        assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
        said = capfd.readouterr().out
        assert "The cat chased the mouse.  →" in said
        assert "alignment error rate" in said
    assert (tmp_path / "demo" / "attention.png").stat().st_size > 5000
    assert '"name":"decoder.0.cross"' in (tmp_path / "demo" / "attention.html").read_text(encoding="utf-8")


def test_pictures_alone_give_a_model(tmp_path, capfd):
    random = np.random.default_rng(0)
    for label, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(12):
            noise = random.normal(shade, 20, (18, 20, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noise).save(tmp_path / "photos" / label / f"{i}.png")
    out = tmp_path / "model"
    common = ["train", "--task", "classify-images", "--data", str(tmp_path / "photos"), "--data.size", "16"]
    small = ["--model.layers", "1", "--augment.mixup", "0.3", "--train.batch-images", "8"]
    assert main([*common, "--out", str(out), *SMALL, *small]) == 0
    assert "Try: regard classify" in capfd.readouterr().err
    made = recipe_of(out)
    assert made["augment"] | {"mixup": 0.3, "flip": 0.5, "random_ops": 2} == made["augment"]  # named, and suggested
    assert made["data"]["cache"] == ""
    assert (made["train"]["batch_images"], made["model"]["width"], made["model"]["patch"]) == (8, 16, 2)
    assert json.loads((out / "config.json").read_text())["labels"] == ["dark", "light"]
    assert (tmp_path / "regard-cache").is_dir()
    assert main([*common, "--augment.flip", "2", "--out", str(tmp_path / "no")]) == 2
    assert "augment.flip must be between 0 and 1 (got 2.0)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "task"), {family: task for task, known in FAMILIES_FOR.items() for family in known}.items()
)
def test_help_shows_what_can_be_said_and_no_more(capsys, monkeypatch, family, task):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--task", task, "--model.family", family, "--help"]) == 0
    shown = set(re.findall(r"--model\.([\w-]+)", capsys.readouterr().out))
    config = FAMILIES[family].config
    fields = {one.name.replace("_", "-") for one in dataclasses.fields(config) if one.name not in DERIVED}
    assert shown - {"family"} == fields


def test_what_follows_from_the_data_is_no_option(pairs, capsys):
    assert main(["train", "--data", str(pairs), "--model.source-vocab", "7"]) == 2
    assert "--model.source-vocab" in capsys.readouterr().err
