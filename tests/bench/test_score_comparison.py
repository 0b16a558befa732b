"""Comparison of scores: models that differ only in the score, trained on the same data."""

import json

import pytest

from regard.attention import SCORES
from regard.bench import bench_scores
from regard.cli import main
from regard.data import read_pairs
from regard.errors import RegardError


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    lines = [f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:40]]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_every_score_and_no_attention(pairs):
    reported = []
    report = bench_scores("cpu", data=[pairs], steps=1, on_row=reported.append)
    assert [row.score for row in report.rows] == [*SCORES, "none"]
    assert reported == list(report.rows)
    for row in report.rows:
        assert 0 <= row.metric <= 100
        assert row.loss > 0
        assert row.tokens_per_second > 0
        assert row.seconds > 0
    sizes = {row.score: row.parameters for row in report.rows}
    assert sizes["none"] < sizes["dot"] < sizes["general"] < sizes["concat"]


def test_scores_of_a_transformer(pairs):
    report = bench_scores("cpu", data=[pairs], steps=1, family="transformer", scores=("dot", "concat"))
    assert [row.score for row in report.rows] == ["dot", "concat"]
    with pytest.raises(RegardError, match="No score of the family transformer is called 'none'"):
        bench_scores("cpu", family="transformer", scores=("none",))


def test_command_prints_a_table(pairs, tmp_path, capsys):
    out = tmp_path / "rows.json"
    options = ["--scores", "dot", "none", "--steps", "2", "--data", pairs, "--device", "cpu", "--out", str(out)]
    assert main(["bench", "scores", *options]) == 0
    output = capsys.readouterr().out
    assert "seq2seq, 2 steps each" in output
    assert "| loss | parameters | tokens/s | seconds |" in output
    assert "\n| dot | " in output
    assert "\n| none | " in output
    assert [row["score"] for row in json.loads(out.read_text())["rows"]] == ["dot", "none"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["scores", "--lengths", "8"], "bench scores does not support --lengths."),
        (["scores", "--rounds", "2"], "bench scores does not support --rounds."),
        (["scores", "--plot", "a.png"], "bench scores does not support --plot."),
        (["scores", "--steps", "0"], "steps must be at least 1 (got 0)."),
        (["scores", "--scores", "dott"], "No score of the family seq2seq is called 'dott'."),
        (["training", "--steps", "2"], "bench training does not support --steps."),
        (["attention", "--family", "seq2seq"], "bench attention does not support --family."),
    ],
)
def test_invalid_options_exit_with_an_error(capsys, options, message):
    assert main(["bench", *options]) == 2
    assert message in capsys.readouterr().err
