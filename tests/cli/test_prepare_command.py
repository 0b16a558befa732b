"""`regard prepare`, and `regard train` on its folder."""

import json

import pytest

from regard.cli import main
from regard.data import read_pairs

SIZES = ["--model.width", "16", "--model.heads", "2", "--model.encoder-layers", "1", "--model.decoder-layers", "1"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    pairs = [f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:120]]
    (folder / "pairs.tsv").write_text("".join([*pairs, pairs[0], "A cat.\t\n"]), encoding="utf-8")
    arguments = ["prepare", str(folder / "pairs.tsv"), "--out", str(folder / "shards"), "--vocab-size", "150"]
    assert main(arguments) == 0
    return folder / "shards"


def test_prepare_train_and_check(shards, tmp_path, capsys):
    assert main(["prepare", "--check", str(shards)]) == 0
    assert f"{shards} is intact: 108 pairs" in capsys.readouterr().err
    manifest = json.loads((shards / "dataset.json").read_text())
    assert manifest["dropped"] == {"empty": 1, "duplicate": 1}
    assert manifest["validation"] == 12
    arguments = [*SIZES, "--steps", "2", "--train.workers", "1"]
    assert main(["train", str(shards), "--out", str(tmp_path / "model"), *arguments]) == 0
    assert "108 pairs for training, 12 for validation; dropped: 1 empty, 1 duplicate" in capsys.readouterr().err
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[data]\nfiles = ["{shards}"]\n[train]\nsteps = 2\n')
    assert main(["train", str(recipe), "--out", str(tmp_path / "model"), *arguments]) == 0  # the same run
    assert "already finished" in capsys.readouterr().err


def test_the_task_is_that_of_the_shards(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 40)
    out = str(tmp_path / "shards")
    assert main(["prepare", str(tmp_path / "text.txt"), "--task", "language", "--out", out, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["train", out, "--dry-run"]) == 0
    assert 'task = "language"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No data is given. Pass files: regard prepare FILE … --out shards"),
        (["a.tsv", "--task", "segment"], "The task segment does not support token shards."),
        (
            ["a.tsv", "--kind", "bep"],
            "--kind bep is unknown. Choose from: word, space, char, bpe, bytes, sentencepiece.",
        ),
        (["a.tsv", "--tokenizer", "model", "--kind", "bpe"], "--tokenizer uses existing tokenizers."),
        (["a.tsv", "--tokenizer", "no-model"], "no-model/tokenizer.json: the file is missing."),
        (["no-such.tsv"], "There is no file no-such.tsv."),
        (["a.tsv", "--out", ""], "--out is empty."),
        (["--check", "no-such"], "no-such/dataset.json: the file is missing."),
    ],
)
def test_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"regard: {message}")
    assert not list(tmp_path.iterdir())
