"""Optimisers and schedules."""

import math

import pytest
import torch
from torch import nn

from regard.train.optim import make_optimizer, schedule, set_rate


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("cosine", 0, 0.2),  # the first of five warm-up updates
        ("cosine", 4, 1.0),
        ("cosine", 5, 1.0),
        ("cosine", 10, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 15, 0.5),
        ("cosine", 25, 0.0),
        ("cosine", 99, 0.0),
        ("linear", 2, 0.6),
        ("linear", 5, 1.0),
        ("linear", 15, 0.5),
        ("linear", 24, 0.05),
        ("linear", 25, 0.0),
        ("inverse_root", 4, 1.0),
        ("inverse_root", 9, math.sqrt(5 / 10)),
        ("inverse_root", 19, 0.5),
        ("constant", 0, 0.2),
        ("constant", 20, 1.0),
    ],
)
def test_schedules(name, step, expected):
    assert schedule(name, 1.0, warmup=5, steps=25)(step) == pytest.approx(expected, abs=1e-12)


def test_inverse_root_is_the_published_rule():
    width, warmup = 512, 4000
    ours = schedule("inverse_root", (width * warmup) ** -0.5, warmup, 100_000)
    for number in (1, 100, 4000, 4001, 50_000):  # the paper counts its steps from 1
        published = width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert ours(number - 1) == pytest.approx(published, rel=1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear", "inverse_root", "constant"])
def test_no_warm_up(name):
    assert schedule(name, 0.5, warmup=0, steps=10)(0) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_decay_is_on_matrices_alone(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(name, model, 0.1, 0.98, weight_decay=0.5)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(model[0].weight)}
    before = {key: p.clone() for key, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key]) == (key != "0.weight")
    # decoupled decay, momentum's first step, and Adam's first step of the size of the rate
    shrunk = {"adamw": before["0.weight"] * 0.95, "sgd": before["0.weight"] * 0.95}
    expected = shrunk.get(name, before["0.weight"] - 0.1 * before["0.weight"].sign())
    torch.testing.assert_close(model[0].weight.detach(), expected)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_set_rate(name):
    model = nn.Linear(1, 1)
    optimizer = make_optimizer(name, model, 0.1, 0.98, 0.0)
    set_rate(optimizer, 0.0)
    before = model.weight.clone()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
