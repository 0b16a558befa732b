"""Texts in and results out: pipes, long lines, unknown characters, files that are no plain files, columns."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time

import pytest
import torch

from regard.cli import main
from regard.cli.common import named_blocks
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.models import GPT, Bert, GPTConfig
from regard.models.bert import BertConfig
from regard.pipelines import LanguageModel, TextEncoder, load, save
from tests.conftest import number_pairs

COMMAND = [sys.executable, "-c", "import sys; from regard.cli import main; sys.exit(main())"]
LONG = "one two three. 4 " * 6


@pytest.fixture
def called(capsys):
    """Runs a command; gives its exit code, its lines of output and what it says on stderr."""

    def call(*argv: object) -> tuple[int, list[str], str]:
        code = main([*map(str, argv), "--device", "cpu"])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


@pytest.fixture
def stdin(monkeypatch):
    def give(content: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))

    return give


def save_writer(folder, positions):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["abcdefgh "], "char", exact=True)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=24)
    save(folder, LanguageModel(GPT(GPTConfig(**sizes, positions=positions)).eval(), tokenizer))
    return folder


@pytest.fixture(scope="module")
def writer_folder(tmp_path_factory):
    return save_writer(tmp_path_factory.mktemp("writer"), "rotary")


@pytest.fixture(scope="module")
def learned_writer_folder(tmp_path_factory):
    return save_writer(tmp_path_factory.mktemp("learned_writer"), "learned")


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["one two three four five six seven"], "word", mask=True)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=12)
    config = BertConfig(**sizes, head="classify", labels=("even", "odd"), pooler="tanh")
    folder = tmp_path_factory.mktemp("classifier")
    save(folder, TextEncoder(Bert(config).eval(), tokenizer))
    return folder


# Pipes


@pytest.fixture
def pipe(monkeypatch):
    """Standard input as a pipe; gives its other end."""
    reading, writing = os.pipe()
    with open(reading) as stream, open(writing, "w") as other:
        monkeypatch.setattr(sys, "stdin", stream)
        yield other


def test_a_pipe_is_answered_line_by_line_and_an_error_ends_it(learned_folder, learned):
    with subprocess.Popen(
        [*COMMAND, "translate", str(learned_folder), "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        guard = threading.Timer(100, process.kill)  # a command that waits for more would wait forever
        guard.start()
        answers = []
        for line in ("one two three", "four five"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answers.append(process.stdout.readline())
        assert answers == [learned("one two three") + "\n", learned("four five") + "\n"]
        process.stdin.write("one two\n" + "four " * 30 + "\n")
        process.stdin.flush()
        assert process.wait() == 2  # though standard input stays open
        guard.cancel()
        assert process.stdout.read() == learned("one two") + "\n"
        assert process.stderr.read().startswith("regard: stdin, line 4 has 30 tokens")


def test_lines_of_a_pipe_are_given_as_they_come(pipe):
    blocks = named_blocks((), None, "Type", size=3)
    for line in ("one", "two"):
        print(line, file=pipe, flush=True)
        assert next(blocks) == [(f"stdin, line {('one', 'two').index(line) + 1}", line)]
    pipe.write("3\n4\n5\n6\n7 without an end")
    pipe.close()
    rest = list(blocks)
    assert [text for block in rest for _, text in block] == ["3", "4", "5", "6", "7 without an end"]
    assert max(map(len, rest)) <= 3


def test_what_was_read_before_an_error_comes_first(pipe):
    pipe.buffer.write(b"one\ntwo\n\xff\n")
    pipe.close()
    read = []
    with pytest.raises(RegardError, match=r"stdin, line 3: not UTF-8"):
        read.extend(text for block in named_blocks((), None, "Type", size=1000) for _, text in block)
    assert read == ["one", "two"]


@pytest.mark.parametrize("command", ["classify", "embed"])
def test_blocks_of_other_commands(called, pipe, monkeypatch, classifier_folder, command):
    monkeypatch.setattr("regard.cli.common.BLOCK", 2)
    pipe.write("one\ntwo\nthree\nfour\nfive")
    pipe.close()
    code, found, _ = called(command, classifier_folder)
    assert (code, found) == (0, called(command, classifier_folder, "one", "two", "three", "four", "five")[1])


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_quiet_holds_for_lines_of_a_pipe_too(called, pipe, classifier_folder, options):
    """They are checked in a thread of their own."""
    pipe.write("кот спит дома\n")
    pipe.close()
    code, _, err = called("classify", classifier_folder, *options)
    assert (code, "unknown to the model" in err) == (0, not options)


def test_samples_are_the_same_from_a_pipe_and_from_a_file(tmp_path, called, pipe, seq2seq_folder):
    lines = [f"{source}\n" for source, _ in number_pairs(40, seed=5)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    options = ["--method", "sample", "--temperature", "2", "--seed", "7"]
    _, wanted, _ = called("translate", seq2seq_folder, "--input", tmp_path / "lines.txt", *options)

    def write() -> None:
        with pipe:
            for number, line in enumerate(lines):
                print(line, end="", file=pipe, flush=True)
                time.sleep(0.01 * (number < 5))

    thread = threading.Thread(target=write)
    thread.start()
    assert called("translate", seq2seq_folder, *options)[1] == wanted
    thread.join()


# Lines that cannot be answered


@pytest.mark.parametrize("packing", ["lines.txt", "-"])
def test_the_lines_before_one_that_is_too_long_are_answered(tmp_path, stdin, called, learned_folder, learned, packing):
    content = "one two three\n" + "two " * 30 + "\nfour five\n"
    (tmp_path / "lines.txt").write_text(content)
    stdin(content)
    options = [] if packing == "-" else ["--input", tmp_path / "lines.txt"]
    code, out, err = called("translate", learned_folder, *options)
    assert (code, out) == (2, [learned("one two three")])
    assert "line 2 has 30 tokens, and the model takes at most 15." in err


def test_the_lines_before_one_that_is_not_utf8_are_answered(tmp_path, called, seq2seq_folder):
    (tmp_path / "lines.txt").write_bytes(b"one two three\ntw\xff\n")
    code, out, err = called("translate", seq2seq_folder, "--input", tmp_path / "lines.txt")
    assert (code, out) == (2, ["trois deux un"])
    assert "lines.txt, line 2: not UTF-8." in err


@pytest.mark.parametrize("command", ["classify", "embed"])
def test_the_texts_before_one_that_is_too_long_are_answered(called, classifier_folder, command):
    code, out, err = called(command, classifier_folder, "one", "two three", "four " * 30, "five")
    assert code == 2
    assert len(out) == 2
    assert re.search(r"text 3 has (more than the 12|30) tokens", err)


def test_long_lines_are_split_into_sentences(called, seq2seq_folder, seq2seq):
    wanted = seq2seq.translate(LONG, split="auto")[0].text
    assert called("translate", seq2seq_folder, LONG, "one two three")[:2] == (0, [wanted, "trois deux un"])
    code, out, _ = called("translate", seq2seq_folder, LONG, "--split", "never")
    assert (code, len(out)) == (0, 1)
    short = "one two. 3 four"
    (whole,), (parts,) = (called("translate", seq2seq_folder, short, "--split", how)[1] for how in ("auto", "always"))
    assert whole == seq2seq.translate(short)[0].text
    assert parts == seq2seq.translate(short, split="always")[0].text != whole
    assert called("translate", seq2seq_folder, LONG, "--alignments")[0] == 0
    assert "--split always" in called("translate", seq2seq_folder, LONG, "--alignments", "--split", "always")[2]


# Remarks


def test_mostly_unknown_characters_are_warned_of_once(called, seq2seq_folder, classifier_folder):
    lines = ["one two three", "one котик", "кот спит дома", "снова"]
    _, _, err = called("translate", seq2seq_folder, *lines)
    assert err == "text 2: 62% of the characters are unknown to the model's tokenizer.\n"
    assert called("translate", seq2seq_folder, *lines, "--quiet")[2] == ""
    assert called("translate", seq2seq_folder, "one two three seven é")[2] == ""
    assert "text 2: 62%" in called("classify", classifier_folder, *lines)[2]


def test_a_length_beyond_the_models_is_said(called, learned_folder, learned_writer_folder):
    assert called("translate", learned_folder, "one", "--max-len", 500)[2] == (
        "--max-len 500: the model's max_len allows 15 tokens. For longer translations train with a larger "
        "--model.max-len.\n"
    )
    assert called("translate", learned_folder, "one")[2] == ""
    assert called("translate", learned_folder, "one", "--max-len", 5)[2] == ""
    said = "Stopped at 24 tokens, prompt included: that is the model's max_len, whatever --max-len allows."
    for options in (["--n-best", "2"], []):
        _, _, err = called("generate", learned_writer_folder, "abc", "--max-len", 500, "--min-len", 400, *options)
        assert said in err
    assert called("generate", learned_writer_folder, "abc", "--max-len", 5)[2] == ""


def test_texts_beyond_the_trained_length_are_warned_of_once(called, caplog, seq2seq_folder, writer_folder):
    def said():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    warning = "Warning: a text is longer than the 16 tokens that the model was trained on; quality may be lower."
    long = "one " * 30
    code, out, _ = called("translate", seq2seq_folder, long, long, "one two three", "--split", "never")
    assert (code, len(out), out[2], said()) == (0, 3, "trois deux un", [warning])
    called("translate", seq2seq_folder, long, "--split", "never", "--quiet")
    assert said() == []
    code, _, _ = called("generate", writer_folder, "abc", "--max-len", 40, "--min-len", 40, "--n-best", 2)
    assert (code, said()) == (0, [warning.replace("16", "24")])


def test_evaluate_shows_progress_in_a_log(called, monkeypatch, tmp_path, seq2seq_folder):
    (tmp_path / "pairs.tsv").write_text("one two\tdeux un\n" * 3)
    monkeypatch.setattr("regard.training.run_log.EVERY", 0.0)
    _, _, err = called("evaluate", seq2seq_folder, "--data", tmp_path / "pairs.tsv")
    assert "translating: 3 of 3\n" in err
    assert "scoring: 3 of 3\n" in err
    assert called("evaluate", seq2seq_folder, "--data", tmp_path / "pairs.tsv", "--quiet")[2] == ""


# Files


def test_json_goes_to_standard_output_or_through_a_link(called, monkeypatch, tmp_path, seq2seq_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text("one two\tdeux un\n")
    command = ["evaluate", seq2seq_folder, "--data", "pairs.tsv", "--json"]
    code, out, err = called(*command, "-")
    assert code == 0
    assert json.loads("\n".join(out))["sentences"] == 1
    assert "BLEU" in err
    assert not (tmp_path / "-").exists()
    (tmp_path / "link.json").symlink_to("target.json")
    assert called(*command, "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["sentences"] == 1
    assert "is a directory. Name a file." in called(*command, tmp_path)[2]


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX")
def test_results_go_through_a_named_pipe(called, tmp_path, classifier_folder):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    assert called("embed", classifier_folder, "one", "--out", pipe)[0] == 0
    reader.join(10)
    assert json.loads(got[0])["text"] == "one"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    code, out, _ = called("embed", classifier_folder, "one", "two", "--out", "-")
    assert (code, [json.loads(line)["text"] for line in out]) == (0, ["one", "two"])


# Data


def test_columns_of_score_and_evaluate(called, tmp_path, seq2seq_folder, classifier_folder):
    path, results = tmp_path / "pairs.csv", tmp_path / "r.json"
    path.write_text("fr,id,en\ndeux un,1,one two\ntrois,2,three\n")
    (tmp_path / "plain.tsv").write_text("one two\tdeux un\nthree\ttrois\n")
    wanted = called("score", seq2seq_folder, "--data", tmp_path / "plain.tsv")[1]
    assert called("score", seq2seq_folder, "--data", path, "--columns", "en", "fr")[1] == wanted
    assert called("score", seq2seq_folder, "--data", path, "--columns", "3", "fr")[1] == wanted
    assert called("evaluate", seq2seq_folder, "--data", path, "--columns", "en", "fr", "--json", results)[0] == 0
    assert json.loads(results.read_text())["sentences"] == 2
    assert "no column 'de'" in called("score", seq2seq_folder, "--data", path, "--columns", "en", "de")[2]
    path.write_text("kind,words\nodd,one\neven,two\nodd,three\n")
    options = ["--columns", "words", "kind", "--json", results]
    assert called("evaluate", classifier_folder, "--data", path, *options)[0] == 0
    assert json.loads(results.read_text())["texts"] == 3


def test_a_header_is_said_unless_quiet(called, caplog, tmp_path, seq2seq_folder):
    (tmp_path / "pairs.tsv").write_text("source\ttarget\none two\tdeux un\n")
    assert len(called("score", seq2seq_folder, "--data", tmp_path / "pairs.tsv", "--quiet")[1]) == 1
    assert not caplog.messages
    assert len(called("score", seq2seq_folder, "--data", tmp_path / "pairs.tsv")[1]) == 1
    assert [text.split(": ", 1)[1] for text in caplog.messages] == [
        'first line "source<TAB>target" is a header and is skipped.'
    ]


def test_precision_recall_and_f1_of_each_class(called, tmp_path, classifier_folder):
    path, results = tmp_path / "texts.tsv", tmp_path / "r.json"
    rows = [("one", "odd"), ("two", "even"), ("three", "odd"), ("four", "even"), ("five", "odd")]
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    _, out, _ = called("evaluate", classifier_folder, "--data", path, "--json", results)
    found = json.loads(results.read_text())
    given = [one.label for one in load(classifier_folder, "cpu").classify([text for text, _ in rows])]
    for label in ("even", "odd"):
        right = sum(a == b == label for a, (_, b) in zip(given, rows))
        support, times = sum(b == label for _, b in rows), given.count(label)
        one = found["per_class"][label]
        assert one["support"] == support
        assert one["recall"] == pytest.approx(100 * right / support)
        assert one["precision"] == pytest.approx(100 * right / max(1, times))
        assert one["f1"] == pytest.approx(200 * right / (support + times))
        assert any(line.startswith("│") and label in line and f"{one['f1']:.2f} %" in line for line in out)
    assert found["macro_f1"] == pytest.approx(sum(one["f1"] for one in found["per_class"].values()) / 2)
    assert any("macro F1" in line for line in out)


def test_the_tokenizer_of_bleu_is_chosen(called, tmp_path, seq2seq_folder):
    path, results = tmp_path / "pairs.tsv", tmp_path / "r.json"
    path.write_text("one two three\ttrois deux un\n")
    for name, signed in (("char", "char"), ("intl", "intl"), ("auto", "13a")):
        called("evaluate", seq2seq_folder, "--data", path, "--bleu-tokenizer", name, "--json", results)
        assert f"tok:{signed}" in json.loads(results.read_text())["signature"]


def test_languages_reach_the_model_folder_and_go_on_from_it(called, capsys, tmp_path):
    rows = "".join(f"{source},{target}\n" for source, target in number_pairs(60, seed=1))
    (tmp_path / "pairs.csv").write_text("english,french\n" + rows)
    sizes = ["--model.width", 16, "--model.heads", 2, "--model.feedforward", 16, "--model.max-len", 16]
    steps = ["--train.steps", 2, "--train.warmup", 1, "--train.workers", 1, "--train.device", "cpu"]

    def train(out, *options):
        code = main([str(word) for word in ("train", "--data.files", tmp_path / "pairs.csv", "--out", out, *options)])
        assert code == 0, capsys.readouterr().err
        capsys.readouterr()
        return load(out, "cpu")

    columns = ["--data.columns", "french", "english", "--data.languages", "fr", "en"]
    assert train(tmp_path / "a", *columns, *sizes, *steps).languages == ("fr", "en")
    assert "languages\n  source  fr\n  target  en" in "\n".join(called("info", tmp_path / "a")[1])
    tuned = train(tmp_path / "b", "--from", tmp_path / "a", "--data.columns", "2", "1", *steps)
    assert tuned.languages == ("fr", "en")


def test_a_dash_as_input_is_standard_input(called, stdin, seq2seq_folder, writer_folder):
    stdin("one two three\n")
    assert called("translate", seq2seq_folder, "--input", "-")[1] == ["trois deux un"]
    stdin("abc\n")
    assert called("generate", writer_folder, "--input", "-", "--max-len", "3")[1][0].startswith("abc")
