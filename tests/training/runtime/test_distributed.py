"""Distributed training: the losses and weights of DDP and FSDP2 on 2 and 4 ranks are those of one process."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import RegardError
from regard.training import Recipe, run_recipe
from regard.training.run.checkpoint_store import CheckpointStore, is_sharded
from tests.training.helpers import fail_after, losses, small_dataset, small_recipe
from tests.training.runtime.ranks import run_ranks

STEPS, SAVED, FAILED = 20, 8, 12
TRAIN = dict(steps=STEPS, save_every=SAVED, validate_every=STEPS, log_every=1, optimizer="adamw", ema=0.9)
# The last shards of a width of 18 are smaller, and one of a bias of 2 is empty on 4 ranks.
MODEL = dict(dropout=0.0, width=18, heads=1, feedforward=37)


def recipe(**train: object) -> Recipe:
    return small_recipe(model=MODEL, train=TRAIN | train)


def train(job: Recipe, out: Path) -> None:
    run_recipe(job, out, dataset=small_dataset(), quiet=True)


def train_and_fail(job: Recipe, out: Path) -> None:
    """Train, with an error after FAILED updates on all ranks."""
    fail_after(FAILED)
    with contextlib.suppress(RegardError):
        train(job, out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folders of all runs: one, ddp-4, fsdp-4, resumed from fsdp-4 on 2 ranks and on 1, and ddp-2."""
    folder = tmp_path_factory.mktemp("runs")
    train(recipe(), folder / "one")
    fsdp = recipe(sharding="fsdp")
    assert run_ranks(4, train_and_fail, fsdp, folder / "failed") == [0, 2, 2, 2]
    for name in ("resumed-2", "resumed-1"):
        shutil.copytree(folder / "failed", folder / name)
    for size, job, name in [(4, recipe(), "ddp-4"), (2, recipe(), "ddp-2"), (4, fsdp, "fsdp-4")]:
        assert run_ranks(size, train, job, folder / name) == [0] * size
    assert run_ranks(2, train, fsdp, folder / "resumed-2") == [0, 0]
    train(recipe(), folder / "resumed-1")
    return folder


@pytest.mark.parametrize("name", ["ddp-2", "ddp-4", "fsdp-4", "resumed-2", "resumed-1"])
def test_losses_are_those_of_one_process(runs, name):
    expected, found = losses(runs / "one"), losses(runs / name)
    assert len(found) == len(expected) == STEPS
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    # The keys' biases have no gradient apart from rounding, which AdamW scales up.
    one, other = load_file(runs / "one" / "model.safetensors"), load_file(runs / name / "model.safetensors")
    assert one.keys() == other.keys()
    for key in one:
        if not key.endswith("key_value.bias"):
            torch.testing.assert_close(other[key], one[key], rtol=1e-3, atol=1e-5)


def test_checkpoints_are_of_the_kind_of_the_last_run(runs):
    for name, expected in (("fsdp-4", [True, True]), ("resumed-1", [False, False])):
        assert [is_sharded(path) for path in CheckpointStore(runs / name).paths()] == expected
