"""Early stopping with a decay, time budgets, and resuming of both."""

from types import SimpleNamespace

import pytest

from regard.errors import RegardError
from regard.training import loop, run_recipe
from regard.training.checkpoint import METRICS
from regard.training.log import read_metrics
from tests.training.helpers import (
    bit_equal,
    interrupt_and_resume,
    last_checkpoint,
    saved_tensors,
    small_dataset,
    small_recipe,
)

STALLS = {"schedule": "wsd", "validate_every": 2, "patience": 2, "steps": 100, "log_every": 1, "save_every": 3}


def run(recipe, out):
    return run_recipe(recipe, out, dataset=small_dataset(), quiet=True)


@pytest.fixture
def stalling(monkeypatch):
    """Validation improves up to step 4, independent of the weights."""
    monkeypatch.setattr(loop.TrainState, "improves", lambda self, *_: self.step <= 4)


def rates(out):
    return [line["lr"] for line in read_metrics(out / METRICS) if line["kind"] == "train"]


def test_stalled_validation_starts_the_decay(tmp_path, stalling):
    run(small_recipe(train=STALLS), tmp_path)
    # Best at step 4, stalled at 8; the decay takes a quarter of that.
    assert [line["step"] for line in read_metrics(tmp_path / METRICS) if line["kind"] == "train"][-1] == 10
    learning_rates = rates(tmp_path)
    assert learning_rates[3:9] == [learning_rates[3]] * 6  # constant after warm-up, until the decay starts
    assert 0 < learning_rates[9] < learning_rates[3]


def test_resume_before_an_early_decay_is_exact(tmp_path, stalling, monkeypatch):
    run(small_recipe(train=STALLS), tmp_path / "uninterrupted")
    # Interrupted before the eighth update: the decay starts after the resume.
    interrupt_and_resume(monkeypatch, lambda: run(small_recipe(train=STALLS), tmp_path / "resumed"))
    assert bit_equal(saved_tensors(tmp_path / "resumed"), saved_tensors(tmp_path / "uninterrupted"))
    assert rates(tmp_path / "resumed") == rates(tmp_path / "uninterrupted")


def test_resume_during_an_early_decay_is_exact(tmp_path, stalling, monkeypatch):
    settings = STALLS | {"save_every": 9}
    run(small_recipe(train=settings), tmp_path / "uninterrupted")
    set_learning_rate, calls = loop.set_learning_rate, []

    def fail(*arguments):
        calls.append(None)
        if len(calls) == 10:
            raise ConnectionError
        set_learning_rate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", fail)
        with pytest.raises(ConnectionError):
            run(small_recipe(train=settings), tmp_path / "resumed")
    run(small_recipe(train=settings), tmp_path / "resumed")
    assert bit_equal(saved_tensors(tmp_path / "resumed"), saved_tensors(tmp_path / "uninterrupted"))


def test_all_workers_decay_at_the_same_step(tmp_path):
    """With a learning rate near 0 nothing improves: both workers decay at the same step, and the run ends."""
    run(small_recipe(train=STALLS | {"workers": 2, "lr": 1e-30}), tmp_path)
    assert read_metrics(tmp_path / METRICS)[-1]["step"] == 8  # best at 2, stalled at 6


def clock(monkeypatch, seconds_per_step):
    """Replace the clock of the trainer by one that advances with each update."""
    now = SimpleNamespace(value=0.0)
    set_learning_rate = loop.set_learning_rate

    def tick(*arguments):
        now.value += seconds_per_step
        set_learning_rate(*arguments)

    monkeypatch.setattr(loop, "set_learning_rate", tick)
    for module in ("loop", "guards", "run"):
        monkeypatch.setattr(f"regard.training.{module}.time", SimpleNamespace(monotonic=lambda: now.value))
    return now


def test_run_ends_within_the_time_budget_also_if_it_is_resumed(tmp_path, monkeypatch):
    """Interrupted after the decay started and before the next regular checkpoint: the decay ends at the same step."""
    settings = small_recipe(train=STALLS | {"patience": 0, "time": "1m", "steps": 1000, "save_every": 500})
    with monkeypatch.context() as patch:
        clock(patch, 1.0)
        run(settings, tmp_path / "uninterrupted")
    last = read_metrics(tmp_path / "uninterrupted" / METRICS)[-1]["step"]
    assert 50 < last <= 63  # the clock is checked every ten steps
    assert rates(tmp_path / "uninterrupted")[-1] < 0.2 * max(rates(tmp_path / "uninterrupted"))
    with monkeypatch.context() as patch:
        now = clock(patch, 1.0)
        tick = loop.set_learning_rate

        def fail(*arguments):
            if now.value >= 55:
                raise ConnectionError
            tick(*arguments)

        patch.setattr(loop, "set_learning_rate", fail)
        with pytest.raises(ConnectionError):
            run(settings, tmp_path / "resumed")
    with monkeypatch.context() as patch:
        clock(patch, 0.001)  # a faster machine: without the stored decay start the run would be longer
        run(settings, tmp_path / "resumed")
    assert bit_equal(saved_tensors(tmp_path / "resumed"), saved_tensors(tmp_path / "uninterrupted"))


def test_time_budget_without_wsd_is_an_error(tmp_path):
    with pytest.raises(RegardError, match=r"train\.time needs the schedule wsd, .* \(got cosine\)"):
        run(small_recipe(train={"time": "10m"}), tmp_path / "out")
    with pytest.raises(RegardError, match="is not a valid duration"):
        run(small_recipe(train={"time": "soon", "schedule": "wsd"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_first_log_line_after_a_resume_covers_earlier_updates(tmp_path, monkeypatch):
    """It averages all updates since the previous line, including those before the checkpoint."""
    settings = small_recipe(train={"log_every": 4, "save_every": 3})
    run(settings, tmp_path / "uninterrupted")
    interrupt_and_resume(monkeypatch, lambda: run(settings, tmp_path / "resumed"))
    assert last_checkpoint(tmp_path / "resumed").exists()
    uninterrupted, resumed = (
        [
            (line["step"], line["loss"], line["nll"])
            for line in read_metrics(tmp_path / name / METRICS)
            if "loss" in line
        ]
        for name in ("uninterrupted", "resumed")
    )
    assert uninterrupted == resumed
