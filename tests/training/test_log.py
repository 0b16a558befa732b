"""The log of a run: a progress bar and a line per validation on a terminal, the file of metrics, and trackers."""

import io
import json
import re
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from regard.errors import RegardError
from regard.training import run_recipe
from regard.training.log import RunLog, make_trackers, plot_losses, read_metrics
from tests.training.helpers import small_dataset, small_recipe


@pytest.fixture
def screen(monkeypatch) -> io.StringIO:
    """The output of a fake terminal."""
    screen = io.StringIO()
    monkeypatch.setattr("regard.training.log.Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    return screen


def test_terminal_shows_a_bar_and_a_line_per_validation(tmp_path, screen):
    with RunLog(tmp_path / "metrics.jsonl", steps=10) as log:
        log.add(5, "train", loss=1.5, nll=1.25)
        log.add(5, "validation", nll=2.0, bleu=31.0, exact_match=1.0)
        log.bar.refresh()
    output = screen.getvalue()
    assert "loss 1.500" in output
    assert "step 5 of 10  validation  nll 2  BLEU 31.00  exact match 1.0 %" in output
    assert "None" not in output
    assert [line["kind"] for line in read_metrics(tmp_path / "metrics.jsonl")] == ["train", "validation"]


def test_time_left_ends_with_the_time_budget(tmp_path, capsys):
    log = RunLog(tmp_path / "metrics.jsonl", steps=1000)
    log.start_time -= 10
    log.add(10, "train", loss=1.5, nll=1.25)
    assert re.search(r"  1[67] min left\n$", capsys.readouterr().err)
    log.deadline = time.monotonic() + 30.4
    log.add(10, "train", loss=1.5, nll=1.25)
    assert re.search(r"  (30|29) s left\n$", capsys.readouterr().err)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"step": 1}',
        '{"step": 1, "kind": ["train"]}',
        '{"step": true, "kind": "train", "nll": 1.0}',
        '{"step": 1' + "0" * 40 + ', "kind": "train", "nll": 1.0}',
    ],
    ids=["nested", "no kind", "list", "bool", "huge"],
)
def test_lines_that_no_run_writes_are_skipped(tmp_path, line):
    path, valid = tmp_path / "metrics.jsonl", {"step": 1, "kind": "train", "nll": 2.0}
    path.write_text(f"{line}\n{json.dumps(valid)}\n")
    assert read_metrics(path) == [valid]


@pytest.mark.parametrize("value", ["x", None, [1], 10**400, float("nan")], ids=str)
def test_losses_that_are_not_numbers_are_not_plotted(tmp_path, value):
    lines = [{"step": 1, "kind": "train", "nll": value}, {"step": 2, "kind": "train", "nll": 1.0}]
    plot_losses(lines, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


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
    monkeypatch.setattr("regard.training.log.make_trackers", lambda *_: [broken])
    with RunLog(tmp_path / "metrics.jsonl", 10, is_silent=True) as log:
        log.add(5, "train", loss=1.5)
        log.add(6, "train", loss=1.5)
    assert (
        capsys.readouterr().err == "regard: TensorBoard failed and is left out from now on: No space left on device\n"
    )
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert make_trackers(tmp_path, "off", {}) == []
