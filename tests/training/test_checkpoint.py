"""Checkpoints: atomic writes, damaged files, and restoring of the training state."""

import copy
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.errors import RegardError
from regard.training.checkpoint import Checkpoint, gather_state, restore_state
from regard.training.optim.optimizers import make_optimizer, update_ema


def example(value: float = 1.0) -> Checkpoint:
    tensors = {"model.a": torch.full((3,), value), "optimizer.0.step": torch.tensor(value)}
    return Checkpoint(tensors, {"step": 5, "best": None, "nested": {"a": [1, 2]}})


def are_equal(one: Checkpoint, other: Checkpoint) -> bool:
    return one.facts == other.facts and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_round_trip(tmp_path):
    example().save(tmp_path / "state" / "last.safetensors")
    assert are_equal(Checkpoint.load(tmp_path / "state" / "last.safetensors"), example())


class _FullDisk:
    """A file on a disk with room for only a few bytes."""

    def __init__(self, file) -> None:
        self.file = file

    def __enter__(self) -> "_FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    example(1.0).save(path)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda name, mode: _FullDisk(os.fdopen(os.open(name, 0o102, 0o600), mode)))
        with pytest.raises(RegardError, match=r"last\.safetensors: no space left on the device"):
            example(2.0).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]
    assert are_equal(Checkpoint.load(path), example(1.0))


def test_failing_fsync_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    example(1.0).save(path)

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RegardError, match="cannot be written: Input/output error"):
            example(2.0).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]
    assert are_equal(Checkpoint.load(path), example(1.0))


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_file_size_limit_keeps_the_old_file(tmp_path):
    """The operating system refuses to write more than 2000 bytes."""
    script = """
import resource, sys, torch
from pathlib import Path
from regard.errors import RegardError
from regard.training.checkpoint import Checkpoint
path = Path(sys.argv[1])
Checkpoint({"a": torch.ones(10)}, {"step": 1}).save(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    Checkpoint({"a": torch.ones(10_000)}, {"step": 2}).save(path)
except RegardError as error:
    print(error.message)
"""
    path = tmp_path / "last.safetensors"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: cannot be written: File too large.\n"
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]
    assert Checkpoint.load(path).facts == {"step": 1}


@pytest.mark.parametrize("damage", ["truncated", "empty", "pickle", "no facts", "other facts"])
def test_damaged_file_is_an_error_and_is_not_changed(tmp_path, damage):
    path: Path = tmp_path / "last.safetensors"
    example().save(path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "pickle":
        torch.save({"a": torch.ones(2)}, path)
    else:
        from safetensors.torch import save_file

        save_file({"a": torch.ones(2)}, path, metadata={"facts": "[1]"} if damage == "other facts" else None)
    before = path.read_bytes()
    with pytest.raises(RegardError, match=r"last\.safetensors: damaged, or not a checkpoint.* Restore an intact copy"):
        Checkpoint.load(path)
    assert path.read_bytes() == before


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
    Checkpoint(gather_state(model, optimizer, ema_model), {}).save(tmp_path / "c")
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
