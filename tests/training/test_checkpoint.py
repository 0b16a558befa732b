"""Checkpoints: restoring of the training state."""

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from regard.errors import RegardError
from regard.training.checkpoint import (
    CHECKSUMS,
    TENSORS,
    Checkpoint,
    CheckpointStore,
    gather_state,
    load_checkpoint,
    restore_state,
    sha256,
)
from regard.training.optimizers import make_optimizer, update_ema


class Layers(nn.ModuleList):
    def forward(self, x):
        return self[1](self[0](x))


def model_and_optimizer(width: int = 3, name: str = "adam", momentum: float = 0.9):
    torch.manual_seed(width)
    model = Layers([nn.Linear(width, width), nn.Linear(width, width)])
    model[1].weight = model[0].weight  # tied
    optimizer = make_optimizer(name, model, 0.1, 0.98, 0.01, momentum)
    return model, optimizer


def learn(model, optimizer, ema_model, steps):
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        update_ema(ema_model, model, 0.5, step)


@pytest.mark.parametrize(
    ("name", "momentum"), [("adam", 0.9), ("adamw", 0.9), ("muon", 0.9), ("sgd", 0.9), ("sgd", 0.0)]
)
def test_restored_state_resumes_exactly(tmp_path, name, momentum):
    model, optimizer = model_and_optimizer(name=name, momentum=momentum)
    ema_model = copy.deepcopy(model)
    learn(model, optimizer, ema_model, 3)
    (tmp_path / "c").write_bytes(Checkpoint(gather_state(model, optimizer, ema_model), {}).to_bytes())
    learn(model, optimizer, ema_model, 2)

    other, other_optimizer = model_and_optimizer(name=name, momentum=momentum)
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


def example(step: int, size: int = 3) -> Checkpoint:
    tensors = {"model.a": torch.full((size,), float(step)), "optimizer.0.step": torch.tensor(step)}
    return Checkpoint(tensors, {"step": step, "best": None, "nested": {"a": [1, 2]}})


def names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run / "state")) for path in (run / "state").rglob("*") if path.is_file())


def files_of(*steps: int) -> list[str]:
    return [f"step-{step:08}/{name}" for step in steps for name in (CHECKSUMS, TENSORS)]


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    """A store with checkpoints of two steps."""
    store = CheckpointStore(tmp_path)
    store.save(example(400), 400)
    store.save(example(500), 500)
    return store


def intact_step(store: CheckpointStore, report=lambda _: None) -> int:
    return load_checkpoint(store.find_intact(report)).metadata["step"]


def test_round_trip(store):
    loaded = load_checkpoint(store.find_intact())
    assert loaded.metadata == example(500).metadata
    assert loaded.tensors.keys() == example(500).tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in example(500).tensors.items())


def test_newest_checkpoints_are_kept(store, tmp_path):
    store.save(example(600), 600)
    assert names(tmp_path) == files_of(500, 600)
    CheckpointStore(tmp_path, keep=1).save(example(700), 700)
    assert names(tmp_path) == files_of(700)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[-5:]
    elif how == "empty":
        content.clear()
    elif how == "first bit":
        content[0] ^= 1
    elif how == "last bit":
        content[-1] ^= 128
    elif how == "pickle":
        torch.save({"a": torch.ones(2)}, path)
        return
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "empty", "first bit", "last bit", "pickle", "missing"])
def test_damaged_checkpoint_is_passed_over_and_reported(store, how):
    path = store.path(500) / TENSORS
    path.unlink() if how == "missing" else damage(path, how)
    lines: list[str] = []
    assert intact_step(store, lines.append) == 400
    reason = "No such file or directory" if how == "missing" else "does not match"
    assert len(lines) == 1
    assert lines[0].startswith(f"{store.path(500)}: damaged (")
    assert reason in lines[0]
    assert lines[0].endswith("; resuming from step 400.")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"step": 500}', b'{"step": 500, "sha256": {}}', b'{"step": 1e999}', b"\xff", b"[" * 9**5]
)
def test_damaged_checksums_are_passed_over(store, content):
    (store.path(500) / CHECKSUMS).write_bytes(content)
    assert intact_step(store) == 400


@pytest.mark.parametrize("name", ["/dev/zero", "../step-00000400/state.safetensors"])
def test_checksums_of_other_folders_are_not_read(store, name):
    """Reading /dev/zero would never end."""
    (store.path(500) / CHECKSUMS).write_text(json.dumps({"step": 500, "sha256": {name: ""}}))
    lines: list[str] = []
    assert intact_step(store, lines.append) == 400
    assert f"names a file outside of the folder: {name}" in lines[0]


def test_checksums_of_another_step_are_passed_over(store):
    path = store.path(500) / CHECKSUMS
    path.write_text(path.read_text().replace('"step": 500', '"step": 501'))
    assert intact_step(store) == 400


def test_incomplete_checkpoint_is_ignored_and_removed(store, tmp_path):
    (store.path(500) / CHECKSUMS).unlink()
    lines: list[str] = []
    assert intact_step(store, lines.append) == 400
    assert lines == []
    store.save(example(450), 450)
    assert names(tmp_path) == files_of(400, 450)


def test_damaged_checkpoint_is_removed_after_the_next_save(store, tmp_path):
    """Otherwise it would count as one of those to keep."""
    damage(store.path(500) / TENSORS, "truncated")
    store.save(example(450), 450)
    assert names(tmp_path) == files_of(400, 450)


def test_all_damaged_is_an_error_and_nothing_is_changed(store, tmp_path):
    for step in (400, 500):
        damage(store.path(step) / TENSORS, "last bit")
    with pytest.raises(RegardError, match=r"step-00000500: damaged, or not a checkpoint.* Restore an intact copy"):
        store.find_intact()
    assert names(tmp_path) == files_of(400, 500)


def test_several_files_are_checked(tmp_path):
    """Sharded runs write one file per rank, then the checksums of all."""
    store = CheckpointStore(tmp_path)
    folder = store.start(10)
    folder.mkdir(parents=True)
    for rank in range(2):
        save_file({"a": torch.full((2,), float(rank))}, folder / f"rank-{rank}.safetensors")
    assert store.find_intact() is None
    store.finish(10, {path.name: sha256(path) for path in folder.iterdir()})
    assert store.find_intact() == folder
    damage(folder / "rank-1.safetensors", "last bit")
    with pytest.raises(RegardError, match=r"the checksum of rank-1\.safetensors does not match"):
        store.find_intact()


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failing_flush_keeps_the_older_checkpoint(store, tmp_path, monkeypatch, call, number):
    """At each flush of a save: of the tensors, of their folder, of the checksums, and of their folder."""
    calls, fsync = [], os.fsync

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) - 1 == call or (number == errno.ENOSPC and len(calls) > call):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RegardError, match=r"no space left|cannot be written"):
            store.save(example(600), 600)
    # A full disk first makes room by deleting all but the newest checkpoint.
    assert names(tmp_path) == (files_of(500) if number == errno.ENOSPC else files_of(400, 500))
    assert intact_step(store) == 500
    store.save(example(600), 600)
    assert intact_step(store) == 600


def test_full_disk_makes_room_by_deleting_older_checkpoints(store, tmp_path, monkeypatch):
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if store.path(400).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    store.save(example(600), 600)
    assert names(tmp_path) == files_of(500, 600)


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_file_size_limit_keeps_the_older_checkpoint(tmp_path):
    """The operating system refuses to write more than 2000 bytes."""
    script = """
import resource, sys, torch
from regard.errors import RegardError
from regard.training.checkpoint import Checkpoint
from regard.training.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(Checkpoint({"a": torch.ones(10)}, {"step": 1}), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    store.save(Checkpoint({"a": torch.ones(10_000)}, {"step": 2}), 2)
except RegardError as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/state/step-00000002/{TENSORS}: cannot be written: File too large.\n"
    assert names(tmp_path) == files_of(1)
    assert intact_step(CheckpointStore(tmp_path)) == 1


def test_directories_that_cannot_be_flushed_are_allowed(tmp_path, monkeypatch):
    """As on some network file systems."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    CheckpointStore(tmp_path).save(example(1), 1)
    assert names(tmp_path) == files_of(1)
