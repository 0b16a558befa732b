"""Commands that write files: the same lines as on standard output, resumed, on several devices; bad options."""

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.cli import main
from regard.data import Tokenizer
from regard.models import Bert
from regard.models.bert import BertConfig
from regard.pipelines import TextEncoder, files, save
from tests.conftest import number_pairs

LINES = [source for source, _ in number_pairs(100, seed=11)]
LINES[17] = ""
LONG = " ".join(["one"] * 30)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ITEMS", 16)


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.en"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(LINES)], "word", mask=True)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=12)
    config = BertConfig(**sizes, head="classify", labels=("even", "odd"), pooler="tanh")
    folder = tmp_path_factory.mktemp("classifier")
    save(folder, TextEncoder(Bert(config).eval(), tokenizer))
    return folder


def read(path: Path) -> str:
    return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()


@pytest.mark.parametrize("name", ["out.txt", "out.gz"])
@pytest.mark.parametrize(
    "options",
    [[], ["--n-best", 2, "--beam", 3], ["--method", "sample", "--seed", 4], ["--alignments"], ["--prefix", "un"]],
    ids=["plain", "n-best", "sample", "alignments", "prefix"],
)
def test_translate_writes_what_it_prints(run, seq2seq_folder, corpus, tmp_path, options, name, capsys):
    printed = run("translate", seq2seq_folder, "--input", corpus, *options)
    assert run("translate", seq2seq_folder, "--input", corpus, "--output", tmp_path / name, *options) == ""
    assert read(tmp_path / name) == printed


def test_notes_of_translate(seq2seq_folder, corpus, tmp_path, capsys):
    command = ["translate", seq2seq_folder, "--input", corpus, "--device", "cpu"]
    assert main([*map(str, command), "--output", str(tmp_path / "a.txt")]) == 0
    assert f"Wrote 100 lines to {tmp_path / 'a.txt'} (" in capsys.readouterr().err
    assert main([*map(str, command), "--output", str(tmp_path / "b.txt"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_arguments_and_standard_input(run, monkeypatch, seq2seq_folder, tmp_path):
    printed = run("translate", seq2seq_folder, "one two", "three")
    run("translate", seq2seq_folder, "one two", "three", "--output", tmp_path / "a.txt")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one two\nthree\n")))
    run("translate", seq2seq_folder, "--output", tmp_path / "b.txt")
    assert read(tmp_path / "a.txt") == read(tmp_path / "b.txt") == printed


def test_several_devices(run, capsys, seq2seq_folder, corpus, tmp_path):
    run("translate", seq2seq_folder, "--input", corpus, "--output", tmp_path / "one.txt")
    command = [str(word) for word in ("translate", seq2seq_folder, "--input", corpus, "--device")]
    assert main([*command, "cpu,cpu", "--output", str(tmp_path / "two.txt")]) == 0
    assert read(tmp_path / "two.txt") == read(tmp_path / "one.txt")
    capsys.readouterr()
    for device, message in (
        ("cpu,cpu", "--device cpu,cpu: several devices need --output."),
        ("gpu", "device must be one of"),
        ("cuda:99", "Device cuda:99 is not available: this machine has"),
    ):
        assert main([*command, device]) == 2
        assert message in capsys.readouterr().err


def test_too_long_line_and_truncate(run, run_error, learned_folder, tmp_path):
    corpus, output = tmp_path / "corpus.en", tmp_path / "out.txt"
    corpus.write_text("".join(f"{line}\n" for line in [*LINES[:40], LONG, *LINES[40:]]))
    command = ["translate", learned_folder, "--input", corpus, "--output", output, "--beam", 2]
    error = run_error(*command)
    assert f"{corpus}, line 41 has 30 tokens; the model supports at most 15." in error
    assert "use --truncate to drop its end. The 40 lines before it are kept" in error
    assert not output.exists()
    assert f"{corpus}, line 41 has 30 tokens" in run_error(*command)  # the same again
    run(*command, "--truncate")
    printed = run("translate", learned_folder, "--input", corpus, "--beam", 2, "--truncate")
    assert read(output) == printed


def test_output_files_that_cannot_be_written(run, run_error, seq2seq_folder, corpus, tmp_path):
    output = tmp_path / "out.txt"
    output.write_text("keep me\n")
    command = ["translate", seq2seq_folder, "--input", corpus, "--output"]
    assert f"{output} exists. Name another output, or use --overwrite" in run_error(*command, output)
    assert output.read_text() == "keep me\n"
    assert "there is no folder" in run_error(*command, tmp_path / "none" / "out.txt")
    assert "the input and the output are the same file" in run_error(*command, corpus, "--overwrite")
    assert "is a directory" in run_error(*command, tmp_path)
    assert "--overwrite needs --output FILE" in run_error("translate", seq2seq_folder, "one", "--overwrite")
    run(*command, output, "--overwrite")
    assert len(read(output).splitlines()) == 100


def test_model_without_a_decoder(run_error, classifier_folder, corpus, tmp_path):
    error = run_error("translate", classifier_folder, "--input", corpus, "--output", tmp_path / "out.txt")
    assert "contains a text encoder, not a translator. Use it with: regard embed, classify" in error
    assert list(tmp_path.iterdir()) == [corpus]


def test_unknown_characters_are_reported_once(capsys, seq2seq_folder, tmp_path):
    (tmp_path / "corpus").write_text("Кошка спит\nСобака спит\n")
    command = ["translate", seq2seq_folder, "--input", tmp_path / "corpus", "--output", tmp_path / "out"]
    assert main([*map(str, command), "--device", "cpu"]) == 0
    assert capsys.readouterr().err.count("characters are unknown") == 1


def test_alignments_of_standard_input(run_error, monkeypatch, seq2seq_folder, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one two\n")))
    error = run_error("translate", seq2seq_folder, "--alignments", "--output", tmp_path / "out.txt")
    assert "--alignments with --output cannot read standard input. Pass --input FILE." in error


@pytest.mark.parametrize("command", [["classify"], ["classify", "--all"], ["embed"]])
def test_classify_and_embed_write_what_they_print(run, classifier_folder, corpus, tmp_path, command):
    name, *options = command
    printed = run(name, classifier_folder, "--input", corpus, *options)
    for output in (tmp_path / "out.jsonl", tmp_path / "out.jsonl.gz"):
        run(name, classifier_folder, "--input", corpus, "--output", output, *options)
        if name == "classify":
            assert read(output) == printed
            continue
        rows, expected = ([json.loads(line) for line in text.splitlines()] for text in (read(output), printed))
        assert [row["text"] for row in rows] == LINES
        np.testing.assert_allclose([row["vector"] for row in rows], [row["vector"] for row in expected], atol=1e-6)


def test_embed_writes_an_array(run, run_error, classifier_folder, corpus, tmp_path):
    run("embed", classifier_folder, "--input", corpus, "--output", tmp_path / "v.npy")
    assert np.load(tmp_path / "v.npy").shape == (100, 16)
    assert "v.npy exists" in run_error("embed", classifier_folder, "one", "--out", tmp_path / "v.npy")
    error = run_error("embed", classifier_folder, "one", "--output", tmp_path / "v.npy.gz")
    assert "compressed .npy files are not supported. Use .npy or .jsonl.gz" in error


def test_score_writes_what_it_prints(run, capsys, seq2seq_folder, tmp_path):
    pairs = number_pairs(50, seed=3)
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs) + "\n")
    command = ["score", seq2seq_folder, "--data", tmp_path / "pairs.tsv"]
    assert main([*map(str, command), "--device", "cpu"]) == 0
    printed, total = capsys.readouterr()
    assert main([*map(str, command), "--device", "cpu", "--output", str(tmp_path / "scores.gz")]) == 0
    _, err = capsys.readouterr()
    rows, expected = (
        [line.split("\t") for line in text.splitlines()] for text in (read(tmp_path / "scores.gz"), printed)
    )
    assert [row[-1] for row in rows] == [row[-1] for row in expected]
    assert rows[-1] == [""]
    np.testing.assert_allclose(
        np.array(rows[:-1], dtype=float), np.array(expected[:-1], dtype=float), atol=1e-5
    )  # other batches
    assert total.startswith("50 pairs, ")
    assert total.split(":")[0] in err  # numbers of pairs and tokens


def test_score_of_the_phrasebook(run, seq2seq_folder, tmp_path):
    run("score", seq2seq_folder, "--data", "phrasebook", "--truncate", "--output", tmp_path / "scores.tsv")
    assert len(read(tmp_path / "scores.tsv").splitlines()) == 1000


def test_files_of_a_pattern(run, run_error, seq2seq_folder, corpus, tmp_path):
    for i in range(3):
        (tmp_path / f"part-{i}.en").write_text("".join(f"{line}\n" for line in LINES[10 * i : 10 * i + 10]))
    command = ["translate", seq2seq_folder, "--input", tmp_path / "part-*.en"]
    assert "names several files: they need an output folder" in run_error(*command)
    run(*command, "--output", tmp_path / "fr")
    printed = run("translate", seq2seq_folder, *LINES[10:20])
    assert read(tmp_path / "fr" / "part-1.en") == printed
    assert "part-0.en exists" in run_error(*command, "--output", tmp_path / "fr")


def test_options_of_a_cluster(run_error, seq2seq_folder, corpus, tmp_path):
    command = ["translate", seq2seq_folder, "--input", corpus, "--cluster", "ray"]
    assert "--cluster ray needs --output" in run_error(*command)
    error = run_error(*command, "--output", tmp_path / "out.fr", "--device", "cpu")
    assert "--device cpu and --cluster ray cannot be combined" in error
