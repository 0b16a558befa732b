"""Faults on two ranks: both skip, roll back, split and stop together."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from regard.errors import Interrupted, RegardError
from regard.training import loop, run_recipe
from regard.training.checkpoint import METRICS, CheckpointStore, is_sharded, read_metadata
from regard.training.log import read_metrics
from regard.training.tasks.task import features_loss
from regard.training.tasks.translate import TranslateTask
from tests.training.helpers import small_dataset, small_recipe
from tests.training.ranks import run_ranks


def train(out: Path, sharding: str) -> None:
    recipe = small_recipe(model={"dropout": 0.0}, train={"sharding": sharding})
    try:
        run_recipe(recipe, out, dataset=small_dataset(), quiet=True)
    except (RegardError, Interrupted) as error:
        (out / f"error-{os.environ['RANK']}").write_text(error.message, encoding="utf-8")
        sys.exit(error.exit_code)


def train_with_a_changed_loss(out: Path, sharding: str, fault: str) -> None:
    """On rank 1, three losses are not finite, or batches of more than 40 target tokens do not fit."""
    numbers: list[int] = []

    def loss(_task, model, features, batch, config):
        parts = features_loss(model, features, batch, config)
        if torch.is_grad_enabled() and batch.sentences and os.environ["RANK"] == "1":
            numbers.append(len(numbers) + 1)
            if fault == "nan" and numbers[-1] in (6, 7, 8):
                return parts._replace(loss=parts.loss * torch.nan)
            if fault == "memory" and len(batch.targets) > 40:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return parts

    TranslateTask.loss = loss
    sys.stderr = (out / f"stderr-{os.environ['RANK']}").open("w", encoding="utf-8")
    train(out, sharding)


def train_until_a_signal(out: Path, sharding: str) -> None:
    """Rank 1 gets SIGUSR1 in the sixth update."""
    original, calls = loop.set_learning_rate, []

    def set_learning_rate(*arguments):
        calls.append(None)
        if len(calls) == 6 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGUSR1)
        original(*arguments)

    loop.set_learning_rate = set_learning_rate
    train(out, sharding)


def state_of(out: Path) -> dict:
    return read_metadata(CheckpointStore(out).find_intact())


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plain")
    run_recipe(small_recipe(model={"dropout": 0.0}), out, dataset=small_dataset(), quiet=True)
    return out


def losses(out: Path) -> list[float]:
    return [line["nll"] for line in read_metrics(out / METRICS)]


@pytest.mark.parametrize(("sharding", "step"), [("none", 6), ("fsdp", 3)])
def test_both_ranks_roll_back(tmp_path, sharding, step):
    """A sharded run first measures the time of three batches, so the same batches are those of earlier steps."""
    assert run_ranks(2, train_with_a_changed_loss, tmp_path, sharding, "nan") == [0, 0]
    state = state_of(tmp_path)
    assert (state["step"], state["skipped"], state["failed_step"], state["done"]) == (12, 3, step, True)
    assert is_sharded(CheckpointStore(tmp_path).find_intact()) == (sharding != "none")


def test_one_rank_splits_its_batches(plain, tmp_path):
    """The number of parts is that of the rank that needs most."""
    assert run_ranks(2, train_with_a_changed_loss, tmp_path, "none", "memory") == [0, 0]
    assert state_of(tmp_path)["micro_batches"] > 1
    assert losses(tmp_path) == pytest.approx(losses(plain), rel=1e-4)


def test_a_shard_that_does_not_fit_is_an_error(tmp_path):
    assert run_ranks(2, train_with_a_changed_loss, tmp_path, "fsdp", "memory") == [2, 2]
    errors = (tmp_path / "stderr-1").read_text(encoding="utf-8")
    assert "regard: rank 1: Out of memory at step 1, while ranks exchanged" in errors


def test_a_signal_to_one_rank_saves_on_all_of_them(plain, tmp_path):
    """The run then continues without shards, and on one rank."""
    assert run_ranks(2, train_until_a_signal, tmp_path, "fsdp") == [75, 75]
    assert "everything up to step 6 is saved" in (tmp_path / "error-0").read_text(encoding="utf-8")
    assert run_ranks(1, train, tmp_path, "none") == [0]
    assert losses(tmp_path) == pytest.approx(losses(plain), rel=1e-4)
