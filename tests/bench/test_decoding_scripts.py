"""The scripts decoding_quality.py, decoding_million.py and decoding_float8.py of benchmarks, on tiny models."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.kernels.triton.support import triton_available
from regard.pipelines import load
from tests.conftest import number_pairs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(monkeypatch, name: str, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    importlib.import_module(name).main()


@pytest.fixture
def test_set(tmp_path) -> list[Path]:
    sides = zip(*number_pairs(30, seed=9))
    files = [tmp_path / name for name in ("source.txt", "reference.txt")]
    for file, side in zip(files, sides):
        file.write_text("".join(f"{line}\n" for line in side))
    return files


@pytest.mark.parametrize("beam", [1, 3])
def test_quality_table(monkeypatch, capsys, transformer_folder, test_set, beam):
    source, reference = test_set
    options = ["--input", source, "--reference", reference, "--beam", beam, "--device", "cpu"]
    run(monkeypatch, "decoding_quality", transformer_folder, *options)
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["plain, float32", "engine, float32", "engine, int8"]
    plain, engine, int8 = rows[2:]
    assert float(plain[1]) > 1
    assert (plain[2:5], engine[1:5]) == (["+0.00", "0", ""], [plain[1], "+0.00", "0", ""])
    assert (int8[3] == "0") == (int8[4] == "")


def test_unsupported_precision_is_a_row(monkeypatch, transformer_folder):
    module = importlib.import_module("decoding_quality")
    translator = load(transformer_folder, "cpu")
    translate = translator.translate

    def refuse_int8(lines, config=None, **options):
        if config.precision == "int8":
            raise RegardError("precision int8 is for CPUs.", "Use float16.")
        return translate(lines, config, **options)

    monkeypatch.setattr(translator, "translate", refuse_int8)
    lines, references = zip(*number_pairs(4, seed=9))
    table = module.compare_searches(translator, lines, references, "greedy", 1)
    assert "| engine, int8 | precision int8 is for CPUs" in table.splitlines()[-1]


def test_gap_of_competing_hypotheses(transformer_folder):
    """The other hypotheses of the n best are worse by the difference of scores; a pruned one by that when pruned."""
    competing_gap = importlib.import_module("decoding_quality").competing_gap
    translator = load(transformer_folder, "cpu")
    config = DecodeConfig(beam=3, n_best=3)
    line = number_pairs(1, seed=9)[0][0]
    found = translator.translate([line], config, history=True)[0]
    history = found[0].history
    for translation in found:
        gap = competing_gap(history, translation.hypothesis.ids, found[0].score)
        assert gap == pytest.approx(found[0].score - translation.score, abs=1e-6)
    step = history.steps[0]
    pruned = step.reasons.index("beam")
    live = [logprob for logprob, status in zip(step.logprobs, step.statuses) if status == "live"]
    gap = competing_gap(history, [step.tokens[pruned], 5], found[0].score)
    assert gap == pytest.approx(min(live) - step.logprobs[pruned])
    assert gap >= 0
    not_searched = next(token for token in range(4, 20) if token not in step.tokens)
    assert competing_gap(history, [not_searched], found[0].score) == min(live) - step.logprobs[-1]
    short = dataclasses.replace(history, steps=history.steps[:1])
    kept = step.tokens[step.statuses.index("live")]
    assert competing_gap(short, [kept, 5, 6], found[0].score) is None


def test_quality_with_files_of_different_lengths(monkeypatch, capsys, transformer_folder, test_set):
    source, reference = test_set
    reference.write_text("un\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "decoding_quality", transformer_folder, "--input", source, "--reference", reference)
    assert "source.txt has 30 lines" in capsys.readouterr().err


def test_large_file(monkeypatch, capsys, transformer_folder, test_set):
    options = ["--corpus", test_set[0], "--lines", 100, "--device", "cpu", "--method", "greedy"]
    run(monkeypatch, "decoding_million", transformer_folder, *options)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["10", "100"]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows[2:])


@pytest.mark.skipif(not triton_available(), reason="needs Triton")
def test_float8_tables(monkeypatch, capsys):
    run(monkeypatch, "decoding_float8", "--tiny", "--rounds", 1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row][-2:] == ["base", "gpt2"]
    errors = [float(row[5]) for row in rows if len(row) == 6 and row[1].isdigit()]
    assert len(errors) == 4
    assert 0 < max(errors) < 1e-2


def test_shuffled_lines_are_repeated(tmp_path):
    module = importlib.import_module("decoding_million")
    module.write_shuffled(tmp_path / "lines", ["a", "b", "c"], 7)
    lines = (tmp_path / "lines").read_text().split()
    assert sorted(lines[:3]) == sorted(lines[3:6]) == ["a", "b", "c"]
    assert len(lines) == 7
