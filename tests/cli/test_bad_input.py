"""What bad input gets: one clear sentence, exit code 2, no traceback, nothing half-written."""

import json
import shutil
import sys

import pytest


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
def test_no_folder(refused, command, tmp_path):
    said = refused(command[0], tmp_path / "nowhere", *command[1:])
    assert said == f"regard: {tmp_path / 'nowhere'}: there is no such model folder. Train one with: regard train\n"


def test_a_folder_of_something_else(refused, tmp_path):
    assert "not a model folder" in refused("info", tmp_path)


def test_damaged_weights(refused, broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{weights}: damaged" in refused("translate", broken, "one")


def test_weights_of_another_model(refused, broken, seq2seq_folder):
    shutil.copy(seq2seq_folder / "model.safetensors", broken)
    assert "do not fit the config" in refused("translate", broken, "one")


def test_a_newer_format(refused, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"format": 99}))
    assert "format 99 is newer" in refused("info", broken)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"width": 0}, "width must be at least 1 (got 0)."),
        ({"heads": 0}, "heads must be at least 1 (got 0)."),
        ({"width": 10**9}, "width is 1,000,000,000, and no tensor has this dimension."),
        ({"decoder_layers": 10**6}, "decoder_layers must be between 1 and 10,000 (got 1000000)."),
        ({"width": 10**30}, "width must be at most 1,000,000,000"),
    ],
    ids=str,
)
def test_info_on_sizes_that_lie(refused, broken, changes, says):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | changes))
    assert says in refused("info", broken)


def test_info_on_deep_nesting(refused, broken):
    (broken / "config.json").write_text("[" * 100_000)
    assert "nested too deeply" in refused("info", broken)


def test_info_on_training_without_facts(run, broken):
    (broken / "training.json").write_text('{"note": ""}')
    assert "training" in run("info", broken)


def test_a_config_that_is_not_json(refused, broken):
    (broken / "config.json").write_text("{")
    assert "config.json: not JSON" in refused("info", broken)


def test_a_file_that_is_not_utf8(refused, tmp_path, transformer_folder):
    (tmp_path / "lines.txt").write_bytes(b"tw\xff\none\n")
    said = refused("translate", transformer_folder, "--input", tmp_path / "lines.txt")
    assert f"{tmp_path / 'lines.txt'}, line 1: not UTF-8." in said


def test_an_argument_that_is_not_utf8(refused, transformer_folder):
    assert "text 1: not UTF-8." in refused("translate", transformer_folder, "tw\udcff", "one")


def test_a_line_that_is_too_long(refused, tmp_path, learned_folder):
    (tmp_path / "lines.txt").write_text("two " * 30 + "\none\n")
    said = refused("translate", learned_folder, "--input", tmp_path / "lines.txt")
    assert f"{tmp_path / 'lines.txt'}, line 1 has 30 tokens, and the model takes at most 15." in said
    assert "--truncate" in said


@pytest.mark.parametrize("command", ["translate", "score", "evaluate"])
def test_an_empty_file(refused, command, tmp_path, transformer_folder):
    (tmp_path / "empty.tsv").touch()
    option = "--input" if command == "translate" else "--data"
    assert f"{tmp_path / 'empty.tsv'} is empty." in refused(command, transformer_folder, option, tmp_path / "empty.tsv")


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_files_of_unequal_length(refused, command, tmp_path, transformer_folder):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.fr").write_text("un\n")
    said = refused(command, transformer_folder, "--data", tmp_path / "a.en", tmp_path / "a.fr")
    assert "a.en has 2 lines, but" in said
    assert "line 2 has no partner" in said


@pytest.mark.parametrize("command", ["score", "evaluate"])
def test_pairs_that_are_all_empty(refused, command, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("\n\n")
    assert "every pair is empty" in refused(command, transformer_folder, "--data", tmp_path / "pairs.tsv")


def test_a_source_that_is_empty_cannot_be_scored(refused, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\n\tdeux\n")
    said = refused("score", transformer_folder, "--data", tmp_path / "pairs.tsv")
    assert "pairs.tsv, pair 2: the source is empty." in said


def test_too_few_gold_alignments(refused, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\ntwo\tdeux\n")
    (tmp_path / "gold").write_text("0-0\n")
    options = ["--data", tmp_path / "pairs.tsv", "--alignments", tmp_path / "gold"]
    assert "gold has 1 lines, but" in refused("evaluate", transformer_folder, *options)


def test_a_layer_that_is_not_there(refused, tmp_path, transformer_folder):
    (tmp_path / "pairs.tsv").write_text("one\tun\n")
    (tmp_path / "gold").write_text("0-0\n")
    options = ["--data", tmp_path / "pairs.tsv", "--alignments", tmp_path / "gold", "--layer", "decoder.7.cross"]
    said = refused("evaluate", transformer_folder, *options)
    assert "no cross-attention 'decoder.7.cross'" in said
    assert "decoder.0.cross" in said


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_an_unknown_option(refused, command, transformer_folder):
    said = refused(command[0], transformer_folder, *command[1:], "--devize", "cpu")
    assert "--devize" in said
    assert "--device" in said  # the nearest known one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam", "0"], "beam must be between 1 and 1,000 (got 0)."),
        (["--n-best", "9"], "n_best must be at most the beam, 5 (got 9)."),
        (["--beam", "1000000"], "beam must be between 1 and 1,000 (got 1000000)."),
        (["--temperature", "nan"], "temperature must be between 0.001 and 1,000 (got nan)."),
        (["--length-penalty", "inf"], "length_penalty must be between 0 and 10 (got inf)."),
        (["--beam", "many"], "--beam"),
    ],
)
def test_values_out_of_range(refused, transformer_folder, options, message):
    assert message in refused("translate", transformer_folder, "one", *options)


def test_two_inputs_at_once(refused, transformer_folder):
    assert "Both --input and lines" in refused("translate", transformer_folder, "one", "--input", "lines.txt")


def test_models_of_different_tokenisers_cannot_vote(refused, broken, transformer_folder):
    text = (broken / "tokenizer.json").read_text()
    (broken / "tokenizer.json").write_text(text.replace("▁seven", "▁sevens"))
    config = json.loads((broken / "config.json").read_text())
    del config["tokenizer_sha256"]
    (broken / "config.json").write_text(json.dumps(config))
    said = refused("translate", transformer_folder, "one", "--ensemble", broken)
    assert "its tokenizers are not those of" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "map.gif"], "pages are .html, pictures are .png or .svg"),
        (["--layers", "decoder.7.*"], "no attention that matches decoder.7.*"),
        (["--attention", "decoder.7.cross"], "no attention 'decoder.7.cross'"),
        (["--attention", "decoder.0.cross", "--head", "7"], "has no head 7"),
        (["--beam", "0"], "beam must be between 1 and 1,000 (got 0)"),
        (["--target", "un", "--beam", "3"], "no search to configure"),
    ],
)
def test_pictures_that_cannot_be(refused, monkeypatch, tmp_path, transformer_folder, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused("look", transformer_folder, "one", *options)
    assert not list(tmp_path.iterdir())


def test_nothing_to_look_at(refused, blind_folder, transformer_folder):
    assert "has no attention" in refused("look", blind_folder, "one", "--out", "map.png")
    assert "has no attention" in refused("translate", blind_folder, "one", "--alignments")
    assert "empty" in refused("look", transformer_folder, "")
    assert "no text to search" in refused("look", transformer_folder, "--live", "--prefix", "un")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder in which nothing can be written")
def test_a_place_that_cannot_be_written(refused, transformer_folder):
    assert "cannot be written" in refused("look", transformer_folder, "one", "--out", "/proc/map.png")
