"""`regard.train`: training in one call, and overrides of a recipe."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

import regard
from regard.attention import Cosine
from regard.cli import main
from regard.errors import RegardError
from regard.models import Seq2SeqConfig
from regard.training import TASKS, Recipe, TrainConfig, loop, read_toml, recipe_from_dict, run
from regard.training import recipe as recipe_module
from regard.training.checkpoint import read_stored_recipe
from regard.training.run import complete_recipe, run_recipe
from tests.training.helpers import bit_equal, saved_tensors

SMALL = {"limit": 60, "steps": 2, "batch_tokens": 512, "workers": 1, "device": "cpu"}
TINY = {"width": 8, "heads": 2, "feedforward": 8, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"word {i}\tmot {i}\n" for i in range(30)), encoding="utf-8")
    return path


def complete(overrides, out, **options):
    """The recipe that is completed from these overrides."""
    return complete_recipe(recipe_from_dict(overrides), {}, overrides, out, **options).recipe


@pytest.mark.parametrize("best", ["last", "earlier"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_train_returns_the_pipeline_that_load_opens(tmp_path, pairs, monkeypatch, best, ema):
    losses = iter([2.0, 1.0] if best == "last" else [1.0, 2.0])
    monkeypatch.setattr(loop, "evaluate_loss", lambda *_: {"nll": next(losses)})
    options: dict = dict(steps=2, validate_every=1, workers=1, device="cpu", quiet=True, ema=ema)
    translator = regard.train(pairs, tmp_path / "model", model=TINY, languages=("en", "fr"), **options)
    loaded = regard.load(tmp_path / "model", "cpu")
    assert translator.training["step"] == (2 if best == "last" else 1)
    assert translator.fingerprint() == loaded.fingerprint()
    for field in dataclasses.fields(loaded):
        if field.name != "model":
            assert getattr(translator, field.name) == getattr(loaded, field.name), field.name
    assert not translator.model.training
    assert translator("word 1") == loaded("word 1")
    assert read_stored_recipe(tmp_path / "model").data.files == (str(pairs),)


def test_a_run_does_nothing_twice(tmp_path, pairs, monkeypatch):
    calls: Counter[str] = Counter()

    def count(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: calls.update([name]) or function(*args, **options))

    for owner, name in (
        *((run, name) for name in ("recipe_from_dict", "check_run_folder", "read_dataset", "load", "read_tokenizers")),
        *((recipe_module, "recipe_from_dict"), (type(TASKS["translate"]), "suggest_recipe"), (run, "build_model")),
    ):
        count(owner, name)
    regard.train(pairs, tmp_path / "model", model=TINY, steps=1, workers=1, device="cpu")
    once = ["check_run_folder", "read_dataset", "suggest_recipe", "build_model"]
    assert calls == {"recipe_from_dict": 2} | dict.fromkeys(once, 1)  # the file and the overrides are read once each


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
    recipe = complete({"data": {"files": [str(pairs)]}, "train": {"steps": 7}}, tmp_path / "a")
    assert recipe_from_dict(read_toml(tmp_path / "printed.toml")) == recipe


def test_time_budget_chooses_its_schedule(tmp_path, pairs):
    """The suggestion for fine-tuning is another schedule, whose decay cannot start early."""
    regard.train(pairs, tmp_path / "model", model=TINY, steps=1, workers=1, device="cpu", quiet=True)
    table = {"data": {"files": [str(pairs)]}, "train": {"time": "30s"}}
    plain = complete({"data": table["data"]}, tmp_path / "new", start_from=tmp_path / "model")
    timed = complete(table, tmp_path / "new", start_from=tmp_path / "model")
    assert (plain.train.schedule, timed.train.schedule) == ("linear", "wsd")
    table["train"]["schedule"] = "cosine"  # an explicit contradiction is still an error
    chosen = complete(table, tmp_path / "new", start_from=tmp_path / "model")
    with pytest.raises(RegardError, match=r"train\.time needs the schedule wsd"):
        run_recipe(chosen, tmp_path / "new", start_from=tmp_path / "model", quiet=True)


class Frame:
    """What `train` uses of a data frame of pandas."""

    columns = ("en", "fr")

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        assert orient == "records"
        return [dict(zip(self.columns, pair)) for pair in ROWS]


ROWS = [(f"word {i}", f"mot {i}") for i in range(30)]
OPTIONS: dict = dict(model=TINY, steps=1, workers=1, device="cpu", quiet=True)


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (ROWS, ()),
        ((pair for pair in ROWS), ()),
        (np.array(ROWS), ()),
        ([{"source": source, "target": target} for source, target in ROWS], ()),
        (Frame(), ("en", "fr")),
    ],
    ids=["list", "generator", "array", "dictionaries", "frame"],
)
def test_rows_train_the_model_of_a_file_with_the_same_pairs(tmp_path, pairs, data, columns):
    expected = regard.train(pairs, tmp_path / "a", **OPTIONS)
    actual = regard.train(data, tmp_path / "b", columns=columns, **OPTIONS)
    assert actual.fingerprint() == expected.fingerprint()
    assert actual.training["data"] == expected.training["data"]
    assert read_stored_recipe(tmp_path / "b").data.files == ("<rows>",)
    longer = regard.train(ROWS, tmp_path / "b", columns=columns, **OPTIONS | {"steps": 2})  # extends it
    assert longer.training["step"] == 2


def test_rows_of_other_tasks(tmp_path):
    texts = [(f"word {i}", "odd" if i % 2 else "even") for i in range(30)]
    sizes = dict(width=8, heads=2, feedforward=8, layers=1)
    options: dict = dict(model=sizes, steps=1, workers=1, device="cpu", quiet=True)
    classifier = regard.train(texts, tmp_path / "a", task="classify", **options)
    assert sorted(classifier.model.config.labels) == ["even", "odd"]
    generator = regard.train((text for text, _ in texts), tmp_path / "b", task="language", **options)
    assert type(generator).__name__ == "TextGenerator"
    assert regard.evaluate(classifier, texts, quiet=True)["texts"] == 30
    assert regard.evaluate(generator, iter(["word 1"]), quiet=True)["perplexity"] > 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [("a", "b"), ("a", "b", "c")],
            r"data, row 2: expected \(source, target\) or a dictionary \(got \('a', 'b', 'c'\)\)",
        ),
        ([1, 2], r"data, row 1: expected \(source, target\)"),
        ([{"en": "a", "fr": "b"}], r'data, line 1: .* "target"; it has en, fr.*columns=\(source, target\)'),
        ([("a", 1)], r'data, line 1: .* "source" and "target"; "target" is 1'),
        (iter(()), "data has no rows"),
        (7, r"data must be files or rows \(got 7\)"),
        ({"a": "b"}, "data must be files or rows"),
    ],
)
def test_wrong_rows_are_errors(tmp_path, data, message):
    with pytest.raises(RegardError, match=message):
        regard.train(data, tmp_path / "model", **OPTIONS)
    with pytest.raises(RegardError, match=message.replace("data", "validation", 1)):
        regard.train(ROWS, tmp_path / "model", validation=data, **OPTIONS)
    assert not (tmp_path / "model").exists()


def test_validation_and_evaluation_on_rows(tmp_path, pairs):
    expected = regard.train(ROWS, tmp_path / "a", validation=pairs, **OPTIONS)
    actual = regard.train(ROWS, tmp_path / "b", validation=(row for row in ROWS), **OPTIONS)
    assert actual.training["data"] == expected.training["data"]
    assert read_stored_recipe(tmp_path / "b").data.validation == ("<rows>",)
    metrics = regard.evaluate(actual, str(pairs), quiet=True)
    for data, columns in ((ROWS, ()), (Frame(), ("en", "fr"))):
        found = regard.evaluate(actual, data, columns=columns, quiet=True)
        assert (found["data"], found["loss"], found["chrf"]) == (["<rows>"], metrics["loss"], metrics["chrf"])
    with pytest.raises(RegardError, match=r"data, row 2: expected \(source, target\)"):
        regard.evaluate(actual, [("a", "b"), 3])


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
        ({"epochs": 3}, "Unknown key epochs. Did you mean steps?"),
        ({"output_dir": "x"}, "Unknown key output_dir. Did you mean out?"),
        ({"learning_rate": 1e-3}, "Did you mean lr?"),
        ({"batch_size": 8}, "Did you mean batch_tokens or batch_images?"),
        ({"train": {"learning_rate": 1e-3}}, "unknown key train.learning_rate. Did you mean train.lr?"),
        ({"model": "gpt"}, "model must be a table of keys (got 'gpt')."),
        ({"train": Seq2SeqConfig()}, "train must be a table of keys (got Seq2SeqConfig("),
        ({"start_from": 5}, "start_from must be a model folder, or a model that regard.load returns (got 5)."),
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


def test_values_of_python_and_numpy_are_accepted(tmp_path, pairs):
    numbers = {"steps": np.int64(2), "lr": np.float32(0.5), "workers": np.array(1), "skip_spikes": np.bool_(False)}
    regard.train(pairs, tmp_path / "model", **numbers, validation=pairs, model=TINY, device="cpu", quiet=True)
    stored = read_stored_recipe(tmp_path / "model")
    assert (stored.train.steps, stored.train.lr, stored.train.skip_spikes) == (2, 0.5, False)
    assert stored.data.validation == (str(pairs),)


def test_config_objects_are_used_as_given(tmp_path, pairs):
    model = Seq2SeqConfig(width=8, score="concat")
    train = TrainConfig(steps=2, workers=1, device="cpu")
    regard.train(pairs, tmp_path / "model", model=model, train=train, lr=1e-3, quiet=True)
    stored = read_stored_recipe(tmp_path / "model")
    assert (stored.model.width, stored.model.score, stored.train.schedule) == (8, "concat", train.schedule)
    assert (stored.train.steps, stored.train.lr) == (2, 1e-3)


def test_fine_tuning_starts_from_a_folder_or_a_model(tmp_path, pairs):
    changes = {"steps": 1, "workers": 1, "device": "cpu", "quiet": True}
    translator = regard.train(pairs, tmp_path / "model", model=TINY, **changes)
    for name, origin in (("folder", tmp_path / "model"), ("loaded", translator)):
        tuned = regard.train(pairs, tmp_path / name, start_from=origin, **changes)
        assert tuned.training["start_from"] == str(tmp_path / "model")
    assert bit_equal(saved_tensors(tmp_path / "folder"), saved_tensors(tmp_path / "loaded"))
    translator.folders = frozenset()
    with torch.no_grad():
        for parameter in translator.model.parameters():
            parameter.zero_()
    changes["lr"] = 1e-30
    tuned = regard.train(pairs, tmp_path / "memory", start_from=translator, **changes)
    assert all(parameter.abs().max() < 1e-20 for parameter in tuned.model.parameters())
    with pytest.raises(RegardError, match=r"model of a model in memory, whose width is 8 \(got 16\)"):
        regard.train(pairs, tmp_path / "wide", start_from=translator, width=16, **changes)
    translator.model.encoder[0].attention.score = Cosine(4.0)
    with pytest.raises(RegardError, match=r"encoder\.0\.attention\.score is Cosine instead of ScaledDot"):
        regard.train(pairs, tmp_path / "changed", start_from=translator, **changes)


def test_data_is_required(tmp_path):
    with pytest.raises(RegardError, match=r"No training data is given\. Pass data=…\."):
        regard.train(out=tmp_path / "model")


def test_override_of_a_task_takes_the_family_of_the_task():
    recipe = Recipe().override(task="language", layers=3)
    assert (recipe.task, recipe.model.layers) == ("language", 3)
