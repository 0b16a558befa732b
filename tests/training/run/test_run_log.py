"""The log of a run: a progress bar and a line per validation on a terminal, and the file of metrics."""

import io
import json
import re
import time

import pytest
from rich.console import Console

from regard.training.run import run_log


@pytest.fixture
def screen(monkeypatch) -> io.StringIO:
    """The output of a fake terminal."""
    screen = io.StringIO()
    monkeypatch.setattr(run_log, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    return screen


def test_terminal_shows_a_bar_and_a_line_per_validation(tmp_path, screen):
    with run_log.RunLog(tmp_path / "metrics.jsonl", steps=10) as log:
        log.add(5, "train", loss=1.5, nll=1.25)
        log.add(5, "validation", nll=2.0, bleu=31.0, exact_match=1.0)
        log.bar.refresh()
    output = screen.getvalue()
    assert "loss 1.500" in output
    assert "step 5 of 10  validation  nll 2  BLEU 31.00  exact match 1.0 %" in output
    assert "None" not in output
    assert [line["kind"] for line in run_log.read_metrics(tmp_path / "metrics.jsonl")] == ["train", "validation"]


def test_time_left_ends_with_the_time_budget(tmp_path, capsys):
    log = run_log.RunLog(tmp_path / "metrics.jsonl", steps=1000)
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
    assert run_log.read_metrics(path) == [valid]


@pytest.mark.parametrize("value", ["x", None, [1], 10**400, float("nan")], ids=str)
def test_losses_that_are_not_numbers_are_not_plotted(tmp_path, value):
    lines = [{"step": 1, "kind": "train", "nll": value}, {"step": 2, "kind": "train", "nll": 1.0}]
    run_log.plot_losses(lines, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
