"""Invalid input: an error message, exit code 2, no traceback, no partial output."""

import json
import shutil
import sys

import pytest


@pytest.fixture
def broken(tmp_path, transformer_folder):
    """A copy of a model folder, to be damaged by the test."""
    return shutil.copytree(transformer_folder, tmp_path / "broken")


COMMANDS = [
    ["translate", "one"],
    ["score", "--data", "x.tsv"],
    ["look", "one"],
    ["info"],
    ["evaluate", "--data", "x.tsv"],
]


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2], COMMANDS[3]], ids=lambda words: words[0])
def test_missing_folder(run_error, command, tmp_path):
    message = run_error(command[0], tmp_path / "nowhere", *command[1:])
    assert message == f"regard: {tmp_path / 'nowhere'}: model folder not found. Train one with: regard train\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width must be at least 1 (got 0)."),
        ({"heads": 0}, "heads must be at least 1 (got 0)."),
        ({"width": 10**9}, "width is 1,000,000,000, but no tensor has this dimension."),
        ({"decoder_layers": 10**6}, "decoder_layers must be between 1 and 10,000 (got 1000000)."),
        ({"width": 10**30}, "width must be at most 1,000,000,000"),
    ],
    ids=str,
)
def test_info_with_inconsistent_sizes(run_error, broken, changes, message):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | changes))
    assert message in run_error("info", broken)


def test_info_with_deep_nesting(run_error, broken):
    (broken / "config.json").write_text("[" * 100_000)
    assert "nested too deeply" in run_error("info", broken)


def test_info_with_empty_training_values(run, broken):
    (broken / "training.json").write_text('{"note": ""}')
    assert "training" in run("info", broken)


@pytest.mark.parametrize("recipe", [1, [], {"data": 1}, {"data": {"languages": [1]}}], ids=str)
def test_training_facts_of_the_wrong_type_are_ignored(run, run_error, broken, recipe):
    (broken / "training.json").write_text(json.dumps({"recipe": recipe}))
    assert "parameters" in run("info", broken)
    if not isinstance(recipe, dict):
        assert "training.json: recipe must be an object" in run_error("config", "show", broken)


def test_file_that_is_not_utf8(run_error, tmp_path, transformer_folder):
    (tmp_path / "lines.txt").write_bytes(b"tw\xff\none\n")
    message = run_error("translate", transformer_folder, "--input", tmp_path / "lines.txt")
    assert f"{tmp_path / 'lines.txt'}, line 1: not UTF-8." in message


def test_argument_that_is_not_utf8(run_error, transformer_folder):
    assert "text 1: not UTF-8." in run_error("translate", transformer_folder, "tw\udcff", "one")


def test_line_beyond_the_length_limit(run_error, tmp_path, learned_folder):
    (tmp_path / "lines.txt").write_text("two " * 30 + "\none\n")
    message = run_error("translate", learned_folder, "--input", tmp_path / "lines.txt")
    assert f"{tmp_path / 'lines.txt'}, line 1 has 30 tokens; the model supports at most 15." in message
    assert "--truncate" in message


@pytest.mark.parametrize("command", ["translate", "score", "evaluate"])
def test_empty_file(run_error, command, tmp_path, transformer_folder):
    (tmp_path / "empty.tsv").touch()
    option = "--input" if command == "translate" else "--data"
    assert f"{tmp_path / 'empty.tsv'} is empty." in run_error(
        command, transformer_folder, option, tmp_path / "empty.tsv"
    )


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_files_of_unequal_length(run_error, command, tmp_path, transformer_folder):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.fr").write_text("un\n")
    message = run_error(command, transformer_folder, "--data", tmp_path / "a.en", tmp_path / "a.fr")
    assert "a.en has 2 lines, but" in message
    assert "line 2 has no counterpart" in message


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_only_empty_pairs(run_error, command, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("\n\n")
    assert "all pairs are empty" in run_error(command, transformer_folder, "--data", tmp_path / "pairs.tsv")


def test_scoring_an_empty_source(run_error, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\n\tdeux\n")
    message = run_error("score", transformer_folder, "--data", tmp_path / "pairs.tsv")
    assert "pairs.tsv, pair 2: the source is empty." in message


def test_too_few_gold_alignments(run_error, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\ntwo\tdeux\n")
    (tmp_path / "gold").write_text("0-0\n")
    options = ["--data", tmp_path / "pairs.tsv", "--alignments", tmp_path / "gold"]
    assert "gold has 1 lines, but" in run_error("evaluate", transformer_folder, *options)


def test_unknown_layer(run_error, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\n")
    (tmp_path / "gold").write_text("0-0\n")
    options = ["--data", tmp_path / "pairs.tsv", "--alignments", tmp_path / "gold", "--layer", "decoder.7.cross"]
    message = run_error("evaluate", transformer_folder, *options)
    assert "Unknown cross-attention 'decoder.7.cross'" in message
    assert "decoder.0.cross" in message


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_unknown_option(run_error, command, transformer_folder):
    message = run_error(command[0], transformer_folder, *command[1:], "--devize", "cpu")
    assert "--devize" in message
    assert "--device" in message  # the suggestion


def test_input_file_and_arguments(run_error, transformer_folder):
    assert "--input and texts as arguments cannot be combined" in run_error(
        "translate", transformer_folder, "one", "--input", "lines.txt"
    )


def test_ensemble_with_different_tokenizers(run_error, broken, transformer_folder):
    text = (broken / "tokenizer.json").read_text()
    (broken / "tokenizer.json").write_text(text.replace("▁seven", "▁sevens"))
    config = json.loads((broken / "config.json").read_text())
    del config["tokenizer_sha256"]
    (broken / "config.json").write_text(json.dumps(config))
    message = run_error("translate", transformer_folder, "one", "--ensemble", broken)
    assert "its tokenizers differ from those of" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "map.gif"], "pages are .html, plots are .png, .svg or .pdf"),
        (["--layers", "decoder.7.*"], "No attention module of the model matches decoder.7.*"),
        (["--attention", "decoder.7.cross"], "no attention 'decoder.7.cross'"),
        (["--attention", "decoder.0.cross", "--head", "7"], "has no head 7"),
        (["--beam", "0"], "beam must be between 1 and 1,000 (got 0)"),
        (["--target", "un", "--beam", "3"], "no search to configure"),
    ],
)
def test_invalid_look_options(run_error, monkeypatch, tmp_path, transformer_folder, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in run_error("look", transformer_folder, "one", *options)
    assert not list(tmp_path.iterdir())


def test_look_without_attention_or_text(run_error, blind_folder, transformer_folder):
    assert "has no attention" in run_error("look", blind_folder, "one", "--out", "map.png")
    assert "has no attention" in run_error("translate", blind_folder, "one", "--alignments")
    assert "empty" in run_error("look", transformer_folder, "")
    assert "--beam and --prefix require an input text" in run_error(
        "look", transformer_folder, "--live", "--prefix", "un"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, where no file can be written")
def test_output_that_cannot_be_written(run_error, transformer_folder):
    assert "cannot be written" in run_error("look", transformer_folder, "one", "--out", "/proc/map.png")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("translate {model} one --beam 0", "beam must be between 1 and 1,000 (got 0)."),
        ("translate {model} one --n-best 9", "n_best must be at most the beam width, 5 (got 9)."),
        ("translate {model} one --temperature nan", "temperature must be between 0.001 and 1,000 (got nan)."),
        ("translate {model} one --length-penalty inf", "length_penalty must be between 0 and 10 (got inf)."),
        ("translate {model} one --beam many", "--beam"),
        ("translate {model} one --suppress-sequences 99999999", "suppress_sequences: the token id 99999999 is outside"),
        ("translate {model} one --suppress-sequences 5,6-99999999", "suppress_sequences: the token id 99999999 is"),
        ("translate {model} one --begin-suppress-tokens 99999999", "begin_suppress_tokens: the token id 99999999 is"),
        (
            "translate {model} one --precision float16 --device cpu",
            "precision float16 is for GPUs (the model is on cpu)",
        ),
        ("evaluate {model} --data x.tsv --precision bfloat16 --device cpu", "precision bfloat16 is for GPUs"),
        ("look {model} one --live --port 99999", "--port must be between 0 and 65,535 (got 99999)."),
        ("look {model} one --live --port -1", "--port must be between 0 and 65,535 (got -1)."),
        ("serve {model} --port 99999", "--port must be between 0 and 65,535 (got 99999)."),
        ("shortlist {model} --data x.tsv --per-token -1", "per_token must be at least 1 (got -1)."),
        ("train --data x.tsv --lr 1e10", "train.lr must be above 0 and at most 100 (got 10000000000.0)."),
        (
            "train --data x.tsv --tokenizer.vocab-size 3",
            "tokenizer.vocab_size must be between 6 and 10,000,000 (got 3)",
        ),
        ("train --data x.tsv --steps 0", "train.steps must be at least 1 (got 0). Leave it out for the default."),
        ("prepare x.tsv --vocab-size 3", "tokenizer.vocab_size must be between 6 and 10,000,000 (got 3)"),
        ("prepare x.tsv --max-ratio 0.5", "data.max_ratio must be at least 1 (got 0.5)."),
        ("demo --seed -1", "train.seed must be between 0 and"),
    ],
)
def test_options_out_of_range(run_error, transformer_folder, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.tsv").write_text("one\tun\n" * 30)
    assert message in run_error(*argv.format(model=transformer_folder).split())
    assert [path.name for path in tmp_path.iterdir()] == ["x.tsv"]
