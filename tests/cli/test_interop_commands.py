"""`regard import` and `regard export`, as a user calls them."""

import pytest

from regard.cli import main
from regard.folder import load

LINES = ["one two three", "four five", "nine"]


@pytest.fixture
def refused(capsys):
    def call(*argv: object) -> str:
        assert main([*map(str, argv)]) == 2
        return capsys.readouterr().err

    return call


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


def test_what_cannot_be_is_said(refused, tmp_path, seq2seq_folder, transformer_folder):
    assert "there is no such folder" in refused("import", tmp_path / "none", "--out", tmp_path / "m")
    assert "holds a model already" in refused("import", tmp_path, "--out", transformer_folder)
    (tmp_path / "model.bin").write_bytes(b"\x00" * 8)
    assert "Give --tokenizer FILE" in refused("import", tmp_path / "model.bin", "--out", tmp_path / "m")
    wrong = ("import", tmp_path / "model.bin", "--tokenizer", tmp_path / "model.bin", "--out", tmp_path / "m")
    assert "model.bin" in refused(*wrong)
    for program in ("huggingface", "ctranslate2", "onnx"):
        said = refused("export", seq2seq_folder, "--to", program, "--out", tmp_path / "out")
        assert "recurrent" in said or "seq2seq" in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "m").exists()
