"""The log of a run: progress bars on a terminal, lines in a log file, quiet runs."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from regard.training import DataConfig, run_log
from regard.training.tasks import read_dataset
from tests.training.helpers import plan
from tests.training.toy_images import write


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


def test_terminal_shows_a_bar_while_images_are_decoded(tmp_path, screen):
    data = DataConfig((write(tmp_path / "train.npz", 20),), cache=str(tmp_path / "cache"))
    read_dataset("classify-images", data)
    assert "decoding" in screen.getvalue()
    assert "20/20" in screen.getvalue()
    # Cached images are not decoded again.
    before = screen.getvalue()
    read_dataset("classify-images", data)
    assert screen.getvalue() == before


def test_log_has_a_progress_line_every_ten_seconds(tmp_path, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(run_log, "time", SimpleNamespace(monotonic=lambda: now))
    with run_log.show_progress("decoding") as on_progress:
        for done in range(1, 41):
            now += 0.6
            on_progress(1000 * done, 40_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["decoding: 17,000 of 40,000", "decoding: 34,000 of 40,000"]
    with run_log.show_progress("decoding", silent=True) as on_progress:
        on_progress(1, None)
    assert capsys.readouterr().err == ""


def test_quiet_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_log, "LOG_INTERVAL", 0.0)
    files = (write(tmp_path / "train.npz", 20),)
    read_dataset("mask-images", DataConfig(files))
    assert "decoding: 20 of 20" in capsys.readouterr().err
    read_dataset("mask-images", DataConfig(files), quiet=True)
    plan("mask-images", DataConfig(files))
    assert capsys.readouterr().err == ""
