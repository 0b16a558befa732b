"""Experiment trackers: Weights & Biases in offline mode, and trackers that fail."""

import sys
from types import SimpleNamespace

import pytest

from regard.errors import RegardError
from regard.training import run_recipe
from regard.training.run import run_log, trackers
from regard.training.run.run_log import RunLog, read_metrics
from tests.training.helpers import small_dataset, small_recipe


class FakeWandb:
    """Records the calls that Regard makes."""

    def __init__(self) -> None:
        self.inits, self.logged, self.finished = [], [], 0

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.inits.append(options)
        run = SimpleNamespace(define_metric=lambda *_, **__: None, log=self.logged.append, finish=self._finish)
        return run

    def _finish(self) -> None:
        self.finished += 1


def test_metrics_are_logged_and_a_resumed_run_continues_its_run(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options = dict(dataset=small_dataset(), quiet=True)
    run_recipe(small_recipe(train={"steps": 6, "wandb": "offline"}), tmp_path / "out", **options)
    run_recipe(small_recipe(train={"steps": 8, "wandb": "offline"}), tmp_path / "out", **options)
    first, second = wandb.inits
    assert first["mode"] == "offline"
    assert first["name"] == "out"
    assert first["config"]["train"]["steps"] == 6
    assert first["id"] == second["id"]
    assert wandb.finished == 2
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in wandb.logged] == [line["step"] for line in lines]
    assert wandb.logged[0]["train/loss"] == lines[0]["loss"]
    assert "validation/bleu" in wandb.logged[-1]


def test_offline_run_of_the_package(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DISABLE_SERVICE", "false")
    with RunLog(
        tmp_path / "metrics.jsonl", 10, is_silent=True, wandb_mode="offline", recipe={"train": {"lr": 0.1}}
    ) as log:
        log.add(5, "train", loss=1.5)
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    assert any(path.suffix == ".wandb" and path.stat().st_size for path in folder.iterdir())


def test_missing_package_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RegardError, match=r'wandb is not installed\. Install it with: \S+ -m pip install "wandb>='):
        run_recipe(small_recipe(train={"wandb": "offline"}), tmp_path, dataset=small_dataset(), quiet=True)


def test_failing_tracker_is_left_out(tmp_path, monkeypatch, capsys):
    def add(*_):
        raise OSError("No space left on device")

    broken = SimpleNamespace(name="TensorBoard", add=add, close=lambda: None)
    monkeypatch.setattr(run_log, "make_trackers", lambda *_: [broken])
    with RunLog(tmp_path / "metrics.jsonl", 10, is_silent=True) as log:
        log.add(5, "train", loss=1.5)
        log.add(6, "train", loss=1.5)
    assert (
        capsys.readouterr().err == "regard: TensorBoard failed and is left out from now on: No space left on device\n"
    )
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert trackers.make_trackers(tmp_path, "off", {}) == []
