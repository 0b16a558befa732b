"""What a run says of itself: on a terminal, and in a log."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from regard.training import DataConfig, plan
from regard.training import report as reports
from regard.training.tasks import read_dataset
from tests.training.toy_images import write


@pytest.fixture
def screen(monkeypatch) -> io.StringIO:
    """A terminal."""
    screen = io.StringIO()
    monkeypatch.setattr(reports, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    return screen


def test_a_terminal_gets_a_bar_with_the_loss_and_a_line_for_each_validation(tmp_path, screen):
    with reports.RunLog(tmp_path / "metrics.jsonl", steps=10) as report:
        report.add(5, "train", loss=1.5, nll=1.25)
        report.add(5, "validation", nll=2.0, bleu=31.0)
        report.bar.refresh()
    shown = screen.getvalue()
    assert "loss 1.500" in shown
    assert "step 5 of 10  validation  nll 2  bleu 31" in shown
    assert "None" not in shown
    assert [line["kind"] for line in reports.read_metrics(tmp_path / "metrics.jsonl")] == ["train", "validation"]


def test_a_terminal_gets_a_bar_of_what_is_decoded(tmp_path, screen):
    data = DataConfig((write(tmp_path / "train.npz", 20),), cache=str(tmp_path / "cache"))
    read_dataset("classify-images", data)
    assert "decoding" in screen.getvalue()
    assert "20/20" in screen.getvalue()
    # What is decoded already is only opened.
    before = screen.getvalue()
    read_dataset("classify-images", data)
    assert screen.getvalue() == before


def test_a_log_gets_a_line_now_and_then(tmp_path, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(reports, "time", SimpleNamespace(monotonic=lambda: now))
    with reports.show_progress("decoding") as tell:
        for done in range(1, 41):
            now += 0.6
            tell(1000 * done, 40_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["decoding: 17,000 of 40,000", "decoding: 34,000 of 40,000"]
    with reports.show_progress("decoding", silent=True) as tell:
        tell(1, None)
    assert capsys.readouterr().err == ""


def test_who_wants_no_words_gets_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reports, "EVERY", 0.0)
    files = (write(tmp_path / "train.npz", 20),)
    read_dataset("mask-images", DataConfig(files))
    assert "decoding: 20 of 20" in capsys.readouterr().err
    read_dataset("mask-images", DataConfig(files), quiet=True)
    plan("mask-images", DataConfig(files))
    assert capsys.readouterr().err == ""
