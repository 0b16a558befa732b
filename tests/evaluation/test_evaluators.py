"""`regard.evaluate`: the metrics of the command line, from Python."""

import json

import pytest

import regard
from regard.cli import main
from regard.decode import DecodeConfig
from regard.errors import RegardError

GREEDY = DecodeConfig(method="greedy")


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("one two\tdeux un\nthree four\tquatre trois\n", encoding="utf-8")
    return path


def test_metrics_equal_those_of_the_command(pairs, tmp_path, seq2seq_folder, seq2seq):
    metrics = regard.evaluate(seq2seq, pairs, decode=GREEDY, quiet=True)
    command = ["evaluate", str(seq2seq_folder), "--data", str(pairs), "--method", "greedy"]
    assert main([*command, "--json", str(tmp_path / "m.json"), "--device", "cpu"]) == 0
    printed = json.loads((tmp_path / "m.json").read_text())
    assert printed.keys() == metrics.keys()
    for name in ("bleu", "chrf", "exact_match", "loss", "perplexity", "signature", "sentences", "data"):
        assert metrics[name] == printed[name], name


def test_model_folder_and_list_of_files(pairs, seq2seq_folder):
    metrics = regard.evaluate(seq2seq_folder, [pairs], quiet=True)
    assert (metrics["sentences"], metrics["exact_match"]) == (2, 100.0)


def test_unknown_layer_is_an_error(pairs, tmp_path, transformer):
    (tmp_path / "gold.txt").write_text("0-1 1-0\n0-1 1-0\n")
    with pytest.raises(RegardError, match=r"Unknown cross-attention 'decoder\.9'"):
        regard.evaluate(transformer, pairs, alignments=tmp_path / "gold.txt", layer="decoder.9", quiet=True)


def test_other_objects_are_an_error(pairs):
    with pytest.raises(RegardError, match=r"Cannot evaluate int\. Pass what regard\.load returns\."):
        regard.evaluate(3, pairs)


def test_unknown_options_are_errors(transformer_folder):
    with pytest.raises(RegardError, match=r"evaluate has no option column\. Did you mean columns\?"):
        regard.evaluate(transformer_folder, "test.tsv", column=("source", "target"))
    with pytest.raises(RegardError, match=r"look has no option layer\. Did you mean layers\?"):
        regard.look(regard.load(transformer_folder, "cpu"), "one", layer="decoder.0.cross")
