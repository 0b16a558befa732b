"""Input and output of commands: pipes, long lines, unknown characters, special files, columns."""

import io
import json
import logging
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
from regard.cli.common import read_blocks
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.models import GPT, Bert, GPTConfig
from regard.models.bert import BertConfig
from regard.pipelines import TextEncoder, TextGenerator, load, save
from tests.conftest import number_pairs

COMMAND = [sys.executable, "-c", "import sys; from regard.cli import main; sys.exit(main())"]
LONG = "one two three. 4 " * 6


@pytest.fixture
def invoke(capsys):
    """Run a command; returns its exit code, its output lines and its standard error."""

    def call(*argv: object) -> tuple[int, list[str], str]:
        code = main([*map(str, argv), "--device", "cpu"])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


@pytest.fixture
def stdin(monkeypatch):
    def set_stdin(content: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))

    return set_stdin


def save_generator(folder, positions):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["abcdefgh "], "char", exact=True)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=24)
    save(folder, TextGenerator(GPT(GPTConfig(**sizes, positions=positions)).eval(), tokenizer))
    return folder


@pytest.fixture(scope="module")
def generator_folder(tmp_path_factory):
    return save_generator(tmp_path_factory.mktemp("generator"), "rotary")


@pytest.fixture(scope="module")
def learned_generator_folder(tmp_path_factory):
    return save_generator(tmp_path_factory.mktemp("learned_generator"), "learned")


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
    """Replace standard input by a pipe; returns its writing end."""
    reading, writing = os.pipe()
    with open(reading) as stream, open(writing, "w") as other:
        monkeypatch.setattr(sys, "stdin", stream)
        yield other


def test_pipe_is_translated_line_by_line_until_an_error(learned_folder, learned):
    with subprocess.Popen(
        [*COMMAND, "translate", str(learned_folder), "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        guard = threading.Timer(100, process.kill)  # in case the command waits for more input
        guard.start()
        translations = []
        for line in ("one two three", "four five"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            translations.append(process.stdout.readline())
        assert translations == [learned("one two three") + "\n", learned("four five") + "\n"]
        process.stdin.write("one two\n" + "four " * 30 + "\n")
        process.stdin.flush()
        assert process.wait() == 2  # although standard input is still open
        guard.cancel()
        assert process.stdout.read() == learned("one two") + "\n"
        assert process.stderr.read().startswith("regard: stdin, line 4 has 30 tokens")


def test_blocks_of_a_pipe_contain_the_available_lines(pipe):
    blocks = read_blocks((), None, "Type", size=3)
    for line in ("one", "two"):
        print(line, file=pipe, flush=True)
        assert next(blocks) == [(f"stdin, line {('one', 'two').index(line) + 1}", line)]
    pipe.write("3\n4\n5\n6\n7 without an end")
    pipe.close()
    rest = list(blocks)
    assert [text for block in rest for _, text in block] == ["3", "4", "5", "6", "7 without an end"]
    assert max(map(len, rest)) <= 3


def test_lines_before_an_error_are_yielded_first(pipe):
    pipe.buffer.write(b"one\ntwo\n\xff\n")
    pipe.close()
    read = []
    with pytest.raises(RegardError, match=r"stdin, line 3: not UTF-8"):
        read.extend(text for block in read_blocks((), None, "Type", size=1000) for _, text in block)
    assert read == ["one", "two"]


@pytest.mark.parametrize("command", ["classify", "embed"])
def test_classify_and_embed_read_a_pipe_in_blocks(invoke, pipe, monkeypatch, classifier_folder, command):
    monkeypatch.setattr("regard.cli.common.BLOCK_SIZE", 2)
    pipe.write("one\ntwo\nthree\nfour\nfive")
    pipe.close()
    code, output, _ = invoke(command, classifier_folder)
    assert (code, output) == (0, invoke(command, classifier_folder, "one", "two", "three", "four", "five")[1])


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_quiet_applies_to_lines_of_a_pipe(invoke, pipe, classifier_folder, options):
    """Lines of a pipe are checked in a separate thread."""
    pipe.write("кот спит дома\n")
    pipe.close()
    code, _, err = invoke("classify", classifier_folder, *options)
    assert (code, "unknown to the model" in err) == (0, not options)


def test_samples_are_the_same_from_a_pipe_and_from_a_file(tmp_path, invoke, pipe, seq2seq_folder):
    lines = [f"{source}\n" for source, _ in number_pairs(40, seed=5)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    options = ["--method", "sample", "--temperature", "2", "--seed", "7"]
    _, expected, _ = invoke("translate", seq2seq_folder, "--input", tmp_path / "lines.txt", *options)

    def write() -> None:
        with pipe:
            for i, line in enumerate(lines):
                print(line, end="", file=pipe, flush=True)
                time.sleep(0.01 * (i < 5))

    thread = threading.Thread(target=write)
    thread.start()
    assert invoke("translate", seq2seq_folder, *options)[1] == expected
    thread.join()


# Invalid lines


@pytest.mark.parametrize("source", ["lines.txt", "-"])
def test_lines_before_a_long_one_are_translated(tmp_path, stdin, invoke, learned_folder, learned, source):
    content = "one two three\n" + "two " * 30 + "\nfour five\n"
    (tmp_path / "lines.txt").write_text(content)
    stdin(content)
    options = [] if source == "-" else ["--input", tmp_path / "lines.txt"]
    code, out, err = invoke("translate", learned_folder, *options)
    assert (code, out) == (2, [learned("one two three")])
    assert "line 2 has 30 tokens; the model supports at most 15." in err


def test_lines_before_invalid_utf8_are_translated(tmp_path, invoke, seq2seq_folder):
    (tmp_path / "lines.txt").write_bytes(b"one two three\ntw\xff\n")
    code, out, err = invoke("translate", seq2seq_folder, "--input", tmp_path / "lines.txt")
    assert (code, out) == (2, ["trois deux un"])
    assert "lines.txt, line 2: not UTF-8." in err


@pytest.mark.parametrize("command", ["classify", "embed"])
def test_texts_before_a_long_one_are_processed(invoke, classifier_folder, command):
    code, out, err = invoke(command, classifier_folder, "one", "two three", "four " * 30, "five")
    assert code == 2
    assert len(out) == 2
    assert re.search(r"text 3 has (more tokens than the model supports \(12\)|30 tokens)", err)


def test_long_lines_are_split_into_sentences(invoke, seq2seq_folder, seq2seq):
    expected = seq2seq.translate(LONG, split="auto")[0].text
    assert invoke("translate", seq2seq_folder, LONG, "one two three")[:2] == (0, [expected, "trois deux un"])
    code, out, _ = invoke("translate", seq2seq_folder, LONG, "--split", "never")
    assert (code, len(out)) == (0, 1)
    short = "one two. 3 four"
    (joined,), (separate,) = (
        invoke("translate", seq2seq_folder, short, "--split", how)[1] for how in ("auto", "always")
    )
    assert joined == seq2seq.translate(short)[0].text
    assert separate == seq2seq.translate(short, split="always")[0].text != joined
    assert invoke("translate", seq2seq_folder, LONG, "--alignments")[0] == 0
    assert "--split always" in invoke("translate", seq2seq_folder, LONG, "--alignments", "--split", "always")[2]
    assert "--split always" in invoke("translate", seq2seq_folder, LONG, "--require", "un", "--split", "always")[2]
    code, out, _ = invoke("translate", seq2seq_folder, LONG, "--require", "neuf")
    assert (code, len(out)) == (0, 1)
    assert "neuf" in out[0].split()


def test_invalid_phrases_are_errors(invoke, seq2seq_folder):
    for options, message in (
        (["--require", "grün"], "The required phrase 'grün' cannot be generated"),
        (["--require", "un", "--method", "sample"], "Required phrases need beam search (got method sample)."),
        (["--require", "un", "--forbid", "un"], "The required phrase 'un' contains a forbidden phrase."),
        (["--forbid", ""], "A forbidden phrase is empty"),
    ):
        code, out, err = invoke("translate", seq2seq_folder, "one", *options)
        assert (code, out) == (2, [])
        assert message in err


# Notes and warnings


def test_unknown_characters_are_reported_once(invoke, seq2seq_folder, classifier_folder):
    lines = ["one two three", "one котик", "кот спит дома", "снова"]
    _, _, err = invoke("translate", seq2seq_folder, *lines)
    assert err == "text 2: 62% of the characters are unknown to the model's tokenizer.\n"
    assert invoke("translate", seq2seq_folder, *lines, "--quiet")[2] == ""
    assert invoke("translate", seq2seq_folder, "one two three seven é")[2] == ""
    assert "text 2: 62%" in invoke("classify", classifier_folder, *lines)[2]


def test_max_len_beyond_the_limit_prints_a_note(invoke, learned_folder, learned_generator_folder):
    assert invoke("translate", learned_folder, "one", "--max-len", 500)[2] == (
        "--max-len 500: the length limit of the model is 15 tokens. For longer translations, train with a larger "
        "--model.max-len.\n"
    )
    assert invoke("translate", learned_folder, "one")[2] == ""
    assert invoke("translate", learned_folder, "one", "--max-len", 5)[2] == ""
    note = "Stopped at 24 tokens including the prompt, the length limit of the model."
    for options in (["--n-best", "2"], []):
        _, _, err = invoke("generate", learned_generator_folder, "abc", "--max-len", 500, "--min-len", 400, *options)
        assert note in err
    _, _, err = invoke("generate", learned_generator_folder, "abc", "--max-len", 5, "--min-len", 5)
    assert err == "Stopped at 5 tokens (--max-len).\n"
    _, _, err = invoke("generate", learned_generator_folder, "abc", "--min-len", 20, "--max-total-len", 9)
    assert err == "Stopped at 9 tokens including the prompt (--max-total-len).\n"
    options = ["--max-len", 5, "--min-len", 5, "--quiet"]
    assert invoke("generate", learned_generator_folder, "abc", *options)[2] == ""


def test_warnings_follow_the_generated_text(invoke, generator_folder):
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger("regard").addHandler(handler)
    try:
        _, out, _ = invoke("generate", generator_folder, "abc", "--max-len", 40, "--min-len", 40)
    finally:
        logging.getLogger("regard").removeHandler(handler)
    assert out[-1].startswith("Warning: a text exceeds the maximum training length of 24 tokens")
    assert out[-1] not in "\n".join(out[:-1])
    assert len(out) == 2


@pytest.mark.parametrize("command", ["translate", "generate", "embed", "classify"])
def test_name_of_a_file_as_text_suggests_input(
    invoke, command, seq2seq_folder, generator_folder, classifier_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my lines.txt").write_text("one\n")
    model = {"translate": seq2seq_folder, "generate": generator_folder}.get(command, classifier_folder)
    note = "my lines.txt is taken as text. For the lines of that file, use: --input 'my lines.txt'\n"
    assert note in invoke(command, model, "my lines.txt")[2]
    assert "--input" not in invoke(command, model, "your lines.txt", "a" * 5)[2]


def test_texts_beyond_the_trained_length_warn_once(invoke, caplog, seq2seq_folder, generator_folder):
    def logged():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    warning = "Warning: a text exceeds the maximum training length of 16 tokens; quality may be lower."
    long = "one " * 30
    code, out, _ = invoke("translate", seq2seq_folder, long, long, "one two three", "--split", "never")
    assert (code, len(out), out[2], logged()) == (0, 3, "trois deux un", [warning])
    invoke("translate", seq2seq_folder, long, "--split", "never", "--quiet")
    assert logged() == []
    code, _, _ = invoke("generate", generator_folder, "abc", "--max-len", 40, "--min-len", 40, "--n-best", 2)
    assert (code, logged()) == (0, [warning.replace("16", "24")])


def test_evaluate_logs_progress(invoke, monkeypatch, tmp_path, seq2seq_folder):
    (tmp_path / "pairs.tsv").write_text("one two\tdeux un\n" * 3)
    monkeypatch.setattr("regard.progress.LOG_INTERVAL", 0.0)
    _, _, err = invoke("evaluate", seq2seq_folder, "--data", tmp_path / "pairs.tsv")
    assert "translating: 3 of 3\n" in err
    assert "scoring: 3 of 3\n" in err
    assert invoke("evaluate", seq2seq_folder, "--data", tmp_path / "pairs.tsv", "--quiet")[2] == ""


# Output files


def test_json_to_standard_output_or_a_symbolic_link(invoke, monkeypatch, tmp_path, seq2seq_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text("one two\tdeux un\n")
    command = ["evaluate", seq2seq_folder, "--data", "pairs.tsv", "--json"]
    code, out, err = invoke(*command, "-")
    assert code == 0
    assert json.loads("\n".join(out))["sentences"] == 1
    assert "BLEU" in err
    assert not (tmp_path / "-").exists()
    (tmp_path / "link.json").symlink_to("target.json")
    assert invoke(*command, "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["sentences"] == 1
    assert "is a directory. Name a file." in invoke(*command, tmp_path)[2]


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX")
def test_output_to_a_named_pipe(invoke, tmp_path, classifier_folder):
    pipe, content = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: content.append(pipe.read_text()))
    reader.start()
    assert invoke("embed", classifier_folder, "one", "--out", pipe)[0] == 0
    reader.join(10)
    assert json.loads(content[0])["text"] == "one"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    code, out, _ = invoke("embed", classifier_folder, "one", "two", "--out", "-")
    assert (code, [json.loads(line)["text"] for line in out]) == (0, ["one", "two"])


# Data


def test_columns_of_score_and_evaluate(invoke, tmp_path, seq2seq_folder, classifier_folder):
    path, results = tmp_path / "pairs.csv", tmp_path / "r.json"
    path.write_text("fr,id,en\ndeux un,1,one two\ntrois,2,three\n")
    (tmp_path / "plain.tsv").write_text("one two\tdeux un\nthree\ttrois\n")
    expected = invoke("score", seq2seq_folder, "--data", tmp_path / "plain.tsv")[1]
    assert invoke("score", seq2seq_folder, "--data", path, "--columns", "en", "fr")[1] == expected
    assert invoke("score", seq2seq_folder, "--data", path, "--columns", "3", "fr")[1] == expected
    assert invoke("evaluate", seq2seq_folder, "--data", path, "--columns", "en", "fr", "--json", results)[0] == 0
    assert json.loads(results.read_text())["sentences"] == 2
    assert "no column 'de'" in invoke("score", seq2seq_folder, "--data", path, "--columns", "en", "de")[2]
    path.write_text("kind,words\nodd,one\neven,two\nodd,three\n")
    options = ["--columns", "words", "kind", "--json", results]
    assert invoke("evaluate", classifier_folder, "--data", path, *options)[0] == 0
    assert json.loads(results.read_text())["texts"] == 3


def test_header_is_reported_unless_quiet(invoke, caplog, tmp_path, seq2seq_folder):
    (tmp_path / "pairs.tsv").write_text("source\ttarget\none two\tdeux un\n")
    assert len(invoke("score", seq2seq_folder, "--data", tmp_path / "pairs.tsv", "--quiet")[1]) == 1
    assert not caplog.messages
    assert len(invoke("score", seq2seq_folder, "--data", tmp_path / "pairs.tsv")[1]) == 1
    assert [text.split(": ", 1)[1] for text in caplog.messages] == [
        'first line "source<TAB>target" is a header and is skipped.'
    ]


def test_evaluate_prints_precision_recall_and_f1_per_class(invoke, tmp_path, classifier_folder):
    path, results = tmp_path / "texts.tsv", tmp_path / "r.json"
    rows = [("one", "odd"), ("two", "even"), ("three", "odd"), ("four", "even"), ("five", "odd")]
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    _, out, _ = invoke("evaluate", classifier_folder, "--data", path, "--json", results)
    metrics = json.loads(results.read_text())
    predicted = [one.label for one in load(classifier_folder, "cpu").classify([text for text, _ in rows])]
    for label in ("even", "odd"):
        correct = sum(a == b == label for a, (_, b) in zip(predicted, rows))
        support, count = sum(b == label for _, b in rows), predicted.count(label)
        one = metrics["per_class"][label]
        assert one["support"] == support
        assert one["recall"] == pytest.approx(100 * correct / support)
        assert one["precision"] == pytest.approx(100 * correct / max(1, count))
        assert one["f1"] == pytest.approx(200 * correct / (support + count))
        assert any(line.startswith("│") and label in line and f"{one['f1']:.2f} %" in line for line in out)
    assert metrics["macro_f1"] == pytest.approx(sum(one["f1"] for one in metrics["per_class"].values()) / 2)
    assert any("macro F1" in line for line in out)


def test_bleu_tokenizer_option(invoke, tmp_path, seq2seq_folder):
    path, results = tmp_path / "pairs.tsv", tmp_path / "r.json"
    path.write_text("one two three\ttrois deux un\n")
    for name, signature in (("char", "char"), ("intl", "intl"), ("auto", "13a")):
        invoke("evaluate", seq2seq_folder, "--data", path, "--bleu-tokenizer", name, "--json", results)
        assert f"tok:{signature}" in json.loads(results.read_text())["signature"]


def test_languages_are_stored_and_kept_in_fine_tuning(invoke, capsys, tmp_path):
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
    assert "languages\n  source  fr\n  target  en" in "\n".join(invoke("info", tmp_path / "a")[1])
    tuned = train(tmp_path / "b", "--from", tmp_path / "a", "--data.columns", "2", "1", *steps)
    assert tuned.languages == ("fr", "en")


def test_dash_as_input_is_standard_input(invoke, stdin, seq2seq_folder, generator_folder):
    stdin("one two three\n")
    assert invoke("translate", seq2seq_folder, "--input", "-")[1] == ["trois deux un"]
    stdin("abc\n")
    assert invoke("generate", generator_folder, "--input", "-", "--max-len", "3")[1][0].startswith("abc")
