"""`regard import` and `regard export`, as a user calls them."""

import json
import sys

import pytest

from regard.cli import main
from regard.folder import load

LINES = ["one two three", "four five", "nine"]


def translations(folder) -> list[str]:
    return [answer[0].text for answer in load(folder, "cpu").translate(LINES)]


def test_out_to_hugging_face_and_back(tmp_path, transformer_folder, capsys):
    assert main(["export", str(transformer_folder), "--to", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert "opens in transformers as" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    assert "A translator of" in capsys.readouterr().err
    assert translations(tmp_path / "back") == translations(transformer_folder)


def test_out_to_the_runners(tmp_path, transformer_folder):
    for program, file in (("ctranslate2", "model.bin"), ("onnx", "encoder.onnx")):
        assert main(["export", str(transformer_folder), "--to", program, "--out", str(tmp_path / program)]) == 0
        assert (tmp_path / program / file).exists()


@pytest.fixture(scope="module")
def graphs(tmp_path_factory, transformer_folder):
    folder = tmp_path_factory.mktemp("graphs") / "onnx"
    assert main(["export", str(transformer_folder), "--to", "onnx", "--out", str(folder)]) == 0
    return folder


def test_graphs_are_run_as_models_are(tmp_path, graphs, transformer_folder, capsys):
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\tdeux trois un\n" for line in LINES))
    (tmp_path / "links").write_text("0-0\n" * len(LINES))
    data = ["--data", str(tmp_path / "pairs.tsv")]
    capsys.readouterr()
    printed, measured = [], []
    for folder in map(str, (transformer_folder, graphs)):
        assert main(["translate", folder, *LINES, "--n-best", "2", "--device", "cpu"]) == 0
        assert main(["score", folder, *data]) == 0
        printed.append(capsys.readouterr().out.split())
        gold = ["--alignments", str(tmp_path / "links"), "--json", str(tmp_path / "r.json")]
        assert main(["evaluate", folder, *data, *gold]) == 0
        measured.append(json.loads((tmp_path / "r.json").read_text()))
        capsys.readouterr()
    assert len(printed[0]) == len(printed[1]) > 20
    for one, other in zip(*printed):
        assert one == other or float(one) == pytest.approx(float(other), abs=2e-4)
    own, other = measured
    assert own.keys() - other.keys() == {"alignment_error_rate", "alignment_layer"}
    assert (other["bleu"], other["loss"]) == pytest.approx((own["bleu"], own["loss"]), abs=1e-4)


def test_what_graphs_cannot_do(refused, monkeypatch, graphs, transformer_folder):
    assert "whose attention cannot be recorded" in refused("translate", graphs, "one", "--alignments")
    assert "holds ONNX graphs, which cannot be part of an ensemble" in refused(
        "translate", transformer_folder, "one", "--ensemble", graphs
    )
    assert "holds ONNX graphs, which run on CPUs" in refused("translate", graphs, "one", "--device", "cuda")
    assert "The folder holds ONNX graphs" in refused("look", graphs, "one", "--out", "map.png")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for command in ("translate", graphs, "one"), ("evaluate", graphs, "--data", "phrasebook"):
        assert 'onnxruntime is not installed. Get it with: pip install "regard[onnx]"' in refused(*command)


def test_what_cannot_be_is_said(refused, tmp_path, seq2seq_folder, transformer_folder):
    assert "there is no such folder" in refused("import", tmp_path / "none", "--out", tmp_path / "m")
    assert "holds a model already" in refused("import", tmp_path, "--out", transformer_folder)
    (tmp_path / "model.bin").write_bytes(b"\x00" * 8)
    assert "Give --tokenizer FILE" in refused("import", tmp_path / "model.bin", "--out", tmp_path / "m")
    wrong = ("import", tmp_path / "model.bin", "--tokenizer", tmp_path / "model.bin", "--out", tmp_path / "m")
    assert "model.bin" in refused(*wrong)
    for program in ("huggingface", "ctranslate2"):
        said = refused("export", seq2seq_folder, "--to", program, "--out", tmp_path / "out")
        assert "recurrent" in said or "seq2seq" in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "m").exists()
