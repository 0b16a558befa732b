"""`regard bench`: the table, the JSON file and the plot."""

import json

import pytest

from regard.bench import measurement
from regard.cli import main

SMALL = ["--device", "cpu", "--lengths", "8", "--rounds", "1", "--no-compiled"]


@pytest.fixture(autouse=True)
def _low_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MIN_TIMED_SECONDS", 1e-4)
    monkeypatch.setitem(measurement.MATRIX_SIZE, "cpu", 64)


def test_attention_benchmark(capsys, tmp_path):
    options = [
        "--scores",
        "dot",
        "--masks",
        "none",
        "--out",
        str(tmp_path / "a.json"),
        "--plot",
        str(tmp_path / "a.png"),
    ]
    assert main(["bench", "attention", *SMALL, *options]) == 0
    output = capsys.readouterr().out
    assert "ceilings: matrix product" in output
    assert "| dot, forward+backward | 8 | **Regard** |" in output
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["implementation"] == "Regard"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_growth_benchmark(capsys, tmp_path):
    options = ["--scores", "dot", "--plot", str(tmp_path / "a.svg")]
    assert main(["bench", "growth", "--device", "cpu", "--lengths", "8", "16", "--no-compiled", *options]) == 0
    assert "| dot | 16 | formula, eager |" in capsys.readouterr().out
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("option", ["lengths", "scores", "masks", "shapes"])
def test_unsupported_options(capsys, option):
    value = "8" if option == "lengths" else "dot"
    assert main(["bench", "training", f"--{option}", value]) == 2
    assert f"bench training does not support --{option}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "rows.csv"], "rows.csv: expected the extension .json"),
        (["--plot", "plot.json"], "plot.json: expected the extension .png, .svg or .pdf"),
        (["--rounds", "0"], "--rounds must be at least 1 (got 0)"),
        (["--scores", "dott"], "No score is called 'dott'"),
    ],
)
def test_invalid_options_are_reported_before_measuring(capsys, options, message):
    assert main(["bench", "attention", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
