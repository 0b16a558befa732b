"""A task and a head of one's own: this file and one entry for each. Everything else works with them unchanged."""

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

import regard
from regard.cli import main
from regard.errors import RegardError
from regard.evaluation.evaluators import EvaluationOptions, measure_head
from regard.interop import export_huggingface, export_onnx
from regard.interop.onnx_runner import load_onnx
from regard.models import register_head
from regard.models.bert import TEXT_HEADS, TextLabelHead
from regard.pipelines import TextEncoder
from regard.serve.registry import ModelRegistry
from regard.training import register_task
from regard.training.tasks import TASKS
from regard.training.tasks.classify import ClassifyTask
from tests.serve.conftest import run_in_thread
from tests.training.toy_tasks import sentences, write_text

TEXT = "the cat sees the dog"


class AnimalHead(TextLabelHead):
    """The last animal of a sentence."""


class AnimalTask(ClassifyTask):
    """Classification of sentences by their last word."""

    head: ClassVar = {"head": "animal"}


def measure_animals(head: AnimalHead, encoder: TextEncoder, files: Any, options: EvaluationOptions) -> dict[str, Any]:
    """The share of texts whose predicted animal is in the text."""
    texts = [line.split("\t")[0] for file in files for line in Path(file).read_text().splitlines()]
    found = [result.label in text for text, result in zip(texts, encoder.classify(texts))]
    return {"mentioned": 100 * sum(found) / len(found)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A model that was trained for the task."""
    parent = tmp_path_factory.mktemp("animals")
    with pytest.MonkeyPatch.context() as patch:
        # Entries of the test are removed after it.
        patch.setitem(TEXT_HEADS, "animal", AnimalHead())
        patch.setitem(TASKS, "animals", AnimalTask())
        register_head("animal", AnimalHead())
        register_task("animals", AnimalTask())
        measure_head.register(AnimalHead, measure_animals)
        data = write_text(parent / "data.tsv", [f"{text}\t{text.split()[-1]}" for text in sentences(200)])
        model: dict[str, Any] = dict(width=16, heads=2, layers=1, feedforward=32, max_len=32)
        regard.train(data, out=parent / "model", task="animals", steps=8, workers=1, device="cpu", quiet=True, **model)
        yield parent / "model"


@pytest.fixture
def encoder(folder: Path) -> TextEncoder:
    return regard.load(folder, "cpu", expect=TextEncoder)


def test_model_is_loaded_and_fine_tuned(folder, encoder, tmp_path):
    assert type(encoder.head) is AnimalHead
    assert encoder.abilities == ("embed", "classify")
    encoder.save(tmp_path / "copy")
    copy = regard.load(tmp_path / "copy", "cpu")
    assert copy.classify([TEXT]) == encoder.classify([TEXT])
    data = str(folder.parent / "data.tsv")
    options: dict[str, Any] = dict(task="animals", start_from=folder, steps=2, workers=1, device="cpu", quiet=True)
    tuned = regard.train(data, out=tmp_path / "tuned", **options)
    assert tuned.model.config.head == "animal"


def test_evaluation_uses_the_function_of_the_head(folder, encoder, capsys):
    data = folder.parent / "data.tsv"
    assert regard.evaluate(encoder, data).keys() == {"data", "mentioned"}
    assert main(["evaluate", str(folder), "--data", str(data), "--quiet"]) == 0
    assert "mentioned" in capsys.readouterr().out


def test_commands_describe_and_run_the_model(folder, encoder, capsys):
    assert main(["info", str(folder)]) == 0
    assert re.search(r"^ +head +animal$", capsys.readouterr().out, re.MULTILINE)
    assert main(["classify", str(folder), TEXT]) == 0
    assert capsys.readouterr().out.split()[0] == encoder.classify(TEXT).label


def test_viewer_shows_the_label_and_its_trace(encoder, tmp_path):
    seen = regard.look(encoder, TEXT)
    seen.save(tmp_path / "page.html", trace=True, with_model=True)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    # The model in the page computes it like a classifier.
    assert '"head":"classify"' in page
    assert set(encoder.model.config.labels) <= set(re.findall(r"\w+", page))
    assert seen.attribution().tokens == [encoder.classify(TEXT).label]
    regard.compare(seen, regard.look(encoder, "the dog sees the cat")).save(tmp_path / "comparison.html")


def test_server_classifies_and_shows_attention(folder, encoder):
    registry = ModelRegistry([folder], device="cpu")
    with run_in_thread(registry) as server:
        (listed,) = server.request("/v1/models")[1]["data"]
        assert listed["tasks"] == ["embed", "classify", "attention"]
        (result,) = server.post("/api/classify", {"texts": [TEXT]})["results"]
        assert result["label"] == encoder.classify(TEXT).label
        assert server.post("/api/attention", {"text": TEXT, "format": "arrays"})["maps"]


def test_exports_run_it_or_say_why_not(encoder, tmp_path):
    pytest.importorskip("onnxruntime")
    export_onnx(encoder, tmp_path / "graphs")
    assert load_onnx(tmp_path / "graphs").classify(TEXT).label == encoder.classify(TEXT).label
    with pytest.raises(RegardError, match="has the head 'animal'"):
        export_huggingface(encoder, tmp_path / "exported")
