"""The plan before a run, the dry run, and warnings for little data."""

import numpy as np
import pytest

from regard.training import Dataset, train
from regard.training.tasks import TASKS
from regard.training.tasks.base import warn_of_rare_labels
from tests.training.helpers import small, small_dataset


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    recipe = small(train={"schedule": "wsd", "patience": 3, "validate_by": "bleu", "workers": 2, "time": "10m"})
    assert train(recipe, tmp_path / "out", dataset=small_dataset(), dry_run=True) is None
    assert not list(tmp_path.iterdir())
    plan = capsys.readouterr().err
    for text in (
        "200 pairs",
        "transformer, 1+1 layers of width 16: 0.0",
        "up to 12 steps of 256 tokens; adam, learning rate 0.002 (constant, then decay), warm-up 3",
        "every 6 steps; the best by BLEU is kept, ties broken by loss; after 3 without improvement the learning rate",
        "per batch, measured); ends within 10m",
        "GB on 2 workers",
        "model selection by BLEU: targets have",
        "Warning: 200 pairs are few",
    ):
        assert text in plan, text


def test_the_plan_changes_nothing(tmp_path, capsys):
    """It measures the time of real batches, and the weights are those of a run without it."""
    from tests.training.helpers import same_bits, weights_of

    train(small(), tmp_path / "quiet", dataset=small_dataset(), quiet=True)
    assert capsys.readouterr().err == ""
    train(small(), tmp_path / "told", dataset=small_dataset())
    shown = capsys.readouterr().err
    assert shown.startswith("Plan\n")
    assert "step 12 of 12  train  loss" in shown
    assert " left\n" in shown
    assert same_bits(weights_of(tmp_path / "told"), weights_of(tmp_path / "quiet"))


def test_enough_pairs_give_no_warning():
    pairs = [("the cat sleeps", "le chat dort")] * 10_000
    assert TASKS["translate"].warnings(Dataset(pairs, [])) == []
    assert TASKS["translate"].warnings(Dataset([("cat", "cats")] * 1000, [])) == []
    assert "300 pairs are few" in TASKS["translate"].warnings(Dataset(pairs[:300], []))[0]


@pytest.mark.parametrize(("counts", "warns"), [([30] * 37, True), ([500, 600], False), ([], True)])
def test_few_examples_per_label(counts, warns):
    names = {str(number): int(count) for number, count in enumerate(np.array(counts, int))}
    assert bool(warn_of_rare_labels(names, "images", enough=200)) == warns
