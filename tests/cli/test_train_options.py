"""Options of `regard train`: names, aliases, position of the recipe, help."""

import re
from pathlib import Path

import pytest

from regard.cli import main
from regard.cli.train import parse_arguments
from regard.cli.train_options import (
    ALIASES,
    CHOSEN,
    FROM_DATA,
    SHORT,
    chosen_keys,
    every_option,
    key_options,
    recipe_keys,
)
from regard.models import FAMILIES, family_name
from regard.training import DataConfig, Recipe
from regard.training.recipe import SECTIONS, TASKS, families_for
from tests.training import toy_images, toy_tasks
from tests.training.helpers import plan


@pytest.mark.parametrize(
    "words",
    [
        ["r.toml", "--data", "a.tsv", "--out", "m"],
        ["--data", "a.tsv", "--out", "m", "r.toml"],
        ["--data", "a.tsv", "r.toml", "--out", "m"],
        ["--data=a.tsv", "r.toml", "--out=m"],
        ["--out", "m", "r.toml", "--data", "a.tsv"],
        ["--quiet", "r.toml", "--out", "m", "--data", "a.tsv"],
        ["--train.deterministic", "r.toml", "--out", "m", "--data", "a.tsv"],
        ["--data", "a.tsv", "--out", "m", "r.toml", "--data.both-directions"],
    ],
)
def test_recipe_at_any_position(words):
    arguments = parse_arguments(words)
    assert (arguments.recipe, arguments.out, arguments.options["data.files"]) == ("r.toml", "m", ["a.tsv"])


def test_packaged_recipe_after_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_arguments(["--data", "a.tsv", "sst2"]).recipe == "sst2"
    Path("sst2").touch()
    assert parse_arguments(["--data", "a.tsv", "sst2"]).options["data.files"] == ["a.tsv", "sst2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.toml", "b.toml", "--data", "x.tsv"], "Expected one recipe, got two: a.toml and b.toml. Pass one."),
        (["a.toml", "--data", "x.tsv", "b.toml"], "Expected one recipe, got two"),
        (["sst2", "--data", "x.tsv", "cifar10"], "Expected one recipe, got two: sst2 and cifar10."),
        (["pairs.tsv"], "pairs.tsv is not a recipe. Did you mean --data pairs.tsv?"),
        (["a.en", "a.fr"], "a.en is not a recipe. Did you mean --data a.en a.fr?"),
        (["r.toml", "a.tsv"], "Unexpected argument a.tsv. Did you mean --data a.tsv?"),
        (["multi30k-transfomer"], "no recipe named 'multi30k-transfomer'. Did you mean multi30k-transformer?"),
        (["recipes/sst2.toml"], "recipes/sst2.toml: no such recipe. Did you mean sst2?"),
        (["--data", "r.toml"], "--data: expected at least one file."),
        (["--data"], "--data: expected at least one argument."),
        (["--steps"], "--steps: expected one argument."),
        (["--stepz", "5"], "Unknown option --stepz. Did you mean --steps?"),
        (["--train.stepz=5"], "Unknown option --train.stepz. Did you mean --train.steps?"),
        (["--data", "a.tsv", "--step", "5"], "Unknown option --step. Did you mean --steps?"),
        (["--data", "a.tsv", "--steps", "1.5"], "--steps must be an integer (got '1.5')."),
        (["--data", "a.tsv", "--train.clip", "much"], "--train.clip must be a number (got 'much')."),
        (["--data", "a.tsv", "--model.tied", "perhaps"], "--model.tied must be true or false (got 'perhaps')."),
        (["--data", "a.tsv", "--device", "gpu"], "train.device must be one of"),
        (
            ["--data", "a.tsv", "--score", "dott"],
            "--score dott is not an attention score. Choose from: dot, scaled_dot,",
        ),
        (["--data", "a.tsv", "--model.cell", "gru"], "--model.cell is not an option of the family transformer."),
        (["--data", "a.tsv", "--out", ""], "--out is empty. Pass a folder."),
        ([], "No training data is given. Pass --data FILE."),
        (["multi30k-rnn"], "No training data is given. Pass --data FILE."),
        (
            ["--task", "language", "--data", "phrasebook"],
            "The built-in sentence pairs, for the task translate, are phrasebook",
        ),
    ],
)
def test_invalid_arguments_write_nothing(words, message, tmp_path, monkeypatch, run_error):
    monkeypatch.chdir(tmp_path)
    assert message in run_error("train", *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--train.steps", "5"], ["--steps", "5"], ["--steps=5"], ["--train.steps=5"]])
def test_spellings_of_an_option(words):
    assert parse_arguments(words).options == {"train.steps": "5"}


def test_values_are_converted():
    words = ["--data=-", "--lr", "1", "--model.tied", "False", "--tokenizer.target_kind", "none", "--device=cpu"]
    words += ["--data.weights", "1", "0.5", "--train.r-drop", "-1", "--task=text2text", "--model.family=transformer"]
    values = parse_arguments(words).options
    assert recipe_keys(values, "transformer") == {
        "data": {"files": ("-",), "weights": (1.0, 0.5)},
        "train": {"lr": 1.0, "r_drop": -1.0, "device": "cpu"},
        "model": {"tied": False},
        "tokenizer": {"target_kind": None},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_score_sets_the_score_keys_of_the_family(family):
    scores = recipe_keys({"score": "cosine"}, family)["model"]
    transformer_keys = {"encoder_score", "decoder_score", "cross_score"}
    assert scores.keys() == (transformer_keys if family == "transformer" else {"score"})
    assert set(scores.values()) == {"cosine"}
    name = next(iter(scores))
    assert recipe_keys({"score": "cosine", f"model.{name}": "dot"}, family)["model"][name] == "dot"


@pytest.mark.parametrize("task", TASKS)
def test_help_fits_one_screen(task, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--task", task, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    known = [name for name in SHORT if name not in ALIASES or ALIASES[name].key in every_option()]
    assert re.findall(r"^  --([\w-]+)", "\n".join(lines), re.M) == known
    assert not re.search(r"\b(STR|INT|FLOAT|None|True|False)\b", "\n".join(lines))


def test_invalid_recipe_section(tmp_path, run_error):
    (tmp_path / "r.toml").write_text("model = 5\n")
    for words in (["--family", "gpt"], ["--data", "x.tsv"], ["-h"]):
        assert "model must be a table" in run_error("train", tmp_path / "r.toml", *words)


def test_help_shows_recipe_values_as_defaults(capsys):
    assert main(["train", "multi30k-rnn", "--steps", "7", "--help-all"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "--steps, --train.steps N number of training steps (default: 2000)" in output
    assert "[model] of the family seq2seq --model.width N width of embeddings and states (default: 384)" in output


def small_data(task: str, folder: Path) -> list[DataConfig]:
    if task == "translate":
        words = folder / "words.tsv"
        words.write_text("".join(f"w{i}o\tw e {i % 10} d\n" for i in range(120)), encoding="utf-8")
        return [DataConfig(limit=100), DataConfig(files=(str(words),))]
    return [(toy_images if task in toy_images.EXTRA_METRICS else toy_tasks).toy(task, folder).data]


@pytest.mark.parametrize("task", TASKS)
def test_help_marks_values_chosen_from_the_data(task, tmp_path):
    """All other defaults in the help are those of a run with data only."""
    for data in small_data(task, tmp_path):
        recipe, _ = plan(task, data)
        family = family_name(recipe.model)
        assert family == families_for(task)[0]
        plain = Recipe(task, model=FAMILIES[family].config())
        for section in set(SECTIONS) - {"data"}:
            planned, default = vars(getattr(recipe, section)), vars(getattr(plain, section))
            differing = {name for name in planned if planned[name] != default[name]}
            assert differing <= chosen_keys(section, task, family), f"[{section}]"


def test_other_families_show_their_real_defaults():
    """Sizes are suggested for one family per task; only that family shows them as chosen from the data."""
    assert CHOSEN.keys() & FAMILIES.keys() == {families_for(task)[0] for task in TASKS}
    assert key_options("translate", "seq2seq")["model.width"].default == "256"
    assert key_options("translate", "transformer")["model.width"].default == FROM_DATA
    assert key_options("translate", "transformer")["model.activation"].default == "relu"
