"""The log of a run: a progress bar and a line per validation on a terminal, and the file of metrics."""

import io

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
        log.add(5, "validation", nll=2.0, bleu=31.0)
        log.bar.refresh()
    output = screen.getvalue()
    assert "loss 1.500" in output
    assert "step 5 of 10  validation  nll 2  bleu 31" in output
    assert "None" not in output
    assert [line["kind"] for line in run_log.read_metrics(tmp_path / "metrics.jsonl")] == ["train", "validation"]
