"""`regard recipes` and `regard config`."""

import json
import tomllib

import pytest

from regard.cli import main
from regard.cli.config import toml_text
from regard.models.transformer import transformer_base
from regard.recipes import find_recipe, recipe_names, recipe_summary
from regard.training import Recipe, read_toml, recipe_from_dict
from regard.training.recipe import recipe_to_dict
from regard.training.schedules import Schedule


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipes_are_valid_and_have_a_summary(name):
    recipe = recipe_from_dict(read_toml(find_recipe(name)), origin=name)
    assert isinstance(recipe, Recipe)
    summary = recipe_summary(name)
    assert summary.endswith(".")
    assert len(name) + len(summary) < 120


def test_transformer_base_is_that_of_the_paper():
    """Vaswani et al. 2017, sections 3, 5.3 and 5.4, and table 3."""
    recipe = recipe_from_dict(read_toml(find_recipe("transformer-base")))
    assert recipe.model == transformer_base(max_len=recipe.model.max_len)
    train = recipe.train
    assert (train.optimizer, train.beta2, train.label_smoothing) == ("adam", 0.98, 0.1)
    assert train.batch_tokens * train.accumulate == 25_000
    schedule = Schedule(train.schedule, train.lr, train.warmup, train.steps)
    for step in (1, 400, 4000, 100_000):
        assert schedule.rate(step - 1) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=0.01)
    notes = recipe_from_dict(read_toml(find_recipe("transformer-notes"))).model
    assert (notes.norm, notes.activation, notes.positions) == ("post", "relu", "sinusoidal")


def test_recipes_are_listed_and_printed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert main(["recipes", "shakespeare"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["task"] == "language"


def test_unknown_recipe_suggests_the_nearest(run_error):
    assert "There is no recipe named 'shakespear'. Did you mean shakespeare?" in run_error("recipes", "shakespear")


def test_config_show_reproduces_a_training_run(tmp_path, capsys):
    small = ["--data", "phrasebook", "--data.limit", "60", "--model.width", "16", "--model.heads", "2"]
    small += ["--steps", "1", "--train.workers", "1", "--device", "cpu", "--quiet"]
    assert main(["train", *small, "--out", str(tmp_path / "a")]) == 0
    assert main(["config", "show", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    table = tomllib.loads(output)
    assert table["model"]["width"] == 16
    assert "# source_vocab = " in output
    (tmp_path / "shown.toml").write_text(output, encoding="utf-8")
    assert main(["train", str(tmp_path / "shown.toml"), "--quiet", "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert capsys.readouterr() == ("", "")


def test_config_show_without_recipe_prints_the_model(transformer_folder, capsys):
    assert "recipe" not in json.loads((transformer_folder / "training.json").read_text(encoding="utf-8"))
    assert main(["config", "show", str(transformer_folder)]) == 0
    table = tomllib.loads(capsys.readouterr().out)
    assert table.keys() == {"model"}
    assert table["model"]["family"] == "transformer"
    assert isinstance(recipe_from_dict(table), Recipe)


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_damaged_training_json(transformer_folder, tmp_path, run_error, content):
    (tmp_path / "config.json").write_bytes((transformer_folder / "config.json").read_bytes())
    (tmp_path / "training.json").write_text(content)
    assert "training.json: not " in run_error("config", "show", tmp_path)


def test_toml_round_trip():
    names = ('a "quoted" name', "é\t\n\\ \x7f", "日本")
    table = recipe_to_dict(recipe_from_dict({"data": {"files": names}}))
    read = tomllib.loads(toml_text(table))
    assert read["data"]["files"] == list(names)
    assert read["tokenizer"]["target_kind"] == read["tokenizer"]["kind"]
    assert recipe_from_dict(read).train == Recipe().train
