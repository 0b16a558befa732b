"""Checkpoints: restoring of the training state."""

import copy

import pytest
import torch
from torch import nn

from regard.errors import RegardError
from regard.training.checkpoint import Checkpoint, gather_state, restore_state
from regard.training.optimizers import make_optimizer, update_ema


class Layers(nn.ModuleList):
    def forward(self, x):
        return self[1](self[0](x))


def model_and_optimizer(width: int = 3, name: str = "adam"):
    torch.manual_seed(width)
    model = Layers([nn.Linear(width, width), nn.Linear(width, width)])
    model[1].weight = model[0].weight  # tied
    optimizer = make_optimizer(name, model, 0.1, 0.98, 0.01)
    return model, optimizer


def learn(model, optimizer, ema_model, steps):
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        update_ema(ema_model, model, 0.5, step)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "sgd"])
def test_restored_state_resumes_exactly(tmp_path, name):
    model, optimizer = model_and_optimizer(name=name)
    ema_model = copy.deepcopy(model)
    learn(model, optimizer, ema_model, 3)
    (tmp_path / "c").write_bytes(Checkpoint(gather_state(model, optimizer, ema_model), {}).to_bytes())
    learn(model, optimizer, ema_model, 2)

    other, other_optimizer = model_and_optimizer(name=name)
    other_ema = copy.deepcopy(other)
    restore_state(Checkpoint.load(tmp_path / "c").tensors, other, other_optimizer, other_ema, RegardError)
    learn(other, other_optimizer, other_ema, 2)
    for one, two in ((model, other), (ema_model, other_ema)):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_tied_weight_is_stored_once():
    model, optimizer = model_and_optimizer()
    assert sorted(gather_state(model, optimizer, None)) == ["model.0.bias", "model.0.weight", "model.1.bias"]


def test_checkpoint_of_another_model_is_an_error_and_changes_nothing():
    model, optimizer = model_and_optimizer(3)
    tensors = gather_state(*model_and_optimizer(4), None)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RegardError, match=r"3 of its tensors do not match, for example 0\.bias"):
        restore_state(tensors, model, optimizer, None, RegardError)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_missing_ema_weights_are_an_error():
    model, optimizer = model_and_optimizer()
    with pytest.raises(RegardError, match="3 of its tensors do not match"):
        restore_state(gather_state(model, optimizer, None), model, optimizer, copy.deepcopy(model), RegardError)


@pytest.mark.parametrize(
    "name", ["optimizer.x.step", "optimizer." + "9" * 5000 + ".step", "optimizer.0", "optimizer.²."]
)
def test_invalid_name_of_optimizer_state_is_an_error(name):
    model, optimizer = model_and_optimizer()
    tensors = gather_state(model, optimizer, None) | {name: torch.zeros(())}
    with pytest.raises(RegardError, match=r"the optimizer state .* does not match"):
        restore_state(tensors, model, optimizer, None, RegardError)


def test_incomplete_optimizer_state_is_an_error():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors = gather_state(model, optimizer, None)
    del tensors["optimizer.0.step"]
    with pytest.raises(RegardError, match="the optimizer state does not match"):
        restore_state(tensors, model, torch.optim.Adam(model.parameters()), None, RegardError)
