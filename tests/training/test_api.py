"""`regard.train`: training in one call, and overrides of a recipe."""

import pytest

import regard
from regard.cli import main
from regard.errors import RegardError
from regard.models import Seq2SeqConfig
from regard.training import Recipe, read_toml, recipe_from_dict
from regard.training.api import resolve_recipe
from regard.training.recipe_run import run_recipe
from regard.training.run.run_folder import read_stored_recipe

SMALL = {"limit": 60, "steps": 2, "batch_tokens": 512, "workers": 1, "device": "cpu"}
TINY = {"width": 8, "heads": 2, "feedforward": 8, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"word {i}\tmot {i}\n" for i in range(30)), encoding="utf-8")
    return path


def test_train_returns_a_pipeline_that_load_reopens(tmp_path, pairs):
    translator = regard.train(pairs, tmp_path / "model", model=TINY, steps=2, workers=1, device="cpu", quiet=True)
    assert translator("word 1") == regard.load(tmp_path / "model", "cpu")("word 1")
    assert read_stored_recipe(tmp_path / "model").data.files == (str(pairs),)


def test_the_same_call_resumes_and_keeps_the_recipe(tmp_path):
    out = tmp_path / "model"
    regard.train("phrasebook", out, **SMALL, model=TINY, quiet=True)
    longer = regard.train("phrasebook", out, limit=60, steps=3, quiet=True)
    assert longer.model.config.width == 8
    assert read_stored_recipe(out).train.steps == 3


def test_nested_and_single_keys_override_the_suggestion(tmp_path):
    model = {"family": "seq2seq", "score": "concat", "width": 8}
    regard.train("phrasebook", tmp_path / "model", **SMALL, model=model, train={"lr": 1e-3}, quiet=True)
    stored = read_stored_recipe(tmp_path / "model")
    assert isinstance(stored.model, Seq2SeqConfig)
    assert (stored.model.score, stored.train.lr, stored.train.steps) == ("concat", 1e-3, 2)


def test_python_and_command_line_choose_the_same_recipe(tmp_path, pairs, capsys):
    assert main(["train", "--data", str(pairs), "--steps", "7", "--out", str(tmp_path / "a"), "--dry-run"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    recipe, _ = resolve_recipe({}, {"data": {"files": [str(pairs)]}, "train": {"steps": 7}}, tmp_path / "a")
    assert recipe_from_dict(read_toml(tmp_path / "printed.toml")) == recipe


def test_time_budget_chooses_its_schedule(tmp_path, pairs):
    """The suggestion for fine-tuning is another schedule, whose decay cannot start early."""
    regard.train(pairs, tmp_path / "model", model=TINY, steps=1, workers=1, device="cpu", quiet=True)
    table = {"data": {"files": [str(pairs)]}, "train": {"time": "30s"}}
    plain, _ = resolve_recipe({}, {"data": table["data"]}, tmp_path / "new", start_from=tmp_path / "model")
    timed, _ = resolve_recipe({}, table, tmp_path / "new", start_from=tmp_path / "model")
    assert (plain.train.schedule, timed.train.schedule) == ("linear", "wsd")
    table["train"]["schedule"] = "cosine"  # an explicit contradiction is still an error
    chosen, _ = resolve_recipe({}, table, tmp_path / "new", start_from=tmp_path / "model")
    with pytest.raises(RegardError, match=r"train\.time needs the schedule wsd"):
        run_recipe(chosen, tmp_path / "new", start_from=tmp_path / "model", quiet=True)


def test_packaged_recipe_is_completed_with_data(tmp_path, pairs):
    changes = {"steps": 1, "workers": 1, "device": "cpu", "width": 8}
    regard.train(pairs, tmp_path / "model", recipe="multi30k-rnn", **changes, quiet=True)
    assert read_stored_recipe(tmp_path / "model").model.width == 8


def test_recipe_object_is_used_as_given(tmp_path):
    recipe = Recipe().override(**SMALL, model=TINY, tokenizer={"kind": "char"})
    regard.train("phrasebook", tmp_path / "model", recipe=recipe, quiet=True)
    assert read_stored_recipe(tmp_path / "model").tokenizer.kind == "char"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stepz": 3}, "Unknown key stepz. Did you mean steps?"),
        ({"dropout": 0.1}, "dropout is a key of tokenizer and model."),
        ({"train": {"steps": "many"}}, "train.steps must be an integer"),
        ({"family": "bert"}, "bert"),
        ({"score": "bilinear"}, "must be one of dot, scaled_dot"),
    ],
)
def test_wrong_overrides_are_errors_that_name_the_key(overrides, message, tmp_path):
    with pytest.raises(RegardError) as caught:
        regard.train("phrasebook", tmp_path / "model", **overrides)
    assert message in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_data_is_required(tmp_path):
    with pytest.raises(RegardError, match=r"No training data is given\. Pass data=…\."):
        regard.train(out=tmp_path / "model")


def test_override_of_a_task_takes_the_family_of_the_task():
    recipe = Recipe().override(task="language", layers=3)
    assert (recipe.task, recipe.model.layers) == ("language", 3)
