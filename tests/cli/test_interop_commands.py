"""`regard import` and `regard export`."""

import json
import re
import sys
from typing import Any

import pytest
from PIL import Image

import regard
from regard.cli import main
from regard.errors import RegardError
from regard.pipelines import load
from tests.pipelines.test_image_model import make_image_model
from tests.pipelines.test_text_encoder import make_encoder
from tests.pipelines.test_text_generator import make_generator

LINES = ["one two three", "four five", "nine"]


def translations(folder) -> list[str]:
    return [n_best[0].text for n_best in load(folder, "cpu").translate(LINES)]


def test_export_to_hugging_face_and_import(tmp_path, transformer_folder, capsys):
    assert main(["export", str(transformer_folder), "--to", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert "a folder for transformers" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "imported")]) == 0
    assert "Imported a translator with" in capsys.readouterr().err
    assert translations(tmp_path / "imported") == translations(transformer_folder)


def test_export_to_ctranslate2_and_onnx(tmp_path, transformer_folder):
    for target, file in (("ctranslate2", "model.bin"), ("onnx", "encoder.onnx")):
        assert main(["export", str(transformer_folder), "--to", target, "--out", str(tmp_path / target)]) == 0
        assert (tmp_path / target / file).exists()


def test_export_to_int8(tmp_path, transformer_folder, capsys):
    assert main(["export", str(transformer_folder), "--to", "int8", "--out", str(tmp_path / "int8")]) == 0
    assert "a model folder with int8 weights" in capsys.readouterr().err
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "int8", transformer_folder)]
    assert sizes[0] < 0.4 * sizes[1]
    assert translations(tmp_path / "int8") == translations(transformer_folder)
    assert main(["translate", str(tmp_path / "int8"), "one two", "--precision", "int8"]) == 0
    assert main(["score", str(tmp_path / "int8"), "--data", str(tmp_path / "none.tsv")]) == 2


def test_import_and_export_in_python(tmp_path, transformer_folder):
    translator = regard.load(transformer_folder, "cpu")
    written = regard.export_model(translator, "huggingface", tmp_path / "hf")
    assert written == "a folder for transformers (PegasusForConditionalGeneration)"
    imported = regard.import_model(tmp_path / "hf")
    assert isinstance(imported, regard.Translator)
    assert imported(LINES) == translator(LINES)
    with pytest.raises(RegardError, match="already contains a model"):
        regard.export_model(translator, "int8", transformer_folder)
    with pytest.raises(RegardError, match=r"Unknown format 'tflite'\. Use one of: huggingface, "):
        regard.export_model(translator, "tflite", tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(RegardError, match=r"no such folder or file.*hf download"):
        regard.import_model(tmp_path / "missing")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory, transformer_folder):
    folder = tmp_path_factory.mktemp("graphs") / "onnx"
    assert main(["export", str(transformer_folder), "--to", "onnx", "--out", str(folder)]) == 0
    return folder


def test_commands_run_onnx_graphs(tmp_path, graphs, transformer_folder, capsys):
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\tdeux trois un\n" for line in LINES))
    (tmp_path / "links").write_text("0-0\n" * len(LINES))
    data = ["--data", str(tmp_path / "pairs.tsv")]
    capsys.readouterr()
    outputs, metrics = [], []
    for folder in map(str, (transformer_folder, graphs)):
        assert main(["translate", folder, *LINES, "--n-best", "2", "--device", "cpu"]) == 0
        assert main(["score", folder, *data]) == 0
        outputs.append(capsys.readouterr().out.split())
        gold = ["--alignments", str(tmp_path / "links"), "--json", str(tmp_path / "r.json")]
        assert main(["evaluate", folder, *data, *gold]) == 0
        metrics.append(json.loads((tmp_path / "r.json").read_text()))
        capsys.readouterr()
    assert len(outputs[0]) == len(outputs[1]) > 20
    for one, other in zip(*outputs):
        assert one == other or float(one) == pytest.approx(float(other), abs=2e-4)
    model, onnx = metrics
    assert model.keys() - onnx.keys() == {"alignment_error_rate", "alignment_layer"}
    assert (onnx["bleu"], onnx["loss"]) == pytest.approx((model["bleu"], model["loss"]), abs=1e-4)


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("command", ["classify", "embed", "generate", "classify images"])
def test_commands_run_graphs_of_every_family(command, tmp_path, capsys):
    texts = ["the cat", "the mouse"]
    pipeline: Any
    if command == "generate":
        pipeline, options = make_generator(), ["--method", "greedy", "--max-len", "6"]
    elif command == "classify images":
        pipeline, texts, options = make_image_model(), [str(tmp_path / "image.png")], []
        Image.new("RGB", (16, 16), (200, 30, 90)).save(texts[0])
    else:
        pipeline, options = make_encoder("classify"), ["--all"] * (command == "classify")
    pipeline.save(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", "onnx", "--out", str(tmp_path / "graphs")]) == 0
    capsys.readouterr()
    outputs = []
    for folder in ("model", "graphs"):
        assert main([command.split()[0], str(tmp_path / folder), *texts, *options, "--device", "cpu"]) == 0
        outputs.append(capsys.readouterr().out)
    assert numbers(outputs[0])
    assert numbers(outputs[1]) == pytest.approx(numbers(outputs[0]), abs=1.1e-4)  # printed with four decimals
    assert NUMBER.sub("", outputs[0]) == NUMBER.sub("", outputs[1])


def test_unsupported_options_for_onnx_graphs(run_error, monkeypatch, graphs, transformer_folder):
    assert "whose attention cannot be recorded" in run_error("translate", graphs, "one", "--alignments")
    assert "contains ONNX graphs, which cannot be part of an ensemble" in run_error(
        "translate", transformer_folder, "one", "--ensemble", graphs
    )
    assert "contains ONNX graphs, which run only on the CPU" in run_error(
        "translate", graphs, "one", "--device", "cuda"
    )
    assert "The folder contains ONNX graphs" in run_error("look", graphs, "one", "--out", "map.png")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for command in ("translate", graphs, "one"), ("evaluate", graphs, "--data", "phrasebook"):
        message = run_error(*command)
        assert "onnxruntime is not installed. Install it with: " in message
        assert ' -m pip install "onnx>=' in message


def test_invalid_imports_and_exports(run_error, tmp_path, seq2seq_folder, transformer_folder):
    message = run_error("import", tmp_path / "none", "--out", tmp_path / "m")
    assert "no such folder or file" in message
    assert "hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir all-MiniLM-L6-v2" in message
    (tmp_path / "a folder").mkdir()
    for name in ("stories15M.bin", "tokenizer.bin"):
        (tmp_path / "a folder" / name).touch()
    remedy = f"'{tmp_path}/a folder/stories15M.bin' --tokenizer '{tmp_path}/a folder/tokenizer.bin'"
    assert f"Pass the file: regard import {remedy}" in run_error(
        "import", tmp_path / "a folder", "--out", tmp_path / "m"
    )
    assert "already contains a model" in run_error("import", tmp_path, "--out", transformer_folder)
    (tmp_path / "model.bin").write_bytes(b"\x00" * 8)
    message = run_error("import", tmp_path / "model.bin", "--out", tmp_path / "m")
    assert "the format of the file is unknown" in message
    assert "For such a checkpoint, pass --tokenizer FILE." in message
    wrong = ("import", tmp_path / "model.bin", "--tokenizer", tmp_path / "model.bin", "--out", tmp_path / "m")
    assert "model.bin" in run_error(*wrong)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "models of CTranslate2 cannot be imported" in run_error("import", tmp_path, "--out", tmp_path / "m")
    assert f"Import the model first: regard import {tmp_path} --out" in run_error("translate", tmp_path, "one")
    (tmp_path / "config.json").unlink()
    for target in ("huggingface", "ctranslate2"):
        message = run_error("export", seq2seq_folder, "--to", target, "--out", tmp_path / "out")
        assert "recurrent" in message or "seq2seq" in message
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "m").exists()
