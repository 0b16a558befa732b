"""Distributed training: the losses and weights of DDP and FSDP2 on 2 and 4 ranks are those of one process."""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from regard.errors import RegardError
from regard.training import Recipe, distributed, run_recipe
from regard.training.checkpoint import CheckpointStore, is_sharded
from regard.training.distributed import GradientBuckets
from tests.training.helpers import fail_after, losses, small_dataset, small_recipe
from tests.training.ranks import run_ranks

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


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch):
    """The sizes of the buckets in the order in which they are sent; instead of a sum over ranks, they are doubled."""
    sizes = []

    def all_reduce(buffer, group, async_op):
        sizes.append(len(buffer))
        buffer *= 2
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 40)
    return sizes


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, 1, bias=False) for n in (3, 20, 4, 5))

    def forward(self, used=(0, 1, 2, 3)):
        return sum(self.layers[i](torch.ones(self.layers[i].in_features)).sum() for i in used)


def grads(model):
    return [layer.weight.grad.flatten().tolist() for layer in model.layers]


def test_buckets_are_sent_from_the_last_layer_to_the_first(sent):
    model = Layers()
    exchange = GradientBuckets(list(model.parameters()), None)
    with exchange.run():
        model().backward()
    assert sent == [29, 3]  # 5 + 4 + 20 numbers, which are more than 40 bytes, and the rest
    assert grads(model) == [[2.0] * n for n in (3, 20, 4, 5)]
    assert model.layers[3].weight.grad.untyped_storage().data_ptr() == exchange.buckets[0].buffer.data_ptr()


def test_gradients_are_accumulated_and_sent_once(sent):
    model = Layers()
    exchange = GradientBuckets(list(model.parameters()), None)
    for _ in range(2):
        model.zero_grad()
        model().backward()
        with exchange.run():
            model().backward()
        assert grads(model) == [[4.0] * n for n in (3, 20, 4, 5)]
    assert sent == [29, 3, 29, 3]


def test_parameters_without_gradient_on_this_rank_are_zero(sent):
    model = Layers()
    exchange = GradientBuckets(list(model.parameters()), None)
    with exchange.run():
        model().backward()
    model.zero_grad()
    with exchange.run():
        model((0, 1)).backward()
    assert sent == [29, 3, 29, 3]
    assert grads(model) == [[2.0] * 3, [2.0] * 20, [0.0] * 4, [0.0] * 5]


def test_a_failed_backward_pass_sends_nothing_later(sent):
    model = Layers()
    exchange = GradientBuckets(list(model.parameters()), None)
    with pytest.raises(ValueError, match="failed"), exchange.run():
        raise ValueError("failed")
    model().backward()
    assert sent == []
    assert grads(model)[0] == [1.0] * 3


def test_a_group_of_one_rank_changes_nothing(group):
    model = Layers()
    with GradientBuckets(list(model.parameters()), group).run():
        model().backward()
    assert grads(model) == [[1.0] * n for n in (3, 20, 4, 5)]
