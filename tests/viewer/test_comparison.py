"""Comparisons of looks: labels, differences, scenes, and requests of their pages."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import regard
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.models import GPT, GPTConfig
from regard.pipelines import TextGenerator
from regard.viewer import Comparison, compare, look
from regard.viewer.comparison import ComparisonRequestHandler
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.page.text_scene import build_scene
from tests.viewer.text_models import make_pipeline

SOURCE, TARGET = "one two three", "trois deux un"


@pytest.fixture(scope="module")
def models(transformer, seq2seq):
    return look(transformer, SOURCE, TARGET, name="transformer"), look(seq2seq, SOURCE, TARGET, name="recurrent")


@pytest.fixture(scope="module")
def sentences(transformer):
    return look(transformer, "one two", name="numbers"), look(transformer, "two one three", name="numbers")


def with_steps(seen, *steps):
    """Copies of a look, as from checkpoints of these steps."""
    pipelines = [dataclasses.replace(seen.pipeline, training={"step": step}) for step in steps]
    return [dataclasses.replace(seen, name="", pipeline=pipeline) for pipeline in pipelines]


def test_default_labels_are_what_differs(models, sentences):
    assert compare(*models).labels == ("transformer", "recurrent")
    assert compare(*sentences).labels == ("one two", "two one three")
    assert compare(*with_steps(models[0], 0, 500, 1000)).labels == ("step 0", "step 500", "step 1000")
    assert compare(models[0], models[0]).labels == ("1", "2")
    assert compare(*models, labels=["big", "small"]).labels == ("big", "small")
    assert repr(regard.compare(*models)) == "Comparison('transformer', 'recurrent')"


def test_invalid_comparisons_raise_errors(models):
    for looks, labels, message in (
        (models[:1], None, "at least two looks"),
        ((models[0], "two"), None, "Only looks at texts"),
        (models, ["a"], "2 looks and 1 labels"),
    ):
        with pytest.raises(RegardError, match=message):
            compare(*looks, labels=labels)


def test_difference_of_two_heads(models, transformer):
    assert np.all(compare(models[0], look(transformer, SOURCE, TARGET)).difference("decoder.0.cross", 1) == 0)
    first, second = look(transformer, SOURCE, TARGET), look(transformer, "two two three", TARGET)
    same_tokens = compare(first, dataclasses.replace(second, maps=with_axes_of(first, second)))
    found = same_tokens.difference("decoder.0.cross", 1)
    expected = first.maps["decoder.0.cross"].weights[1] - second.maps["decoder.0.cross"].weights[1]
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found).max() > 0
    np.testing.assert_array_equal(same_tokens.difference("decoder.0.cross", 1, first=1, second=0), -expected)
    named = same_tokens.looks[-1].alignment.name
    np.testing.assert_array_equal(same_tokens.difference(), same_tokens.difference(named))
    with pytest.raises(RegardError, match="do not have the same tokens"):
        compare(first, second).difference("decoder.0.cross")


def with_axes_of(first, second):
    """The maps of the second look with the axes of the first."""
    return {
        name: dataclasses.replace(one, queries=first.maps[name].queries, keys=first.maps[name].keys)
        for name, one in second.maps.items()
    }


def test_scene_contains_every_look(models):
    made = compare(*models).scene()
    one, other = (build_scene(seen) for seen in models)
    assert json.loads(json.dumps(made.header)) == made.header
    first, second = made.header["compared"]
    # Next to the given translation, the page names that of the model itself.
    own = models[0].pipeline(SOURCE)
    assert first == {"label": "transformer", "texts": {"source": SOURCE, "target": TARGET}, "own_output": own}
    assert made.header["sides"] == one.header["sides"]
    assert second["label"] == "recurrent"
    assert second["sides"] == other.header["sides"]
    assert made.header["texts"] == {"source": SOURCE, "target": TARGET}
    assert made.header["model"] == {"family": "", "name": "", "regard": regard.__version__}
    for found, expected in ((made.header["attentions"], one), (second["attentions"], other)):
        assert [attention["name"] for attention in found] == [
            attention["name"] for attention in expected.header["attentions"]
        ]
        for one_header, other_header in zip(found, expected.header["attentions"]):
            for part in ("q", "k", "w"):
                if other_header[part]:
                    assert made.blobs[one_header[part]["at"]] == expected.blobs[other_header[part]["at"]]


def test_title_of_different_sentences(sentences):
    made = compare(*sentences).scene()
    assert made.header["title"] == "one two | two one three"
    assert made.header["texts"] == {"source": "", "target": ""}
    assert made.header["compared"][1]["texts"]["source"] == "two one three"
    assert made.header["model"]["name"] == "numbers"


def test_many_looks_share_the_size_limit_of_exact_numbers(models, monkeypatch):
    few, many = compare(*models), compare(*models * 3)
    monkeypatch.setattr(
        "regard.viewer.page.text_scene.MAX_EXACT_BYTES", 2 * sum(map(len, build_scene(models[0], trace=False).blobs))
    )
    assert few.scene().header["attentions"][0]["q"]["type"] == "float32"
    assert many.scene().header["attentions"][0]["q"]["type"] == "uint16"


def test_save_writes_pages_and_plots(models, tmp_path):
    both = compare(*models, labels=["<b>$x$", "other"])
    both.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "\\u003cb\\u003e$x$" in page
    assert "<b>$x$" not in page
    cross = compare(*with_steps(models[0], 1, 2, 3, 4, 5))
    cross.save(tmp_path / "steps.png", "decoder.0.cross", 1)
    cross.save(tmp_path / "steps.svg")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert "step 5" in (tmp_path / "steps.svg").read_text(encoding="utf-8")
    assert cross._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(RegardError, match=r"pages are \.html"):
        both.save(tmp_path / "page.txt")
    with pytest.raises(RegardError, match="no attention 'nowhere'"):
        both.save(tmp_path / "page.html", "nowhere")


def test_handler_runs_all_models_on_one_sentence(models, transformer, seq2seq):
    handler = compare(*models).handler
    assert handler.fields == ["source", "target"]
    header, blobs = handler.handle({"look": {"source": "four five", "target": "cinq quatre"}})
    expected = compare(
        look(transformer, "four five", "cinq quatre"), look(seq2seq, "four five", "cinq quatre"),
        labels=["transformer", "recurrent"],
    ).scene()  # fmt: skip
    assert header["scene"]["compared"] == expected.header["compared"]
    assert blobs == expected.blobs


def test_handler_runs_one_model_on_two_sentences(sentences):
    handler = compare(*sentences).handler
    assert handler.fields == ["source", "beside"]
    header, _ = handler.handle({"look": {"source": "four five", "beside": "five four six"}})
    assert [one["label"] for one in header["scene"]["compared"]] == ["four five", "five four six"]
    header, _ = handler.handle({"look": {"source": "four five", "beside": " "}})
    assert [one["label"] for one in header["scene"]["compared"]] == ["four five", "four five"]
    with pytest.raises(RegardError, match="Invalid request to look"):
        handler.handle({"look": {"source": "four", "target": "quatre"}})


def test_looks_without_models_have_no_handler(models, sentences):
    assert compare(models[0], dataclasses.replace(models[1], pipeline=None)).handler is None
    assert compare(models[0], sentences[1]).handler is not None
    assert compare(*sentences, models[0]).handler is None


def test_last_model_of_a_run_provides_the_target(transformer, seq2seq):
    models = [lambda: seq2seq, lambda: transformer]
    handler = ComparisonRequestHandler(
        transformer, models=models, labels=["step 0", "step 9"], share_last_translation=True
    )
    assert isinstance(handler, TextRequestHandler)
    both = handler.compare({"source": SOURCE})
    assert isinstance(both, Comparison)
    assert {one.translation for one in both.looks} == {look(transformer, SOURCE).translation}
    assert [one.pipeline for one in both.looks] == [None, None]
    assert {one.translation for one in handler.compare({"source": SOURCE, "target": "un"}).looks} == {"un"}


def test_widget_contains_the_comparison(models):
    both = compare(*models)
    widget = both.widget()
    assert widget is both.widget()
    assert widget.scene == both.scene().header
    assert widget.fields == ["source", "target"]
    data, _ = both._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id


def test_language_models_of_different_depths(tmp_path):
    """Two language models of different depths on one text have the same tokens, so their maps can be subtracted."""
    tokenizer = Tokenizer.train(["a cat sleeps"], "char")
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, feedforward=16, vocab=tokenizer.vocab_size)
    one, other = (
        TextGenerator(GPT(GPTConfig(layers=layers, **sizes)).eval(), tokenizer, {"step": layers}) for layers in (1, 2)
    )
    both = compare(look(one, "a cat"), look(other, "a cat"))
    assert both.labels == ("step 1", "step 2")
    assert both.difference("blocks.0.attention", 0).shape == (6, 6)
    assert both.scene().header["texts"] == {"source": "a cat", "target": ""}
    assert both.handler.fields == ["source"]
    with pytest.raises(RegardError, match=r"no attention 'blocks\.1\.attention'"):
        both.difference("blocks.1.attention")


def test_similarity_of_two_embedded_texts():
    encoder = make_pipeline("embed")
    both = compare(look(encoder, "one two"), look(encoder, "three four"))
    first, second = encoder.embed(["one two", "three four"])
    assert both.scene().header["similarity"] == pytest.approx(float(first @ second))
