"""No command, and no function that writes results, replaces an input, another model or data of another kind."""

import contextlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli import COMMANDS, main
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.interop import export_argos, export_ctranslate2, export_huggingface, export_onnx
from regard.models import Bert, ViT
from regard.models.bert import BertConfig
from regard.models.vit import vit_pico
from regard.pipelines import ImageModel, TextEncoder, load, save
from regard.viewer import look
from tests.conftest import number_pairs


class Case(NamedTuple):
    """A command whose output has the extension `suffix` (none: a folder), and its arguments, with INPUT and OUT."""

    suffix: str
    argv: str


# Every command and option that writes a result; {input} has the extension of the output, so that both can be the same.
FILES = {
    "translate --output": Case(".txt", "translate model --input {input} --overwrite --output {out}"),
    "classify --output": Case(".txt", "classify encoder --input {input} --overwrite --output {out}"),
    "tag --output": Case(".txt", "tag encoder --input {input} --overwrite --output {out}"),
    "score --output": Case(".tsv", "score model --data {input} --overwrite --output {out}"),
    "embed --output": Case(".jsonl", "embed encoder --input {input} --overwrite --output {out}"),
    "segment --out": Case(".png", "segment images {input} --out {out}"),
    "segment --overlay": Case(".png", "segment images {input} --overlay {out}"),
    "answer --out": Case(".json", "answer encoder --data {input} --out {out}"),
    "evaluate --json": Case(".tsv", "evaluate model --data {input} --json {out}"),
    "evaluate --confusion": Case(".png", "evaluate images --data {input} --confusion {out}"),
    "look --out": Case(".png", "look images {input} --out {out}"),
}
FOLDERS = {
    "demo --out": Case("", "demo --out {out}"),
    "train --out": Case("", "train --data {input} --out {out}"),
    "scores --out": Case("", "scores --data {input} --steps 1 --out {out}"),
    "prepare --out": Case("", "prepare {input} --out {out}"),
    "import --out": Case("", "import {input} --out {out}"),
    "export --out": Case("", "export {input} --to int8 --out {out}"),
}
MODEL_FORMATS = {  # the files by which a folder is recognized
    "regard": ("config.json", "model.safetensors"),
    "huggingface": ("config.json", "model-00001-of-00002.safetensors"),
    "ctranslate2": ("model.bin", "shared_vocabulary.json"),
    "onnx": ("encoder.onnx",),
    "gguf": ("model.gguf",),
    "shards": ("dataset.json",),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory, transformer_folder) -> Path:
    """A folder with a translator, a text encoder and an image classifier."""
    folder = tmp_path_factory.mktemp("outputs")
    shutil.copytree(transformer_folder, folder / "model")
    shutil.copytree(transformer_folder, folder / "other")
    tokenizer = Tokenizer.train(["one two three"], "word")
    config = BertConfig(width=8, heads=2, layers=1, feedforward=8, vocab=tokenizer.vocab_size)
    save(folder / "encoder", TextEncoder(Bert(config).eval(), tokenizer))
    sizes = dict(width=8, heads=2, layers=1, feedforward=8, patch=4, image_height=8, image_width=8)
    save(folder / "images", ImageModel(ViT(vit_pico(**sizes, labels=("dark", "light"))).eval()))
    return folder


@pytest.fixture
def place(models, tmp_path, monkeypatch) -> Path:
    """A working folder with copies of the models."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes | None]:
    """The content of all files below a folder; None for folders."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def write_input(path: Path) -> None:
    if path.suffix == ".png":
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    else:
        path.write_text("".join("\t".join(pair) + "\n" for pair in number_pairs(20, seed=1)))


def assert_refused(folder: Path, capsys, case: Case, out: str, source: str, message: str) -> None:
    before = content(folder)
    assert main(case.argv.format(input=source, out=out).split()) == 2
    assert re.search(message, capsys.readouterr().err)
    assert content(folder) == before


def test_every_option_that_names_an_output_is_tested():
    found = set()
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            main([command, "--help"])
        options = re.findall(r"--(?:out|output|json|confusion|overlay|plot|save)\b", output.getvalue())
        found |= {f"{command} {option}" for option in options}
    found -= {"embed --out"}  # an alias
    assert found == FILES.keys() | FOLDERS.keys()


@pytest.mark.parametrize("name", FILES)
def test_an_input_is_not_replaced(place, capsys, name):
    case = FILES[name]
    source = f"input{case.suffix}"
    write_input(place / source)
    (place / f"link{case.suffix}").symlink_to(source)
    for out in (source, f"link{case.suffix}", f"model/../{source}"):
        assert_refused(place, capsys, case, out, source, "the input and the output are the same file")


@pytest.mark.parametrize("name", FILES)
def test_folders_are_not_created_for_a_file(place, capsys, name):
    case = FILES[name]
    write_input(place / f"input{case.suffix}")
    message = "missing/result.* there is no folder missing"
    assert_refused(place, capsys, case, f"missing/result{case.suffix}", f"input{case.suffix}", message)


@pytest.mark.parametrize("name", [name for name, case in FILES.items() if case.suffix not in (".png", ".jsonl")])
def test_a_file_of_a_model_folder_is_not_replaced(place, capsys, name):
    case = FILES[name]
    write_input(place / f"input{case.suffix}")
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert_refused(place, capsys, case, f"other/{file}", f"input{case.suffix}", "part of a model folder")


@pytest.mark.parametrize("kind", MODEL_FORMATS)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_kind_is_not_replaced(place, capsys, name, kind):
    write_input(place / "input.tsv")
    (place / "taken").mkdir()
    for file in MODEL_FORMATS[kind]:
        (place / "taken" / file).write_text("{}")
    source = "model" if name.startswith(("import", "export")) else "input.tsv"
    assert_refused(place, capsys, FOLDERS[name], "taken", source, "taken already (contains|exists)")


@pytest.mark.parametrize("target", ["int8", "ctranslate2", "onnx", "huggingface", "argos"])
def test_no_export_replaces_a_model(place, capsys, target):
    case = Case("", f"export {{input}} --to {target} --out {{out}}")
    for out in ("model", "other"):
        assert_refused(place, capsys, case, out, "model", "already contains a model|the same folder|is a directory")


def test_a_run_does_not_start_in_the_folder_of_its_data(place, capsys):
    (place / "pictures" / "dark").mkdir(parents=True)
    write_input(place / "pictures" / "dark" / "1.png")
    case = Case("", "train --task classify-images --data {input} --out {out}")
    assert_refused(place, capsys, case, "pictures", "pictures", "the input and the output are the same folder")


def test_the_two_outputs_of_a_command_are_different_files(place, capsys):
    write_input(place / "input.png")
    case = Case(".png", "segment images {input} --out {out} --overlay {out}")
    write_input(place / "result.png")
    assert_refused(place, capsys, case, "result.png", "input.png", "same file")


# Python


def _functions(place: Path) -> dict[str, Callable[[str], Any]]:
    model = load(place / "model", "cpu")
    return {
        "save": model.save,
        "export_onnx": lambda out: export_onnx(model, out),
        "export_ctranslate2": lambda out: export_ctranslate2(model, out),
        "export_huggingface": lambda out: export_huggingface(model, out),
        "export_argos": lambda out: export_argos(model, out),
        "train": lambda out: regard.train(place / "input.tsv", out=out, quiet=True),
        "prepare": lambda out: regard.prepare(place / "input.tsv", out, quiet=True),
    }


@pytest.mark.parametrize("kind", MODEL_FORMATS)
def test_no_function_writes_into_a_folder_of_another_kind(place, kind):
    write_input(place / "input.tsv")
    (place / "taken").mkdir()
    for file in MODEL_FORMATS[kind]:
        (place / "taken" / file).write_text("{}")
    before = content(place)
    for function in _functions(place).values():
        with pytest.raises(RegardError, match=r"already (contains|exists)|is a directory"):
            function("taken")
    assert content(place) == before


def test_a_model_may_be_saved_to_its_own_folder_only(place):
    model = load("model", "cpu")
    with torch.no_grad():
        next(model.model.parameters()).zero_()
    with pytest.raises(RegardError, match=r"other already contains a model \(config.json\)"):
        model.save("other")
    model.save("model")
    model.save("new")
    model.save(place / "new", precision="int8")
    assert not next(load("model", "cpu").model.parameters()).any()


def test_no_function_replaces_an_input_file(place):
    write_input(place / "input.png")
    write_input(place / "input.txt")
    before = content(place)
    with pytest.raises(RegardError, match="the same file"):
        look(load("images", "cpu"), "input.png").save("input.png")
    with pytest.raises(RegardError, match="the same file"):
        load("model", "cpu").translate_file("input.txt", "input.txt", overwrite=True)
    with pytest.raises(RegardError, match="there is no folder missing"):
        look(load("model", "cpu"), "one two").save("missing/page.html")
    assert content(place) == before
