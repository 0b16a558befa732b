"""Comparison of scores: models that differ only in the score, trained on the same data."""

import json

import pytest

import regard
from regard.attention import SCORES
from regard.cli import main
from regard.data import read_pairs
from regard.errors import RegardError


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    lines = [f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:40]]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_every_score_and_no_attention(pairs, tmp_path):
    table = regard.scores(pairs, tmp_path, steps=1, device="cpu", quiet=True)
    assert [row.score for row in table.rows] == [*(name for name in SCORES if name != "concat_joint"), "none"]
    for row in table.rows:
        assert 0 <= row.metric <= 100
        assert row.loss > 0
        assert row.tokens_per_second > 0
    sizes = {row.score: row.parameters for row in table.rows}
    assert sizes["none"] < sizes["dot"] < sizes["general"] < sizes["concat"]
    assert regard.load(tmp_path / "concat", "cpu").model.config.score == "concat"
    assert regard.scores(pairs, tmp_path, steps=1, device="cpu", quiet=True) == table  # from the folder


def test_scores_of_a_transformer(pairs, tmp_path):
    options = dict(device="cpu", family="transformer", quiet=True)
    table = regard.scores([pairs], tmp_path, steps=1, scores=("dot", "concat"), **options)
    assert [row.score for row in table.rows] == ["dot", "concat"]
    with pytest.raises(RegardError, match="No score of the family transformer is called 'none'"):
        regard.scores(pairs, scores=("none",), **options)


def test_command_prints_a_table(pairs, tmp_path, capsys):
    options = ["--scores", "dot", "none", "--steps", "2", "--data", pairs, "--device", "cpu", "--out", str(tmp_path)]
    assert main(["scores", *options]) == 0
    output = capsys.readouterr()
    assert "seq2seq, 2 steps each" in output.out
    assert "| loss | parameters | tokens/s |" in output.out
    assert "\n| dot | " in output.out
    assert "\n| none | " in output.out
    assert "\nnone: " in output.err
    assert [row["score"] for row in json.loads((tmp_path / "scores.json").read_text())["rows"]] == ["dot", "none"]
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps must be at least 1 (got 0)."),
        (["--scores", "dott"], "No score of the family seq2seq is called 'dott'."),
    ],
)
def test_invalid_options_exit_with_an_error(capsys, options, message):
    assert main(["scores", *options]) == 2
    assert message in capsys.readouterr().err
