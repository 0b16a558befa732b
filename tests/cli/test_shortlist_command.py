"""`regard shortlist`, and translating with --shortlist."""

import shutil

import pytest

from regard.cli import main
from regard.pipelines import load
from tests.conftest import number_pairs


@pytest.fixture
def folder(tmp_path, transformer_folder):
    return shutil.copytree(transformer_folder, tmp_path / "model")


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in number_pairs(100, seed=5)))
    return path


def test_learn_and_translate(folder, pairs_file, tmp_path, capsys):
    assert main(["translate", str(folder), "one two", "--shortlist"]) == 2
    assert "the model has no shortlist" in capsys.readouterr().err
    sizes = ["--per-token", "2", "--frequent", "3"]
    assert main(["shortlist", str(folder), "--data", str(pairs_file), *sizes]) == 0
    assert f"Wrote {folder / 'shortlist.safetensors'}, learned from 100 pairs." in capsys.readouterr().err
    shortlist = load(folder, "cpu").shortlist
    assert shortlist.targets.shape[1] == 3  # the source token itself: the tokenizer is shared
    assert len(shortlist.frequent) == 3
    for options in ([], ["--precision", "int8"], ["--engine", "plain"], ["--method", "greedy"]):
        assert main(["translate", str(folder), "one two", "three", "--shortlist", "--device", "cpu", *options]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["evaluate", str(folder), "--data", str(pairs_file), "--shortlist", "--device", "cpu"]) == 0
    lines = tmp_path / "lines.txt"
    lines.write_text("one two\nthree\n")
    files = ["--input", str(lines), "--output", str(tmp_path / "out.txt")]
    assert main(["translate", str(folder), *files, "--shortlist", "--device", "cpu"]) == 0
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.tsv"], "missing.tsv"),
        (["--data", "PAIRS", "--per-token", "0"], "per_token must be at least 1 (got 0)."),
        (["--data", "EMPTY"], "no pairs with text"),
    ],
)
def test_bad_input(folder, pairs_file, tmp_path, capsys, arguments, message):
    (tmp_path / "empty.tsv").write_text("\t\n\tun\n")
    names = {"PAIRS": str(pairs_file), "EMPTY": str(tmp_path / "empty.tsv")}
    assert main(["shortlist", str(folder), *(names.get(word, word) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "shortlist.safetensors").exists()
