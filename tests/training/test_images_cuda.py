"""Training on images on a GPU: captured updates with fresh random numbers, and reproducibility.

On a machine with a GPU: pytest tests/training -k cuda
"""

import pytest
import torch

from regard.training import run_recipe
from regard.training.checkpoint import METRICS
from regard.training.cuda_graphs import GraphedUpdate
from regard.training.log import read_metrics
from tests.training.helpers import bit_equal, saved_tensors
from tests.training.toy_images import EXTRA_METRICS, toy, toy_ragged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_task = pytest.mark.parametrize("task", EXTRA_METRICS)


@every_task
def test_cuda_updates_are_captured_and_learn(tmp_path, monkeypatch, task):
    updates = []
    monkeypatch.setattr(GraphedUpdate, "__init__", _recording(GraphedUpdate.__init__, updates))
    recipe = toy(task, tmp_path, train={"device": "cuda", "steps": 60, "validate_every": 30, "log_every": 1})
    run_recipe(recipe, tmp_path / "out", quiet=True)
    [update] = updates
    assert len(update.graphs) == 1  # one shape
    lines = read_metrics(tmp_path / "out" / METRICS)
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert sum(losses[-10:]) < sum(losses[3:13])
    assert len(set(losses)) == len(losses)  # each replay has its own random numbers
    first, last = (line["nll"] for line in lines if line["kind"] == "validation")
    assert last < first or task == "mask-images"  # with so few images, masked patches are memorized


@every_task
def test_cuda_deterministic_run_is_reproducible(tmp_path, task):
    recipe = toy(task, tmp_path, train={"device": "cuda", "deterministic": True})
    try:
        for out in ("one", "two"):
            run_recipe(recipe, tmp_path / out, quiet=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bit_equal(saved_tensors(tmp_path / "one"), saved_tensors(tmp_path / "two"))


@pytest.mark.parametrize("task", ["classify-images", "segment"])
def test_cuda_training_on_images_of_different_sizes(tmp_path, monkeypatch, task):
    updates = []
    monkeypatch.setattr(GraphedUpdate, "__init__", _recording(GraphedUpdate.__init__, updates))
    recipe = toy_ragged(task, tmp_path, train={"device": "cuda", "steps": 60, "validate_every": 30})
    run_recipe(recipe, tmp_path / "out", quiet=True)
    [update] = updates
    assert not update.graphs
    first, last = (line["nll"] for line in read_metrics(tmp_path / "out" / METRICS) if line["kind"] == "validation")
    assert last < first


def _recording(original, updates):
    def init(self, update):
        updates.append(self)
        original(self, update)

    return init
