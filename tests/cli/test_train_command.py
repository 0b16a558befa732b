"""`regard train` and `regard demo`."""

import dataclasses
import json
import re
import tomllib

import numpy as np
import pytest
from PIL import Image

from regard.cli import demo, main
from regard.data import read_pairs
from regard.models import FAMILIES, TransformerConfig
from regard.pipelines import load
from regard.training import recipe_from_dict
from regard.training.recipe import DERIVED, TASKS, families_for

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
    path.write_text(
        "".join(f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:120]), encoding="utf-8"
    )
    return path


def read_recipe(folder):
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))["recipe"]


def test_train_from_files_only(pairs, tmp_path, capfd):
    out = tmp_path / "model"
    assert main(["train", "--data", str(pairs), "--out", str(out), *SMALL]) == 0
    assert read_recipe(out)["data"]["files"] == [str(pairs)]
    assert main(["translate", str(out), "The cat sleeps.", "--method", "greedy"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 1


def test_output_folder_is_checked_before_reading_data(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert main(["train", "--data", str(tmp_path / "missing.tsv"), "--out", str(tmp_path)]) == 2
    assert "already contains a model (config.json)" in capsys.readouterr().err


def test_command_line_overrides_recipe_and_recipe_overrides_suggestion(pairs, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[train]\nlr = 0.5\nsteps = 9\n[tokenizer]\nvocab_size = 321\n")
    assert main(["train", str(recipe), "--data", str(pairs), "--out", str(tmp_path / "m"), *SMALL]) == 0
    recipe = read_recipe(tmp_path / "m")
    assert (recipe["train"]["lr"], recipe["train"]["steps"], recipe["tokenizer"]["vocab_size"]) == (0.5, 2, 321)
    assert recipe["tokenizer"]["kind"] == "bpe"


def test_recipe_after_the_data(pairs, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[train]\nsteps = 3\nworkers = 1\n[model]\nwidth = 16\nheads = 2\n")
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "m"), "--device=cpu", str(recipe)]) == 0
    assert read_recipe(tmp_path / "m")["train"]["steps"] == 3


def test_aliases_with_a_packaged_recipe(pairs, tmp_path, capfd):
    words = ["multi30k-rnn", f"--data={pairs}", "--model.width", "16", "--tokenizer.vocab-size", "300"]
    words += ["--steps", "2", "--score=dot", "--seed", "5", "--device", "cpu", "--train.workers", "1", "--quiet"]
    assert main(["train", *words, "--out", str(tmp_path / "m")]) == 0
    recipe = read_recipe(tmp_path / "m")
    assert (recipe["model"]["family"], recipe["model"]["score"], recipe["model"]["width"]) == ("seq2seq", "dot", 16)
    assert (recipe["train"]["steps"], recipe["train"]["seed"], recipe["train"]["ema"]) == (2, 5, 0.999)
    assert capfd.readouterr() == ("", "")


def test_dry_run_prints_the_recipe_and_writes_nothing(pairs, tmp_path, capsys):
    assert main(["train", "--data", str(pairs), "--dry-run", "--steps", "7", "--out", str(tmp_path / "m")]) == 0
    assert recipe_from_dict(tomllib.loads(capsys.readouterr().out)).train.steps == 7
    assert not (tmp_path / "m").exists()


def test_fine_tuning_with_other_sizes_raises(pairs, tmp_path, run_error):
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "a"), *SMALL]) == 0
    words = ["train", "--data", pairs, "--from", tmp_path / "a", "--out", tmp_path / "b"]
    assert "whose width is 16 (got 64). Leave out --model.width." in run_error(*words, "--model.width", "64")
    assert "Leave out --tokenizer.kind." in run_error(*words, "--tokenizer.kind", "char")
    assert not (tmp_path / "b").exists()


def test_options_of_another_family(pairs, tmp_path):
    family = ["--model.family", "seq2seq", "--model.score", "concat", "--model.width", "16"]
    small = ["--train.workers", "1", "--train.steps", "2", "--train.device", "cpu"]
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "m"), *family, *small]) == 0
    assert read_recipe(tmp_path / "m")["model"]["score"] == "concat"


def test_fine_tuned_model_keeps_its_sizes(pairs, tmp_path):
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "a"), *SMALL]) == 0
    options = ["--from", str(tmp_path / "a"), "--train.workers", "1", "--train.steps", "2", "--train.device", "cpu"]
    assert main(["train", "--data", str(pairs), "--out", str(tmp_path / "b"), *options]) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["width"] == 16
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_resumed_run_keeps_its_recipe(tmp_path, capsys):
    """The second command has fewer options and more steps: the run is extended with the stored recipe."""
    small = ["--model.width", "16", "--model.heads", "2", "--model.feedforward", "32", "--train.workers", "1"]
    layers = ["--model.encoder-layers", "1", "--model.decoder-layers", "1", "--device", "cpu"]
    pairs = "".join(f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:100])
    (tmp_path / "pairs.tsv").write_text(pairs, encoding="utf-8")
    command = ["train", "--data", str(tmp_path / "pairs.tsv"), "--out", str(tmp_path / "out")]
    assert main([*command, *small, *layers, "--steps", "2"]) == 0
    capsys.readouterr()
    assert main([*command, "--steps", "3"]) == 0
    assert "Resuming from step 2 of 3." in capsys.readouterr().err
    assert main([*command, "--task", "text2text", "--steps", "3"]) == 2
    assert "holds a run with task = 'translate', not 'text2text'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model.family", "perceptron"], "model.family must be one of transformer, "),
        (["--model.family"], "--family: expected one argument"),
        (["--data", "missing.tsv"], "missing.tsv"),
        (["missing.toml"], "no such recipe"),
    ],
)
def test_invalid_input_writes_nothing(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())


def test_unknown_option_suggests_the_nearest(pairs, capsys):
    assert main(["train", "--data", str(pairs), "--train.stepz", "3"]) == 2
    assert "--train.steps" in capsys.readouterr().err


def test_demo_prints_scores_and_writes_attention(tmp_path, capfd, monkeypatch):
    full = demo.demo_recipe()
    short = dataclasses.replace(
        full,
        data=dataclasses.replace(full.data, limit=200),
        model=TransformerConfig(width=16, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1, max_len=64),
        train=dataclasses.replace(full.train, steps=2, workers=1),
    )
    monkeypatch.setattr(demo, "demo_recipe", lambda seed: short)
    monkeypatch.setattr(demo, "TEST_SENTENCES", 20)
    out = tmp_path / "the demo"
    for _ in range(2):  # the second call finds the trained model
        assert main(["demo", "--out", str(out)]) == 0
        message, notes = capfd.readouterr()
        assert f"regard translate '{out}' " in notes
        assert "The cat chased the mouse.  →" in message
        assert "alignment error rate" in message
    assert (out / "attention.png").stat().st_size > 5000
    assert '"name":"decoder.0.cross"' in (out / "attention.html").read_text(encoding="utf-8")
    assert load(out, "cpu").languages == ("en", "fr")
    assert main(["translate", str(out), "The cat.", "--to", "fr"]) == 0


def test_train_from_images_only(tmp_path, capfd):
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
    recipe = read_recipe(out)
    assert (
        recipe["augment"] | {"mixup": 0.3, "flip": 0.5, "random_ops": 2} == recipe["augment"]
    )  # given on the command line, and suggested
    assert recipe["data"]["cache"] == ""
    assert (recipe["train"]["batch_images"], recipe["model"]["width"], recipe["model"]["patch"]) == (8, 16, 2)
    assert json.loads((out / "config.json").read_text())["labels"] == ["dark", "light"]
    assert (tmp_path / "regard-cache").is_dir()
    assert main([*common, "--augment.flip", "2", "--out", str(tmp_path / "no")]) == 2
    assert "augment.flip must be between 0 and 1 (got 2.0)" in capfd.readouterr().err


@pytest.mark.parametrize(("family", "task"), {family: task for task in TASKS for family in families_for(task)}.items())
def test_help_all_lists_the_options_of_the_family(capsys, monkeypatch, family, task):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--task", task, "--model.family", family, "--help-all"]) == 0
    listed = set(re.findall(r"--model\.([\w-]+)", capsys.readouterr().out))
    config = FAMILIES[family].config
    fields = {one.name.replace("_", "-") for one in dataclasses.fields(config) if one.name not in DERIVED}
    assert listed - {"family"} == fields


def test_derived_values_are_not_options(pairs, capsys):
    assert main(["train", "--data", str(pairs), "--model.source-vocab", "7"]) == 2
    assert "--model.source-vocab" in capsys.readouterr().err


def test_for_trains_a_model_that_exports(run_error, pairs, tmp_path):
    out = tmp_path / "model"
    training = ["train", "--data", str(pairs), "--out", str(out), *SMALL]
    message = run_error(*training, "--for", "huggingface", "--model.positions", "rotary")
    assert "--for huggingface does not support positions = 'rotary'" in message
    assert "cannot be restricted to a form for onnx" in run_error(*training, "--for", "onnx", "--from", str(tmp_path))
    assert not out.exists()
    assert main([*training, "--for", "huggingface"]) == 0
    assert main(["export", str(out), "--to", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert main(["export", str(out), "--to", "ctranslate2", "--out", str(tmp_path / "ct2")]) == 0
