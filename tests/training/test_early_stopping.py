"""Early stopping with a decay, time budgets, and what a resumed run needs for both."""

from types import SimpleNamespace

import pytest

from regard.errors import RegardError
from regard.training import train, trainer
from regard.training.report import read_metrics
from regard.training.run_folder import METRICS, STATE
from tests.training.helpers import cut_off_and_go_on, same_bits, small, small_dataset, weights_of

STALLS = {"schedule": "wsd", "validate_every": 2, "patience": 2, "steps": 100, "log_every": 1, "save_every": 3}


def run(recipe, out):
    return train(recipe, out, dataset=small_dataset(), quiet=True)


@pytest.fixture
def stalling(monkeypatch):
    """Validation improves up to step 4, whatever the weights."""
    monkeypatch.setattr(trainer.TrainState, "improves", lambda self, *_: self.step <= 4)


def rates(out):
    return [line["lr"] for line in read_metrics(out / METRICS) if line["kind"] == "train"]


def test_a_stalled_validation_starts_the_decay(tmp_path, stalling):
    run(small(train=STALLS), tmp_path)
    # Best at step 4, stalled at 8; the decay takes a quarter of that.
    assert [line["step"] for line in read_metrics(tmp_path / METRICS) if line["kind"] == "train"][-1] == 10
    found = rates(tmp_path)
    assert found[3:9] == [found[3]] * 6  # warm-up, then constant up to the first step of the decay
    assert 0 < found[9] < found[3]


def test_an_early_decay_resumes_exactly(tmp_path, stalling, monkeypatch):
    run(small(train=STALLS), tmp_path / "whole")
    # Cut off before the eighth update: the decision comes after the resume.
    cut_off_and_go_on(monkeypatch, lambda: run(small(train=STALLS), tmp_path / "resumed"))
    assert same_bits(weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole"))
    assert rates(tmp_path / "resumed") == rates(tmp_path / "whole")


def test_a_cut_during_the_decay_resumes_exactly(tmp_path, stalling, monkeypatch):
    settings = STALLS | {"save_every": 9}
    run(small(train=settings), tmp_path / "whole")
    set_learning_rate, calls = trainer.set_learning_rate, []

    def cut(*arguments):
        calls.append(None)
        if len(calls) == 10:
            raise ConnectionError
        set_learning_rate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "set_learning_rate", cut)
        with pytest.raises(ConnectionError):
            run(small(train=settings), tmp_path / "resumed")
    run(small(train=settings), tmp_path / "resumed")
    assert same_bits(weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole"))


def test_workers_follow_the_decision(tmp_path):
    """With a learning rate of 0 nothing improves: both workers decay at the same step, and the run ends."""
    run(small(train=STALLS | {"workers": 2, "lr": 1e-30}), tmp_path)
    assert read_metrics(tmp_path / METRICS)[-1]["step"] == 8  # the first is the best; stalled at 6


def clock(monkeypatch, seconds_per_step):
    """A clock that moves with the updates alone."""
    now = SimpleNamespace(value=0.0)
    set_learning_rate = trainer.set_learning_rate

    def tick(*arguments):
        now.value += seconds_per_step
        set_learning_rate(*arguments)

    monkeypatch.setattr(trainer, "set_learning_rate", tick)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now.value))
    return now


def test_a_time_budget_fits_the_schedule(tmp_path, monkeypatch):
    clock(monkeypatch, 1.0)
    run(small(train=STALLS | {"patience": 0, "time": "1m", "steps": 1000}), tmp_path)
    last = read_metrics(tmp_path / METRICS)[-1]["step"]
    assert 50 < last <= 63  # the clock is looked at every ten steps
    assert rates(tmp_path)[-1] < 0.2 * max(rates(tmp_path))


def test_a_decision_by_the_clock_is_replayed(tmp_path, monkeypatch):
    """Cut off after the decision and before the next regular checkpoint: the decay goes to the same end."""
    settings = small(train=STALLS | {"patience": 0, "time": "1m", "steps": 1000, "save_every": 500})
    with monkeypatch.context() as patch:
        clock(patch, 1.0)
        run(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        now = clock(patch, 1.0)
        tick = trainer.set_learning_rate

        def cut(*arguments):
            if now.value >= 55:
                raise ConnectionError
            tick(*arguments)

        patch.setattr(trainer, "set_learning_rate", cut)
        with pytest.raises(ConnectionError):
            run(settings, tmp_path / "resumed")
    with monkeypatch.context() as patch:
        clock(patch, 0.001)  # a much faster machine: without the stored decision the run would be longer
        run(settings, tmp_path / "resumed")
    assert same_bits(weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole"))


def test_a_time_budget_needs_a_schedule_that_can_end_early(tmp_path):
    with pytest.raises(RegardError, match=r"train\.time needs the schedule wsd, .* \(got cosine\)"):
        run(small(train={"time": "10m"}), tmp_path / "out")
    with pytest.raises(RegardError, match="is not a duration"):
        run(small(train={"time": "soon", "schedule": "wsd"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_first_line_of_metrics_after_a_resume(tmp_path, monkeypatch):
    """It averages all updates since the line before it, those before the checkpoint too."""
    settings = small(train={"log_every": 4, "save_every": 3})
    run(settings, tmp_path / "whole")
    cut_off_and_go_on(monkeypatch, lambda: run(settings, tmp_path / "resumed"))
    assert (tmp_path / "resumed" / STATE).exists()
    whole, resumed = (
        [
            (line["step"], line["loss"], line["nll"])
            for line in read_metrics(tmp_path / name / METRICS)
            if "loss" in line
        ]
        for name in ("whole", "resumed")
    )
    assert whole == resumed
