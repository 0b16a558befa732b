"""The task `language`: the loss over a long text, generation, documents and tokenizers."""

import contextlib
import gzip
import json

import pytest
import torch

from regard.data import read_documents
from regard.data.text.examples.documents import encode_documents
from regard.decode import DecodeConfig
from regard.layers.packed import pack
from regard.pipelines import load
from regard.training import recipe_from_dict, run_recipe
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchShape, evaluate_loss
from tests.training.toy_tasks import toy, write_text

LANGUAGE = TASKS["language"]
# Untied output layer: a tied one would favor repeating the last token in so small a model.
STILL = {"dropout": 0.0, "tied": False}
LEARN = {"steps": 40, "lr": 2e-2, "label_smoothing": 0.0, "validate_every": 40, "save_every": 100}
GREEDY = DecodeConfig(method="greedy", max_len=20)


@pytest.fixture(scope="module", params=["char", "bytes"])
def abc(tmp_path_factory, request):
    """A model trained on "abcabc…"."""
    folder = tmp_path_factory.mktemp("abc")
    tokenizer = {"kind": request.param, "vocab_size": 260}
    recipe = toy("language", folder, tokenizer=tokenizer, model=STILL, train=LEARN)
    (folder / "text.txt").write_text("abc" * 500, encoding="utf-8")
    return run_recipe(recipe, folder / "out", quiet=True)


def test_learned_pattern_is_generated(abc):
    generated = abc.generate(["abcabca", "bcab", "cabcabcabc"], GREEDY)
    assert [best[0].text for best in generated] == [
        "bcabcabcabcabcabcabc",
        "cabcabcabcabcabcabca",
        "abcabcabcabcabcabcab",
    ]
    samples = abc.generate(["abca"], DecodeConfig(method="sample", temperature=0.5, max_len=12, n_best=4))
    assert [sample.text for sample in samples[0]] == ["bcabcabcabca"] * 4
    right, wrong = abc.score(["abcabcabc", "abcacbabc"])
    assert right.logprob > wrong.logprob + 3
    assert abc.training["validation"]["perplexity"] < 1.3


@pytest.mark.parametrize("constant", [False, True])
def test_validation_loss_equals_the_loss_token_by_token(tmp_path, constant):
    recipe = toy("language", tmp_path, train={"steps": 3, "validate_every": 3, "batch_tokens": 70})
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    dataset = LANGUAGE.read(recipe.data)
    encoded = LANGUAGE.encode(
        dataset, model.tokenizers, model.special, recipe, model.model.config, BatchShape(70, 1, constant)
    )
    assert len(encoded.validation) > 1
    ids = encode_documents(dataset.validation, model.tokenizer, model.special).tolist()
    nats = 0.0
    with torch.no_grad():
        for position in range(1, len(ids)):
            first = (position - 1) // 32 * 32  # the start of its context
            row = model.model(pack([ids[first:position]]))[-1]
            nats -= row.double().log_softmax(-1)[ids[position]].item()
    scores = evaluate_loss(LANGUAGE, model.model, encoded.validation, contextlib.nullcontext)
    assert scores["nll"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert model.training["validation"]["nll"] == pytest.approx(scores["nll"], rel=1e-5)


def test_documents_are_read_from_several_files(tmp_path):
    """A plain file is one document, as is a line of JSON; the last documents are the validation split."""
    texts = [f"Story {i}.\n\nThe end." for i in range(9)]
    lines = [json.dumps({"text": text, "more": 1}) for text in texts]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    recipe = toy("language", tmp_path)
    files = [write_text(tmp_path / "a.txt", ["First ", "", "line"]), str(tmp_path / "b.jsonl.gz")]
    dataset = LANGUAGE.read(recipe_from_dict({"data": {"files": files}}, recipe).data)
    assert [*dataset.training, *dataset.validation] == ["First \n\nline\n", *texts] == read_documents(files)
    assert list(dataset.validation) == texts[-1:]
    named = recipe_from_dict({"data": {"files": files[1:], "validation": files[:1]}}, recipe)
    assert LANGUAGE.read(named.data).validation == ["First \n\nline\n"]
    assert len(LANGUAGE.read(named.data).training) == 9


def test_document_boundaries_are_learned(tmp_path):
    recipe = toy("language", tmp_path, model=STILL | {"max_len": 16}, train=LEARN)
    (tmp_path / "docs.jsonl").write_text('{"text": "one"}\n' * 200, encoding="utf-8")
    recipe = recipe_from_dict({"data": {"files": [str(tmp_path / "docs.jsonl")]}}, recipe)
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    generated = model.generate(["", "o"], GREEDY)
    assert [best[0].text for best in generated] == ["one", "ne"]
    assert all(best[0].hypothesis.token_logprobs[-1] > -0.1 for best in generated)  # the end token


def test_unseen_characters_are_unknown_tokens(tmp_path):
    """In validation and in prompts."""
    named = write_text(tmp_path / "validation.txt", ["the żebra sees the cat"])
    model = run_recipe(toy("language", tmp_path, data={"validation": [named]}), tmp_path / "out", quiet=True)
    assert 0 < model.training["validation"]["nll"] < 50
    assert isinstance(model("ż"), str)


@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_tokenizers_preserve_the_text(tmp_path, kind):
    text = "Où  ça?\n\n\tLà — e\u0301té \n" * 20
    recipe = toy("language", tmp_path, tokenizer={"kind": kind, "vocab_size": 300})
    (tmp_path / "text.txt").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    dataset = LANGUAGE.read(recipe.data)
    assert "".join([*dataset.training, *dataset.validation]) == text
    tokenizer, _ = LANGUAGE.make_tokenizers(dataset, recipe.tokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fine_tuning_keeps_the_tokenizer(abc, tmp_path):
    abc.save(tmp_path / "abc")
    recipe = toy("language", tmp_path, train={"steps": 2, "validate_every": 2})
    (tmp_path / "text.txt").write_text("abcd" * 200, encoding="utf-8")
    tuned = run_recipe(recipe, tmp_path / "out", start_from=tmp_path / "abc", quiet=True)
    assert tuned.tokenizer == abc.tokenizer
    assert tuned.model.config == abc.model.config
    assert type(load(tmp_path / "out", "cpu")) is type(abc)


def test_generated_words_have_correct_spacing(tmp_path):
    """Words, punctuation and line breaks are tokens; generated text is spaced as in the training data."""
    lines = ["The cat sleeps, and the dog eats.", "L'homme dort. Don't!"]
    recipe = toy("language", tmp_path, tokenizer={"kind": "word", "vocab_size": 40}, model=STILL, train=LEARN)
    (tmp_path / "text.txt").write_text("\n".join(lines * 150) + "\n", encoding="utf-8")
    model = load(run_recipe(recipe, tmp_path / "out", quiet=True) and tmp_path / "out", "cpu")
    text = "\n".join(lines)
    assert model.tokenizer.kind == "word"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    pieces = []
    config = DecodeConfig(method="greedy", max_len=7)
    [[output]] = model.generate(["The cat"], config, on_text=lambda _, piece: pieces.append(piece))
    assert output.text == " sleeps, and the dog eats."
    assert "".join(pieces) == output.text
    assert model.generate(["the dog eats."], config)[0][0].text == "\nL'homme dort. Don't"
    assert model.evaluate([text]).loss < 1  # 3.0 for a uniform guess


def test_unknown_words_are_never_generated(tmp_path, capsys):
    lines = [f"one word{index} two" for index in range(300)]
    recipe = toy("language", tmp_path, tokenizer={"kind": "word", "vocab_size": 7}, model=STILL, train=LEARN)
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    model = run_recipe(recipe, tmp_path / "out")
    assert "out-of-vocabulary words in validation: " in capsys.readouterr().err
    ids = model.encode_prompt("one")
    assert int(model.model(pack([ids]))[-1].argmax()) == model.special.unk  # by far the most probable
    for config in (GREEDY, DecodeConfig(method="sample", max_len=20), DecodeConfig(beam=2, max_len=20)):
        assert model.special.unk not in model.generate("one", config)[0].hypothesis.ids
