"""Recipes: reading from TOML, defaults and error messages."""

import tomllib

import pytest

from regard.errors import RegardError
from regard.models import FAMILIES, Seq2SeqConfig, TransformerConfig
from regard.training import DataConfig, Recipe, TokenizerConfig, TrainConfig, read_toml, recipe_from_dict
from regard.training.recipe import TASKS, families_for, recipe_to_dict
from tests.training.helpers import as_toml

TEXT = """
task = "translate"

[data]
files = ["a.en", "a.fr"]

[tokenizer]
kind = "word"
target_kind = "char"
shared = false

[model]
family = "seq2seq"
width = 64
score = "concat"

[train]
lr = 1
steps = 7
optimizer = "sgd"
"""


def test_recipe_keys_override_the_defaults(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT, encoding="utf-8")
    recipe = recipe_from_dict(read_toml(path), origin=str(path))
    assert recipe.data == DataConfig(files=("a.en", "a.fr"))
    assert recipe.tokenizer == TokenizerConfig(kind="word", target_kind="char", shared=False)
    assert recipe.model == Seq2SeqConfig(width=64, score="concat")
    assert recipe.train == TrainConfig(lr=1.0, steps=7, optimizer="sgd")
    assert type(recipe.train.lr) is float


@pytest.mark.parametrize("task", TASKS)
def test_recipe_round_trip_through_toml(task):
    recipe = Recipe(
        task=task,
        data=DataConfig(files=("x.tsv",), validation=("é.tsv",)),
        tokenizer=TokenizerConfig(kind="char", target_kind="space"),
        model=FAMILIES[families_for(task)[-1]].config(width=32),
        train=TrainConfig(lr=1e-5, validate_by="bleu", deterministic=True),
    )
    assert recipe_from_dict(tomllib.loads(as_toml(recipe_to_dict(recipe)))) == recipe


def test_missing_keys_come_from_the_base():
    base = Recipe(model=TransformerConfig(width=48), train=TrainConfig(steps=9))
    assert recipe_from_dict({"train": {"lr": 0.5}}, base) == Recipe(
        model=TransformerConfig(width=48), train=TrainConfig(steps=9, lr=0.5)
    )
    # another family has other settings: those of the base do not apply
    assert recipe_from_dict({"model": {"family": "seq2seq"}}, base).model == Seq2SeqConfig()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trian": {}}, "r.toml: unknown key trian. Did you mean train?"),
        ({"train": {"step": 3}}, "r.toml: unknown key train.step. Did you mean train.steps?"),
        ({"model": {"widht": 3}}, "r.toml: unknown key model.widht. Did you mean model.width?"),
        ({"model": {"source_vocab": 3}}, "r.toml: unknown key model.source_vocab. Did you mean"),
        ({"data": {"family": "x"}}, "r.toml: unknown key data.family."),
        ({"train": {"steps": "many"}}, "r.toml: train.steps must be an integer (got 'many')."),
        ({"train": {"steps": 1.5}}, "r.toml: train.steps must be an integer (got 1.5)."),
        ({"train": {"steps": True}}, "r.toml: train.steps must be an integer (got True)."),
        ({"train": {"lr": "0.1"}}, "r.toml: train.lr must be a number (got '0.1')."),
        ({"train": {"lr": True}}, "r.toml: train.lr must be a number (got True)."),
        ({"train": {"compile": 1}}, "r.toml: train.compile must be true or false (got 1)."),
        (
            {"train": {"optimizer": "adan"}},
            "r.toml: train.optimizer must be one of adam, adamw, muon, sgd (got 'adan'). Did you",
        ),
        ({"train": {"optimizer": 3}}, "r.toml: train.optimizer must be one of adam, adamw, muon, sgd (got 3)."),
        ({"train": {"schedule": "noam"}}, "r.toml: train.schedule must be one of "),
        ({"train": {"precision": "fp8"}}, "r.toml: train.precision must be one of "),
        ({"tokenizer": {"kind": "unigrams"}}, "r.toml: tokenizer.kind must be one of "),
        ({"tokenizer": {"target_kind": "words"}}, "r.toml: tokenizer.target_kind must be one of "),
        ({"tokenizer": {"target_kind": 4}}, "r.toml: tokenizer.target_kind must be one of "),
        ({"model": {"norm": "middle"}}, "r.toml: model.norm must be one of "),
        ({"model": {"positions": "none at all"}}, "r.toml: model.positions must be one of "),
        ({"model": {"cross_score": "dots"}}, "r.toml: model.cross_score must be one of "),
        ({"model": {"family": "seq2seq", "cell": "rnnn"}}, "r.toml: model.cell must be one of "),
        ({"model": {"family": "gtp"}}, "r.toml: model.family must be one of transformer, "),
        (
            {"task": "mask", "model": {"family": "gpt"}},
            "r.toml: the model family gpt does not support the task mask. Set model.family to bert.",
        ),
        ({"task": "sing"}, "r.toml: task must be one of translate, "),
        ({"train": 5}, "r.toml: train must be a table."),
        ({"data": {"files": [1, 2]}}, "r.toml: data.files[0] must be text (got 1)."),
        ({"data": {"weights": [1.0, 0]}}, "r.toml: data.weights[1] must be above 0 (got 0)."),
        ({"data": {"weights": -0.5}}, "r.toml: data.weights[0] must be above 0 (got -0.5)."),
        (
            {"train": {"lr": float("nan")}},
            "r.toml: train.lr must be above 0 and at most 100 (got nan). Leave it out for the default.",
        ),
        ({"train": {"dropout": 1.5}}, "r.toml: unknown key train.dropout."),
        ({"train": {"time": "0"}}, "r.toml: train.time = '0' is not a valid duration."),
        ({"model": {"dropout": 1.5}}, "r.toml: model.dropout must be at least 0 and below 1 (got 1.5)."),
        ({"model": {"heads": 0}}, "r.toml: model.heads must be at least 1 (got 0)."),
        ({"model": {"width": 10**10}}, "r.toml: model.width must be at most 1,000,000,000 (got 10000000000)."),
        ({"train": {"seed": -1}}, "r.toml: train.seed must be between 0 and 9,223,372,036,854,775,807 (got -1)."),
        ({"tokenizer": {"vocab_size": 0}}, "r.toml: tokenizer.vocab_size must be between 6 and 10,000,000 (got 0)."),
        ({"data": {"files": 5}}, "r.toml: data.files[0] must be text (got 5)."),
    ],
)
def test_invalid_recipes_are_errors(table, message):
    with pytest.raises(RegardError) as caught:
        recipe_from_dict(table, origin="r.toml")
    assert str(caught.value).startswith(message)


def test_missing_recipe_file_is_an_error(tmp_path):
    with pytest.raises(RegardError, match=r"none\.toml: no such recipe"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"[train]\nsteps = = 3\n", b"[train]\nlr = \xff\n", b"[train\n"])
def test_broken_toml_is_an_error(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(RegardError, match=r"broken\.toml: not a recipe in TOML"):
        read_toml(path)


def test_error_for_broken_toml_has_the_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[train]\nsteps = = 3\n", encoding="utf-8")
    with pytest.raises(RegardError, match="line 2"):
        read_toml(path)
