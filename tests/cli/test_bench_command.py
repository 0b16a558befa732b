"""`regard bench`: a table on stdout, JSON and a picture where asked for."""

import json

import pytest

from regard.bench import measurement
from regard.cli import main

SMALL = ["--device", "cpu", "--lengths", "8", "--rounds", "1", "--no-compiled"]


@pytest.fixture(autouse=True)
def _low_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "TURN", 1e-4)
    monkeypatch.setitem(measurement.SIDE, "cpu", 64)


def test_attention(capsys, tmp_path):
    given = ["--scores", "dot", "--masks", "none", "--out", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(["bench", "attention", *SMALL, *given]) == 0
    told = capsys.readouterr().out
    assert "ceilings: matrix product" in told
    assert "| dot, forward+backward | 8 | **Regard** |" in told
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["entrant"] == "Regard"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_growth(capsys, tmp_path):
    given = ["--scores", "dot", "--plot", str(tmp_path / "a.svg")]
    assert main(["bench", "growth", "--device", "cpu", "--lengths", "8", "16", "--no-compiled", *given]) == 0
    assert "| dot | 16 | formula, eager |" in capsys.readouterr().out
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("option", ["lengths", "scores", "masks"])
def test_options_that_a_benchmark_does_not_have(capsys, option):
    value = "8" if option == "lengths" else "dot"
    assert main(["bench", "training", f"--{option}", value]) == 2
    assert f"bench training has no --{option}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--out", "rows.csv"], "rows.csv: not a name"),
        (["--plot", "plot.json"], "plot.json: not a name"),
        (["--rounds", "0"], "0 rounds measure nothing"),
        (["--scores", "dott"], "No score is called 'dott'"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(capsys, given, said):
    assert main(["bench", "attention", "--device", "cpu", *given]) == 2
    assert said in capsys.readouterr().err
