"""The plan of a run, dry runs, reasons for chosen settings, and warnings about little data."""

import dataclasses
import re

import numpy as np
import pytest

from regard.cli.train_options import chosen_keys
from regard.data.text.labeled_texts import LabeledText
from regard.data.text.tagged_texts import TaggedText
from regard.models import family_name
from regard.training import Dataset, recipe_from_dict, run_recipe
from regard.training.plan import describe_choices, format_value
from regard.training.tasks import TASKS
from regard.training.tasks.task import warn_about_rare_labels
from tests.training.helpers import bit_equal, saved_tensors, small_dataset, small_recipe
from tests.training.tasks.conftest import toy


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    recipe = small_recipe(train={"schedule": "wsd", "patience": 3, "validate_by": "bleu", "workers": 2, "time": "10m"})
    assert run_recipe(recipe, tmp_path / "out", dataset=small_dataset(), dry_run=True) is None
    assert not list(tmp_path.iterdir())
    plan = capsys.readouterr().err
    for text in (
        "200 pairs",
        "transformer, 1+1 layers of width 16: 0.0",
        "up to 12 steps of 256 tokens; adam, learning rate 0.002 (constant, then decay), warm-up 3",
        "every 6 steps; the last model whose BLEU equals the best within its margin is saved; after 3 without "
        "improvement the learning rate decays",
        "per batch, measured); ends within 10m",
        "GB on 2 workers",
        "model selection by BLEU: targets have",
        "Warning: Little data: 200 pairs.",
    ):
        assert text in plan, text


def test_printing_the_plan_does_not_change_the_weights(tmp_path, capsys):
    """The plan measures the time of real batches."""
    run_recipe(small_recipe(), tmp_path / "quiet", dataset=small_dataset(), quiet=True)
    assert capsys.readouterr().err == ""
    run_recipe(small_recipe(), tmp_path / "verbose", dataset=small_dataset())
    output = capsys.readouterr().err
    assert output.startswith("Plan\n")
    assert "step 12 of 12  train  loss" in output
    assert " left\n" in output
    assert bit_equal(saved_tensors(tmp_path / "verbose"), saved_tensors(tmp_path / "quiet"))


@pytest.mark.parametrize("task", TASKS)
def test_chosen_settings_are_in_the_plan_and_in_the_help(tmp_path, capsys, task):
    dataset = small_dataset() if task == "translate" else TASKS[task].read(toy(task, tmp_path).data)
    recipe = TASKS[task].suggest_recipe(dataset, False)
    changes = {
        field.name: getattr(recipe.model, field.name)
        for field in dataclasses.fields(recipe.model)
        if getattr(recipe.model, field.name) != field.default
    }
    assert changes
    run_recipe(
        recipe_from_dict({"train": {"workers": 1, "device": "cpu"}}, recipe),
        tmp_path / "out",
        dataset=dataset,
        dry_run=True,
    )
    chosen = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  chosen ")]
    for name, value in changes.items():
        [line] = [
            line for line in chosen if re.search(rf"[ ;]{name} {re.escape(format_value(value))}, not .+: \w+", line)
        ]
        assert "chosen from the data" not in line  # has a specific reason
    assert set(changes) <= chosen_keys("model", task, family_name(recipe.model))


def test_settings_of_the_user_are_not_listed_as_chosen():
    recipe = TASKS["translate"].suggest_recipe(small_dataset(), False)
    lines = "\n".join(describe_choices(recipe, recipe))
    assert "positions rotary, not sinusoidal: 0.9 to 1.0 BLEU" in lines
    assert "width 128, not 256" in lines
    edited = recipe_from_dict({"model": {"positions": "none", "width": 64}}, recipe)
    lines = "\n".join(describe_choices(edited, recipe))
    assert "positions" not in lines.replace("the positions extrapolate", "")
    assert "width" not in lines
    assert "encoder_layers 2, not 3" in lines
    other = recipe_from_dict({"model": {"family": "seq2seq"}}, recipe)
    assert "width" not in "\n".join(describe_choices(other, recipe))


def test_warning_depends_on_the_number_of_pairs():
    pairs = [("the cat sleeps", "le chat dort")] * 10_000
    assert TASKS["translate"].warnings(Dataset(pairs, [])) == []
    assert TASKS["translate"].warnings(Dataset([("cat", "cats")] * 1000, [])) == []
    assert "Little data: 300 pairs." in TASKS["translate"].warnings(Dataset(pairs[:300], []))[0]


@pytest.mark.parametrize(("counts", "warns"), [([30] * 37, True), ([500, 600], False), ([], True)])
def test_few_examples_per_label_give_a_warning(counts, warns):
    names = {str(index): int(count) for index, count in enumerate(np.array(counts, int))}
    assert bool(warn_about_rare_labels(names, "images", min_recommended=200)) == warns


@pytest.mark.parametrize(
    ("task", "examples"),
    [
        ("classify", [LabeledText(("a",), label) for label in ("Good", "good", "bad")]),
        ("tag", [TaggedText(("a", "b", "c"), ("Good", "good", "bad"))]),
    ],
)
def test_labels_that_differ_only_in_case_are_named(task, examples):
    (warning, *_) = TASKS[task].warnings(Dataset(examples, []))
    assert warning.startswith("Labels differ only in case: Good and good.")
