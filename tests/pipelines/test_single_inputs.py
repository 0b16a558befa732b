"""A single text, instead of a list of texts, has a single answer; long lines are split into sentences."""

import dataclasses

import numpy as np
import pytest
import torch

from regard.data import Question, Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models import GPT, Bert, GPTConfig
from regard.models.bert import BertConfig
from regard.pipelines import LanguageModel, TextEncoder

SAMPLE = DecodeConfig(method="sample", seed=3, max_len=8)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["one two three four five six"], "word", mask=True)


@pytest.fixture(scope="module")
def writer(tokenizer):
    torch.manual_seed(0)
    config = GPTConfig(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=16)
    return LanguageModel(GPT(config).eval(), tokenizer)


def encoder_with(tokenizer, head):
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=16)
    labels = ("no", "yes") if head == "classify" else ()
    return TextEncoder(Bert(BertConfig(**sizes, head=head, labels=labels, pooler="tanh")).eval(), tokenizer)


def test_translate(seq2seq):
    (best,) = seq2seq.translate("one two three")
    assert best == seq2seq.translate(["one two three"])[0][0]
    assert best.text == seq2seq("one two three") == "trois deux un"
    assert seq2seq.translate("")[0].text == ""
    assert len(seq2seq.translate("one two", DecodeConfig(beam=3, n_best=2))) == 2


def test_score(seq2seq, writer):
    assert seq2seq.score(("one", "un")) == seq2seq.score([("one", "un")])[0]
    assert seq2seq.score((("one", "un"), ("two", "deux"))) == seq2seq.score([("one", "un"), ("two", "deux")])
    with pytest.raises(RegardError, match=r"A score is that of a pair: source and target\."):
        seq2seq.score("one")
    assert writer.score("one two") == writer.score(["one two"])[0]


def test_generate(writer):
    assert writer.generate("one two", SAMPLE) == writer.generate(["one two"], SAMPLE)[0]
    assert writer.evaluate("one two") == writer.evaluate(["one two"])


def test_encoders(tokenizer):
    encoder = encoder_with(tokenizer, "classify")
    assert encoder.classify("one two") == encoder.classify(["one two"])[0]
    assert np.array_equal(encoder.embed("one two"), encoder.embed(["one two"])[0])
    reader = encoder_with(tokenizer, "answer")
    question = Question("1", "one", "two three four")
    assert reader.answer(question) == reader.answer([question])[0]
    with pytest.raises(RegardError, match=r"A question comes with its context\. Give Question"):
        reader.answer("one?")


# Sentences. The models of these tests take 15 words, and their language has no capitals.

LONG = "one two three. 1 " * 6  # six sentences, of five tokens each, and too long as a whole


def test_a_line_that_is_too_long_is_split(seq2seq):
    sentences = seq2seq.sentences(LONG, "auto")
    assert sentences == ["one two three."] + ["1 one two three."] * 5 + ["1"]
    (found,) = seq2seq.translate(LONG, split="auto")
    parts = [answer[0] for answer in seq2seq.translate(sentences)]
    assert found.text == " ".join(part.text for part in parts)
    assert found.hypothesis.ids == [token for part in parts for token in part.hypothesis.ids]
    assert found.hypothesis.logprob == pytest.approx(sum(part.hypothesis.logprob for part in parts))
    assert seq2seq(LONG) == found.text


def test_what_fits_is_not_split_unless_asked_for(seq2seq):
    line = "one two. 3 four"
    assert seq2seq.sentences(line, "auto") == seq2seq.sentences(line, "never") == [line]
    assert seq2seq.sentences(line, "always") == ["one two.", "3 four"]
    assert seq2seq.translate([line], split="auto") == seq2seq.translate([line])
    always = seq2seq.translate([line, "", "five"], split="always")
    assert [len(answer) for answer in always] == [1, 1, 1]
    assert always[1][0].text == ""


def test_a_sentence_that_is_too_long_is_an_error_that_names_its_line(learned):
    lines = ["one", "two. 3 " + "four " * 20]
    with pytest.raises(RegardError, match=r"^line 2 has 21 tokens"):
        learned.translate(lines, split="auto")
    assert len(learned.translate(lines, split="auto", truncate=True)) == 2


def test_a_prefix_begins_the_line(seq2seq):
    (found,) = seq2seq.translate([LONG], prefixes=["neuf"], split="auto")
    assert found[0].text.startswith("neuf")
    assert found[0].text.count("neuf") == 1


def test_several_hypotheses_are_not_joined(seq2seq):
    config = DecodeConfig(beam=3, n_best=2)
    assert len(seq2seq.translate(["one. 2 two"], config, split="auto")[0]) == 2
    with pytest.raises(RegardError, match=r"joined for one translation per line\. Leave out n_best"):
        seq2seq.translate(["one. 2 two"], config, split="always")


def test_samples_depend_on_the_line_and_not_on_the_block(seq2seq):
    lines = ["one two three", "four five", LONG, "six one", "one two three"]
    config = dataclasses.replace(SAMPLE, temperature=3.0)
    whole = [answer[0].text for answer in seq2seq.translate(lines, config, split="auto")]
    parts = [
        answer[0].text
        for begin, end in ((0, 3), (3, 4), (4, 5))
        for answer in seq2seq.translate(lines[begin:end], config, split="auto", first=begin)
    ]
    assert whole == parts
    assert whole[0] != whole[4]
