"""`regard recipes` and `regard config`."""

import json
import tomllib

import pytest

from regard.cli import main
from regard.cli.config import toml_text
from regard.recipes import find_recipe, recipe_names, recipe_summary
from regard.training import Recipe, read_toml, recipe_from
from regard.training.recipe import recipe_table


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipes_are_recipes_with_a_summary(name):
    recipe = recipe_from(read_toml(find_recipe(name)), origin=name)
    assert isinstance(recipe, Recipe)
    summary = recipe_summary(name)
    assert summary.endswith(".")
    assert len(name) + len(summary) < 120


def test_recipes_are_listed_and_printed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert main(["recipes", "shakespeare"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["task"] == "language"


def test_a_wrong_name_gets_the_nearest(refused):
    assert "There is no recipe named 'shakespear'. Did you mean shakespeare?" in refused("recipes", "shakespear")


def test_the_configuration_of_a_trained_model_trains_again(tmp_path, capsys):
    small = ["--data", "phrasebook", "--data.phrasebook-size", "60", "--model.width", "16", "--model.heads", "2"]
    small += ["--steps", "1", "--train.workers", "1", "--device", "cpu", "--quiet"]
    assert main(["train", *small, "--out", str(tmp_path / "a")]) == 0
    assert main(["config", "show", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    table = tomllib.loads(shown)
    assert table["model"]["width"] == 16
    assert "# source_vocab = " in shown
    (tmp_path / "again.toml").write_text(shown, encoding="utf-8")
    assert main(["train", str(tmp_path / "again.toml"), "--quiet", "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert capsys.readouterr() == ("", "")


def test_a_model_without_a_recipe_shows_its_configuration(transformer_folder, capsys):
    assert "recipe" not in json.loads((transformer_folder / "training.json").read_text(encoding="utf-8"))
    assert main(["config", "show", str(transformer_folder)]) == 0
    table = tomllib.loads(capsys.readouterr().out)
    assert table.keys() == {"model"}
    assert table["model"]["family"] == "transformer"
    assert isinstance(recipe_from(table), Recipe)


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_damaged_training_json_is_a_sentence(transformer_folder, tmp_path, refused, content):
    (tmp_path / "config.json").write_bytes((transformer_folder / "config.json").read_bytes())
    (tmp_path / "training.json").write_text(content)
    assert "training.json: not " in refused("config", "show", tmp_path)


def test_toml_is_read_back():
    names = ('a "quoted" name', "é\t\n\\ \x7f", "日本")
    table = recipe_table(recipe_from({"data": {"files": names}}))
    read = tomllib.loads(toml_text(table))
    assert read["data"]["files"] == list(names)
    assert read["tokenizer"]["target_kind"] == read["tokenizer"]["kind"]
    assert recipe_from(read).train == Recipe().train
