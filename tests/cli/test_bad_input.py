"""What bad input gets: one clear sentence, exit code 2, no traceback, nothing half-written."""

import json
import shutil
import sys

import pytest

from regard.cli import main


@pytest.fixture
def refuse(capsys):
    """Runs a command that must be refused; gives the sentence."""

    def call(*argv: object) -> str:
        code = main([*map(str, argv)])
        out, err = capsys.readouterr()
        assert code == 2, err
        assert not out
        assert "Traceback" not in err
        return err

    return call


@pytest.fixture
def broken(tmp_path, transformer_folder):
    """A copy of a model folder, to be spoilt."""
    return shutil.copytree(transformer_folder, tmp_path / "broken")


COMMANDS = [
    ["translate", "one"],
    ["score", "--data", "x.tsv"],
    ["look", "one"],
    ["info"],
    ["evaluate", "--data", "x.tsv"],
]


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2], COMMANDS[3]], ids=lambda words: words[0])
def test_no_folder(refuse, command, tmp_path):
    said = refuse(command[0], tmp_path / "nowhere", *command[1:])
    assert said == f"regard: {tmp_path / 'nowhere'}: there is no such model folder. Train one with: regard train\n"


def test_a_folder_of_something_else(refuse, tmp_path):
    assert "not a model folder" in refuse("info", tmp_path)


def test_damaged_weights(refuse, broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{weights}: damaged" in refuse("translate", broken, "one")


def test_weights_of_another_model(refuse, broken, seq2seq_folder):
    shutil.copy(seq2seq_folder / "model.safetensors", broken)
    assert "do not fit the config" in refuse("translate", broken, "one")


def test_a_newer_format(refuse, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"format": 99}))
    assert "format 99 is newer" in refuse("info", broken)


def test_a_config_that_is_not_json(refuse, broken):
    (broken / "config.json").write_text("{")
    assert "config.json: not JSON" in refuse("info", broken)


def test_a_file_that_is_not_utf8(refuse, tmp_path, transformer_folder):
    (tmp_path / "lines.txt").write_bytes(b"one\ntw\xff\n")
    said = refuse("translate", transformer_folder, "--input", tmp_path / "lines.txt")
    assert f"{tmp_path / 'lines.txt'}, line 2: not UTF-8." in said


def test_an_argument_that_is_not_utf8(refuse, transformer_folder):
    assert "text 2: not UTF-8." in refuse("translate", transformer_folder, "one", "tw\udcff")


def test_a_line_that_is_too_long(refuse, tmp_path, transformer_folder):
    (tmp_path / "lines.txt").write_text("one\n" + "two " * 30)
    said = refuse("translate", transformer_folder, "--input", tmp_path / "lines.txt")
    assert f"{tmp_path / 'lines.txt'}, line 2 has 30 tokens, and the model takes at most 15." in said
    assert "--truncate" in said


@pytest.mark.parametrize("command", ["translate", "score", "evaluate"])
def test_an_empty_file(refuse, command, tmp_path, transformer_folder):
    (tmp_path / "empty.tsv").touch()
    option = "--input" if command == "translate" else "--data"
    assert f"{tmp_path / 'empty.tsv'} is empty." in refuse(command, transformer_folder, option, tmp_path / "empty.tsv")


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_files_of_unequal_length(refuse, command, tmp_path, transformer_folder):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.fr").write_text("un\n")
    said = refuse(command, transformer_folder, "--data", tmp_path / "a.en", tmp_path / "a.fr")
    assert "a.en has 2 lines, but" in said
    assert "line 2 has no partner" in said


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_pairs_that_are_all_empty(refuse, command, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("\n\n")
    assert "every pair is empty" in refuse(command, transformer_folder, "--data", tmp_path / "pairs.tsv")


def test_a_source_that_is_empty_cannot_be_scored(refuse, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\n\tdeux\n")
    said = refuse("score", transformer_folder, "--data", tmp_path / "pairs.tsv")
    assert "pairs.tsv, pair 2: the source is empty." in said


def test_too_few_gold_alignments(refuse, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\ntwo\tdeux\n")
    (tmp_path / "gold").write_text("0-0\n")
    options = ["--data", tmp_path / "pairs.tsv", "--alignments", tmp_path / "gold"]
    assert "gold has 1 lines, but" in refuse("evaluate", transformer_folder, *options)


def test_a_layer_that_is_not_there(refuse, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\n")
    (tmp_path / "gold").write_text("0-0\n")
    options = ["--data", tmp_path / "pairs.tsv", "--alignments", tmp_path / "gold", "--layer", "decoder.7.cross"]
    said = refuse("evaluate", transformer_folder, *options)
    assert "no cross-attention 'decoder.7.cross'" in said
    assert "decoder.0.cross" in said


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_an_unknown_option(refuse, command, transformer_folder):
    said = refuse(command[0], transformer_folder, *command[1:], "--devize", "cpu")
    assert "--devize" in said
    assert "--device" in said  # the nearest known one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam", "0"], "beam = 0 makes no sense. It must be at least 1."),
        (["--n-best", "9"], "A beam of 5 gives at most 5 hypotheses."),
        (["--beam", "many"], "--beam"),
    ],
)
def test_values_that_make_no_sense(refuse, transformer_folder, options, message):
    assert message in refuse("translate", transformer_folder, "one", *options)


def test_two_inputs_at_once(refuse, transformer_folder):
    assert "Both --input and lines" in refuse("translate", transformer_folder, "one", "--input", "lines.txt")


def test_models_of_different_tokenisers_cannot_vote(refuse, broken, transformer_folder):
    text = (broken / "tokenizer.json").read_text()
    (broken / "tokenizer.json").write_text(text.replace("▁seven", "▁sevens"))
    said = refuse("translate", transformer_folder, "one", "--ensemble", broken)
    assert "its tokenisers are not those of" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "map.gif"], "pages are .html, pictures are .png or .svg"),
        (["--layers", "decoder.7.*"], "no attention that matches decoder.7.*"),
        (["--attention", "decoder.7.cross"], "no attention 'decoder.7.cross'"),
        (["--attention", "decoder.0.cross", "--head", "7"], "has no head 7"),
        (["--beam", "0"], "beam = 0 makes no sense"),
        (["--target", "un", "--beam", "3"], "no search to configure"),
    ],
)
def test_pictures_that_cannot_be(refuse, monkeypatch, tmp_path, transformer_folder, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refuse("look", transformer_folder, "one", *options)
    assert not list(tmp_path.iterdir())


def test_nothing_to_look_at(refuse, blind_folder, transformer_folder):
    assert "has no attention" in refuse("look", blind_folder, "one")
    assert "has no attention" in refuse("translate", blind_folder, "one", "--alignments")
    assert "empty" in refuse("look", transformer_folder, "")
    assert "no text to search" in refuse("look", transformer_folder, "--live", "--prefix", "un")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder in which nothing can be written")
def test_a_place_that_cannot_be_written(refuse, transformer_folder):
    assert "cannot be written" in refuse("look", transformer_folder, "one", "--out", "/proc/map.png")
