"""Progress of long work: bars on a terminal, lines in a log, silence."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from regard import progress
from regard.training import DataConfig
from regard.training.tasks import read_dataset
from tests.training.helpers import plan
from tests.training.toy_images import write


@pytest.fixture
def screen(monkeypatch) -> io.StringIO:
    """The output of a fake terminal."""
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    return screen


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
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with progress.show_progress("decoding") as on_progress:
        for done in range(1, 41):
            now += 0.6
            on_progress(1000 * done, 40_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["decoding: 17,000 of 40,000", "decoding: 34,000 of 40,000"]
    with progress.show_progress("decoding", silent=True) as on_progress:
        on_progress(1, None)
    assert capsys.readouterr().err == ""


def test_quiet_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0.0)
    files = (write(tmp_path / "train.npz", 20),)
    read_dataset("mask-images", DataConfig(files))
    assert "decoding: 20 of 20" in capsys.readouterr().err
    read_dataset("mask-images", DataConfig(files), quiet=True)
    plan("mask-images", DataConfig(files))
    assert capsys.readouterr().err == ""


def test_status_on_a_terminal_and_in_a_log(screen, monkeypatch, capsys):
    with progress.show_status("translating") as on_status:
        on_status("500 lines/s, 0:00:10 left", 0.5)
    assert "translating" in screen.getvalue()
    assert "500 lines/s, 0:00:10 left" in screen.getvalue()
    monkeypatch.undo()
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with progress.show_status("translating") as on_status:
        for i in range(1, 26):
            now += 1.0
            on_status(f"{i} lines", None)
    assert capsys.readouterr().err.splitlines() == ["translating: 10 lines", "translating: 20 lines"]
