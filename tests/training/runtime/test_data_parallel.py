"""The exchange of gradients in one process: buckets, their order, accumulation and unused parameters."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from regard.training.runtime import data_parallel
from regard.training.runtime.data_parallel import GradientExchange


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

    monkeypatch.setattr(data_parallel.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 40)
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
    exchange = GradientExchange(list(model.parameters()), None)
    with exchange.run():
        model().backward()
    assert sent == [29, 3]  # 5 + 4 + 20 numbers, which are more than 40 bytes, and the rest
    assert grads(model) == [[2.0] * n for n in (3, 20, 4, 5)]
    assert model.layers[3].weight.grad.untyped_storage().data_ptr() == exchange.buckets[0].buffer.data_ptr()


def test_gradients_are_accumulated_and_sent_once(sent):
    model = Layers()
    exchange = GradientExchange(list(model.parameters()), None)
    for _ in range(2):
        model.zero_grad()
        model().backward()
        with exchange.run():
            model().backward()
        assert grads(model) == [[4.0] * n for n in (3, 20, 4, 5)]
    assert sent == [29, 3, 29, 3]


def test_parameters_without_gradient_on_this_rank_are_zero(sent):
    model = Layers()
    exchange = GradientExchange(list(model.parameters()), None)
    with exchange.run():
        model().backward()
    model.zero_grad()
    with exchange.run():
        model((0, 1)).backward()
    assert sent == [29, 3, 29, 3]
    assert grads(model) == [[2.0] * 3, [2.0] * 20, [0.0] * 4, [0.0] * 5]


def test_a_failed_backward_pass_sends_nothing_later(sent):
    model = Layers()
    exchange = GradientExchange(list(model.parameters()), None)
    with pytest.raises(ValueError, match="failed"), exchange.run():
        raise ValueError("failed")
    model().backward()
    assert sent == []
    assert grads(model)[0] == [1.0] * 3


def test_a_group_of_one_rank_changes_nothing(group):
    model = Layers()
    with GradientExchange(list(model.parameters()), group).run():
        model().backward()
    assert grads(model) == [[1.0] * n for n in (3, 20, 4, 5)]
