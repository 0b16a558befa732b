"""Learning from pictures on a GPU: whole updates are captured, what is random in them is drawn anew, and it repeats.

On a machine with one: pytest tests/train -k cuda
"""

import pytest
import torch

from regard.training import train
from regard.training.run_log import read_metrics
from regard.training.runtime.cuda_graphs import GraphedUpdate
from regard.training.trainer import METRICS
from tests.training.helpers import same_bits, weights_of
from tests.training.tasks import test_ragged_image_tasks
from tests.training.toy_images import MEASURES, toy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_task = pytest.mark.parametrize("task", MEASURES)


@every_task
def test_updates_are_captured_and_learn_in_cuda(tmp_path, monkeypatch, task):
    made = []
    monkeypatch.setattr(GraphedUpdate, "__init__", _noting(GraphedUpdate.__init__, made))
    recipe = toy(task, tmp_path, train={"device": "cuda", "steps": 60, "validate_every": 30, "log_every": 1})
    train(recipe, tmp_path / "out", quiet=True)
    [update] = made
    assert len(update.graphs) == 1  # one shape
    lines = read_metrics(tmp_path / "out" / METRICS)
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert sum(losses[-10:]) < sum(losses[3:13])
    assert len(set(losses)) == len(losses)  # a replay draws its own
    first, last = (line["nll"] for line in lines if line["kind"] == "validation")
    assert last < first or task == "mask-images"  # hidden patches of so few pictures are learned by heart


@every_task
def test_a_deterministic_run_repeats_itself_in_cuda(tmp_path, task):
    recipe = toy(task, tmp_path, train={"device": "cuda", "deterministic": True})
    try:
        for out in ("one", "two"):
            train(recipe, tmp_path / out, quiet=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits(weights_of(tmp_path / "one"), weights_of(tmp_path / "two"))


@pytest.mark.parametrize("task", ["classify-images", "segment"])
def test_own_sizes_are_learned_from_in_cuda(tmp_path, monkeypatch, task):
    made = []
    monkeypatch.setattr(GraphedUpdate, "__init__", _noting(GraphedUpdate.__init__, made))
    recipe = test_ragged_image_tasks.toy(task, tmp_path, train={"device": "cuda", "steps": 60, "validate_every": 30})
    train(recipe, tmp_path / "out", quiet=True)
    [update] = made
    assert not update.graphs
    first, last = (line["nll"] for line in read_metrics(tmp_path / "out" / METRICS) if line["kind"] == "validation")
    assert last < first


def _noting(original, made):
    def init(self, update):
        made.append(self)
        original(self, update)

    return init
