"""Commands on small trained models."""

import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
from matplotlib.image import imread

from regard.cli import main
from regard.evaluation import align, alignment_error_rate, evaluate
from regard.evaluation.alignment import sharpest_layer
from tests.conftest import number_links, number_pairs


@pytest.fixture
def run(capsys):
    """Run a command that must succeed; returns the lines of its standard output."""

    def call(*argv: object) -> list[str]:
        code = main([*map(str, argv), "--device", "cpu"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out.splitlines()

    return call


@pytest.fixture
def stdin(monkeypatch):
    def set_stdin(content: str | bytes) -> None:
        content = content.encode() if isinstance(content, str) else content
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return set_stdin


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in number_pairs(20, seed=11)))
    return path


# translate


def test_translate_arguments(run, seq2seq_folder):
    assert run("translate", seq2seq_folder, "one two three", "", "four five") == ["trois deux un", "", "cinq quatre"]


def test_translate_standard_input(run, stdin, seq2seq_folder):
    stdin("one two three\r\n\n  \nfour five")
    assert run("translate", seq2seq_folder) == ["trois deux un", "", "", "cinq quatre"]


def test_prefix_begins_every_translation(run, seq2seq_folder):
    lines = run("translate", seq2seq_folder, "one two three", "four five", "--prefix", "neuf")
    assert all(line.startswith("neuf") for line in lines)


def test_required_and_forbidden_phrases(run, seq2seq_folder):
    options = ["--require", "neuf dix", "--forbid", "un", "--require", "sept", "--forbid", "quatre"]
    lines = run("translate", seq2seq_folder, "one two three", "", "four five", *options)
    assert lines[1] == ""
    for line in (lines[0], lines[2]):
        assert "neuf dix" in line
        assert "sept" in line.split()
        assert not {"un", "quatre"} & set(line.split())
    assert "un" not in run("translate", seq2seq_folder, "one two", "--forbid", "un", "--method", "greedy")[0].split()


def test_translations_of_a_file_do_not_depend_on_the_block_size(run, monkeypatch, tmp_path, seq2seq_folder, seq2seq):
    sources = [source for source, _ in number_pairs(50, seed=12)]
    (tmp_path / "lines.txt").write_text("\n".join(sources))
    expected = run("translate", seq2seq_folder, "--input", tmp_path / "lines.txt")
    assert expected == [n_best[0].text for n_best in seq2seq.translate(sources)]
    monkeypatch.setattr("regard.cli.common.BLOCK_SIZE", 7)
    assert run("translate", seq2seq_folder, "--input", tmp_path / "lines.txt") == expected


def test_n_best_lines_have_indices_and_are_sorted(run, transformer_folder):
    lines = [line.split(" ||| ") for line in run("translate", transformer_folder, "one two", "three", "--n-best", 3)]
    assert [index for index, _, _ in lines] == list("000111")
    scores = [float(score) for _, _, score in lines]
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert len({text for _, text, _ in lines[:3]}) == 3


def test_scores_and_alignments_follow_the_text(run, seq2seq_folder, seq2seq):
    first, empty = run("translate", seq2seq_folder, "one two three", "", "--scores", "--alignments")
    text, score, links = first.split(" ||| ")
    assert (text, links) == ("trois deux un", "0-2 1-1 2-0")
    assert float(score) == pytest.approx(seq2seq.translate(["one two three"])[0][0].score, abs=1e-4)
    assert empty == " ||| 0.0000 ||| "


def test_decoding_options_reach_the_decoder(run, transformer_folder, transformer):
    from regard.decode import DecodeConfig

    config = DecodeConfig(method="sample", temperature=3.0, seed=5, max_len=4)
    expected = transformer.translate(["one two three"], config)[0][0].text
    options = ["--method", "sample", "--temperature", 3.0, "--seed", 5, "--max-len", 4]
    assert run("translate", transformer_folder, "one two three", *options) == [expected]


def test_ensemble_of_copies_equals_the_model(run, transformer_folder):
    single = run("translate", transformer_folder, "one two three", "--scores")
    ensemble = run("translate", transformer_folder, "one two three", "--scores", "--ensemble", transformer_folder)
    assert ensemble == single


def test_truncate_cuts_long_lines(run, seq2seq_folder):
    long = "one two " * 20
    assert run("translate", seq2seq_folder, long, "--truncate") == run(
        "translate", seq2seq_folder, "one two " * 7 + "one"
    )


# score


def test_score_prints_log_probabilities(run, capsys, pairs_file, seq2seq_folder, seq2seq):
    lines = [line.split("\t") for line in run("score", seq2seq_folder, "--data", pairs_file)]
    expected = seq2seq.score(number_pairs(20, seed=11))
    assert [float(total) for total, _, _ in lines] == pytest.approx([one.logprob for one in expected], abs=1e-5)
    assert [float(mean) for _, mean, _ in lines] == pytest.approx([one.mean for one in expected], abs=1e-5)
    assert [int(count) for _, _, count in lines] == [one.tokens for one in expected]


def test_score_prints_the_perplexity_and_empty_lines(capsys, tmp_path, seq2seq_folder, seq2seq):
    path = tmp_path / "pairs.tsv"
    path.write_text("one two\tdeux un\n\nthree\ttrois\n")
    assert main(["score", str(seq2seq_folder), "--data", str(path), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n")[1] == ""
    assert out.count("\n") == 3
    scores = seq2seq.score([("one two", "deux un"), ("three", "trois")])
    perplexity = math.exp(-sum(one.logprob for one in scores) / sum(one.tokens for one in scores))
    assert f"2 pairs, 5 tokens: log-probability {sum(one.logprob for one in scores):.4f}" in err
    assert f"perplexity {perplexity:.4f}" in err


# evaluate


def test_evaluate_prints_and_writes_all_metrics(run, pairs_file, tmp_path, seq2seq_folder, seq2seq):
    pairs = number_pairs(20, seed=11)
    gold = tmp_path / "gold.txt"
    gold.write_text("".join(" ".join(f"{s}-{t}" for s, t in links) + "\n" for links in number_links(pairs)))
    results = tmp_path / "results.json"
    output = run("evaluate", seq2seq_folder, "--data", pairs_file, "--alignments", gold, "--json", results)
    table = json.loads(results.read_text())
    correct = sum(seq2seq(source) == target for source, target in pairs)
    assert table["exact_match"] == pytest.approx(100 * correct / 20)
    assert table["bleu"] > 50
    scores = seq2seq.score(pairs)
    assert table["loss"] == pytest.approx(-sum(one.logprob for one in scores) / sum(one.tokens for one in scores))
    rate = alignment_error_rate(align(seq2seq, pairs, sharpest_layer(seq2seq, pairs)), number_links(pairs))
    assert table["alignment_error_rate"] == pytest.approx(100 * rate)
    text = "\n".join(output)
    for key, name in (("bleu", "BLEU"), ("chrf", "chrF"), ("word_error_rate", "word error rate")):
        assert re.search(rf"{name} .* {table[key]:.2f}", text)
    assert table["signature"] in text
    assert "decoder.attention" in text


def test_evaluate_compares_with_another_model(run, pairs_file, tmp_path, seq2seq_folder, transformer_folder):
    results = tmp_path / "results.json"
    output = run("evaluate", seq2seq_folder, "--data", pairs_file, "--compare", transformer_folder, "--json", results)
    row = json.loads(results.read_text())["comparison"]["bleu"]
    other = evaluate(transformer_folder, pairs_file, quiet=True)["bleu"]
    assert row["other"] == pytest.approx(other)
    assert row["low"] <= row["difference"] <= row["high"]
    assert f"{row['difference']:+.2f}" in "\n".join(output)


def test_evaluate_reads_gold_alignments_beside_the_pairs(run, run_error, pairs_file, tmp_path, transformer_folder):
    pairs = number_pairs(20, seed=11)
    gold = [" ".join(f"{s}-{t}" for s, t in links) for links in number_links(pairs)]
    aligned = tmp_path / "aligned.tsv"
    aligned.write_text("".join(f"{source}\t{target}\t{links}\n" for (source, target), links in zip(pairs, gold)))
    (tmp_path / "gold.txt").write_text("\n".join(gold) + "\n")
    tables = []
    for data in ([aligned], [pairs_file, "--alignments", tmp_path / "gold.txt"]):
        run("evaluate", transformer_folder, "--data", *data, "--json", tmp_path / "results.json", "--method", "greedy")
        tables.append(json.loads((tmp_path / "results.json").read_text()))
    assert 0 <= tables[0]["alignment_error_rate"] == tables[1]["alignment_error_rate"] <= 100
    assert tables[0]["alignment_layer"] == tables[1]["alignment_layer"]
    (tmp_path / "gold.txt").write_text("\n".join([*gold[:19], "99-0"]) + "\n")
    error = run_error("evaluate", transformer_folder, "--data", pairs_file, "--alignments", tmp_path / "gold.txt")
    assert "gold.txt, line 20: the link 99-0 is out of range." in error


def test_evaluate_on_the_phrasebook_uses_its_test_part(run, tmp_path, transformer_folder):
    results = tmp_path / "results.json"
    run("evaluate", transformer_folder, "--data", "phrasebook", "--json", results, "--method", "greedy", "--truncate")
    table = json.loads(results.read_text())
    assert table["sentences"] == 1000
    assert 0 < table["alignment_error_rate"] <= 100


def test_evaluate_without_attention_has_no_alignments(run, pairs_file, tmp_path, blind_folder):
    (tmp_path / "gold.txt").write_text("0-0\n" * 20)
    output = run("evaluate", blind_folder, "--data", pairs_file, "--alignments", tmp_path / "gold.txt")
    assert not any("alignment" in line for line in output)


def test_evaluate_skips_empty_pairs_and_counts_empty_sources(caplog, tmp_path, seq2seq_folder):
    path, results = tmp_path / "pairs.tsv", tmp_path / "results.json"
    path.write_text("one two\tdeux un\n\n\ttrois\n")
    assert main(["evaluate", str(seq2seq_folder), "--data", str(path), "--json", str(results), "--device", "cpu"]) == 0
    assert "Empty pairs left out: 1." in caplog.text
    table = json.loads(results.read_text())
    assert (table["sentences"], table["exact_match"]) == (2, 50.0)


# look and info


def test_look_writes_an_image_and_prints_the_translation(run, tmp_path, seq2seq_folder):
    assert run("look", seq2seq_folder, "one two three", "--out", tmp_path / "map.png") == ["trois deux un"]
    assert imread(tmp_path / "map.png").std() > 0.05


def test_look_with_target_and_selected_heads(run, tmp_path, transformer_folder):
    command = ["look", transformer_folder, "one two", "--target", "deux un", "--out"]
    assert run(*command, tmp_path / "a.svg", "--attention", "decoder.1.cross", "--head", 1) == ["deux un"]
    assert "decoder.1.cross, head 1" in (tmp_path / "a.svg").read_text()
    run(*command, tmp_path / "b.svg", "--all")
    assert "encoder.0.attention" in (tmp_path / "b.svg").read_text()


def test_look_writes_a_page_by_default(run, tmp_path, monkeypatch, transformer_folder):
    monkeypatch.chdir(tmp_path)
    assert run("look", transformer_folder, "one two", "--target", "deux un") == ["deux un"]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"name":"transformer"' in page
    assert '"initial":null' in page
    assert 'id="model-weights"' in page
    command = ["look", transformer_folder, "one two", "--target", "deux un", "--out", tmp_path / "some.html"]
    run(*command, "--no-with-model", "--layers", "*.cross", "--attention", "decoder.1.cross", "--head", 1, "--all")
    some = (tmp_path / "some.html").read_text(encoding="utf-8")
    assert 'id="model-weights"' not in some
    assert '"initial":{"attention":"decoder.1.cross","head":1,"all":true}' in some
    assert '{"name":"encoder.0.attention","kind"' in page
    assert '{"name":"encoder.0.attention","kind"' not in some  # although the step-by-step view contains it


def test_look_page_contains_the_search(run, tmp_path, transformer_folder):
    command = ["look", transformer_folder, "one two", "--no-with-model", "--out", tmp_path / "page.html"]
    (translation,) = run(*command, "--beam", 2, "--prefix", "deux")
    assert translation.startswith("deux")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"method":"beam","beam":2,' in page
    assert '"prefix":["deux"]' in page
    run(*command, "--target", "deux un")
    assert '"decode":null' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_info_prints_sizes_training_and_kernels(run, transformer_folder, transformer):
    text = "\n".join(run("info", transformer_folder))
    size = sum(parameter.numel() for parameter in transformer.model.parameters())
    for fact in ("family +transformer", f"parameters +{size:,}", "word, 23 entries", r"validation\.bleu +12\.5"):
        assert re.search(fact, text), fact
    assert re.search(r"decoder\.1\.cross +cross +ScaledDot +kernel \w+", text)


def test_info_without_attention_has_no_kernels(run, blind_folder):
    assert not any("kernel" in line for line in run("info", blind_folder))


def test_output_is_utf8_in_any_locale(seq2seq_folder):
    command = [sys.executable, "-c", "import sys; from regard.cli import main; sys.exit(main())"]
    process = subprocess.run(
        [*command, "translate", str(seq2seq_folder), "--device", "cpu"],
        input="one two\n\nthree é\n".encode(),
        capture_output=True,
        check=False,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.decode().split("\n")[:2] == ["deux un", ""]
    assert process.stdout.count(b"\n") == 3
