"""Learning to write: the loss over a whole text, and what a model says that has learned one."""

import contextlib
import gzip
import json

import pytest
import torch

from regard.data import read_documents
from regard.data.documents import encode_documents
from regard.decode import DecodeConfig
from regard.folder import load
from regard.layers.packed import pack
from regard.training import recipe_from, train
from regard.training.tasks import TASKS
from regard.training.tasks.base import BatchShape, evaluate_loss
from tests.training.toy_tasks import toy, write_text

LANGUAGE = TASKS["language"]
# The word before must not be in the way of the next: the output layer is not the embedding.
STILL = {"dropout": 0.0, "tied": False}
LEARN = {"steps": 40, "lr": 2e-2, "label_smoothing": 0.0, "validate_every": 40, "save_every": 100}
GREEDY = DecodeConfig(method="greedy", max_len=20)


@pytest.fixture(scope="module", params=["char", "bytes"])
def abc(tmp_path_factory, request):
    """A model that knows one endless word."""
    folder = tmp_path_factory.mktemp("abc")
    tokenizer = {"kind": request.param, "vocab_size": 260}
    recipe = toy("language", folder, tokenizer=tokenizer, model=STILL, train=LEARN)
    (folder / "text.txt").write_text("abc" * 500, encoding="utf-8")
    return train(recipe, folder / "out", quiet=True)


def test_a_model_that_has_learned_a_word_goes_on_with_it(abc):
    found = abc.generate(["abcabca", "bcab", "cabcabcabc"], GREEDY)
    assert [one[0].text for one in found] == ["bcabcabcabcabcabcabc", "cabcabcabcabcabcabca", "abcabcabcabcabcabcab"]
    drawn = abc.generate(["abca"], DecodeConfig(method="sample", temperature=0.5, max_len=12, n_best=4))
    assert [one.text for one in drawn[0]] == ["bcabcabcabca"] * 4
    right, wrong = abc.score(["abcabcabc", "abcacbabc"])
    assert right.logprob > wrong.logprob + 3
    assert abc.training["validation"]["perplexity"] < 1.3


@pytest.mark.parametrize("constant", [False, True])
def test_the_loss_over_the_whole_text_is_that_of_its_tokens_one_by_one(tmp_path, constant):
    recipe = toy("language", tmp_path, train={"steps": 3, "validate_every": 3, "batch_tokens": 70})
    model = train(recipe, tmp_path / "out", quiet=True)
    dataset = LANGUAGE.read(recipe.data)
    encoded = LANGUAGE.encode(
        dataset, model.tokenizers, model.special, recipe, model.model.config, BatchShape(70, 1, constant)
    )
    assert len(encoded.validation) > 1
    ids = encode_documents(dataset.validation, model.tokenizer, model.special).tolist()
    nats = 0.0
    with torch.no_grad():
        for place in range(1, len(ids)):
            first = (place - 1) // 32 * 32  # of the piece in which it is foretold
            row = model.model(pack([ids[first:place]]))[-1]
            nats -= row.double().log_softmax(-1)[ids[place]].item()
    found = evaluate_loss(LANGUAGE, model.model, encoded.validation, contextlib.nullcontext)
    assert found["nll"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert model.training["validation"]["nll"] == pytest.approx(found["nll"], rel=1e-5)


def test_documents_of_several_files(tmp_path):
    """A plain file is one document, a line of JSON another; the last ones are set aside."""
    texts = [f"Story {i}.\n\nThe end." for i in range(9)]
    lines = [json.dumps({"text": text, "more": 1}) for text in texts]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    recipe = toy("language", tmp_path)
    files = [write_text(tmp_path / "a.txt", ["First ", "", "line"]), str(tmp_path / "b.jsonl.gz")]
    dataset = LANGUAGE.read(recipe_from({"data": {"files": files}}, recipe).data)
    assert [*dataset.training, *dataset.validation] == ["First \n\nline\n", *texts] == read_documents(files)
    assert list(dataset.validation) == texts[-1:]
    named = recipe_from({"data": {"files": files[1:], "validation": files[:1]}}, recipe)
    assert LANGUAGE.read(named.data).validation == ["First \n\nline\n"]
    assert len(LANGUAGE.read(named.data).training) == 9


def test_a_model_learns_where_documents_begin_and_end(tmp_path):
    recipe = toy("language", tmp_path, model=STILL | {"max_len": 16}, train=LEARN)
    (tmp_path / "docs.jsonl").write_text('{"text": "one"}\n' * 200, encoding="utf-8")
    recipe = recipe_from({"data": {"files": [str(tmp_path / "docs.jsonl")]}}, recipe)
    model = train(recipe, tmp_path / "out", quiet=True)
    found = model.generate(["", "o"], GREEDY)
    assert [one[0].text for one in found] == ["one", "ne"]
    assert all(one[0].hypothesis.token_logprobs[-1] > -0.1 for one in found)  # of the end


def test_a_letter_that_was_never_seen(tmp_path):
    """In validation and in prompts: unknown, and no reason to stop."""
    named = write_text(tmp_path / "validation.txt", ["the żebra sees the cat"])
    model = train(toy("language", tmp_path, data={"validation": [named]}), tmp_path / "out", quiet=True)
    assert 0 < model.training["validation"]["nll"] < 50
    assert isinstance(model("ż"), str)


@pytest.mark.parametrize("kind", ["char", "bytes"])
def test_nothing_of_a_text_is_lost(tmp_path, kind):
    text = "Où  ça?\n\n\tLà — e\u0301té \n" * 20
    recipe = toy("language", tmp_path, tokenizer={"kind": kind, "vocab_size": 300})
    (tmp_path / "text.txt").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    dataset = LANGUAGE.read(recipe.data)
    assert "".join([*dataset.training, *dataset.validation]) == text
    tokenizer, _ = LANGUAGE.make_tokenizers(dataset, recipe.tokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_going_on_keeps_the_tokeniser_and_its_letters(abc, tmp_path):
    abc.save(tmp_path / "abc")
    recipe = toy("language", tmp_path, train={"steps": 2, "validate_every": 2})
    (tmp_path / "text.txt").write_text("abcd" * 200, encoding="utf-8")
    further = train(recipe, tmp_path / "out", start_from=tmp_path / "abc", quiet=True)
    assert further.tokenizer == abc.tokenizer
    assert further.model.config == abc.model.config
    assert type(load(tmp_path / "out", "cpu")) is type(abc)


def test_words_are_written_with_their_spaces(tmp_path):
    """Words, signs and line ends are tokens; the text that comes out is spaced as the text that was learned."""
    lines = ["The cat sleeps, and the dog eats.", "L'homme dort. Don't!"]
    recipe = toy("language", tmp_path, tokenizer={"kind": "word", "vocab_size": 40}, model=STILL, train=LEARN)
    (tmp_path / "text.txt").write_text("\n".join(lines * 150) + "\n", encoding="utf-8")
    model = load(train(recipe, tmp_path / "out", quiet=True) and tmp_path / "out", "cpu")
    whole = "\n".join(lines)
    assert model.tokenizer.kind == "word"
    assert model.tokenizer.decode(model.tokenizer.encode(whole)) == whole
    told = []
    config = DecodeConfig(method="greedy", max_len=7)
    [[found]] = model.generate(["The cat"], config, hear=lambda _, text: told.append(text))
    assert found.text == " sleeps, and the dog eats."
    assert "".join(told) == found.text
    assert model.generate(["the dog eats."], config)[0][0].text == "\nL'homme dort. Don't"
    assert model.evaluate([whole]).loss < 1  # 3.0 for a uniform guess


def test_unknown_words_are_never_written(tmp_path, capsys):
    lines = [f"one word{number} two" for number in range(300)]
    recipe = toy("language", tmp_path, tokenizer={"kind": "word", "vocab_size": 7}, model=STILL, train=LEARN)
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    model = train(recipe, tmp_path / "out")
    assert "words outside of the vocabulary: " in capsys.readouterr().err
    ids = model.prompt_ids("one")
    assert int(model.model(pack([ids]))[-1].argmax()) == model.special.unk  # the likeliest by far
    for config in (GREEDY, DecodeConfig(method="sample", max_len=20), DecodeConfig(beam=2, max_len=20)):
        assert model.special.unk not in model.generate("one", config)[0].hypothesis.ids
