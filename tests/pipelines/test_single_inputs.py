"""Single inputs instead of lists give single results; long lines are split into sentences."""

import dataclasses

import numpy as np
import pytest
import torch

from regard.attention import record
from regard.data import Question, Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models import GPT, Bert, GPTConfig, ViT, ViTConfig
from regard.models.bert import BertConfig
from regard.pipelines import ImageModel, TextEncoder, TextGenerator
from regard.viewer import look

SAMPLE = DecodeConfig(method="sample", seed=3, max_len=8)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["one two three four five six"], "word", mask=True)


@pytest.fixture(scope="module")
def generator(tokenizer):
    torch.manual_seed(0)
    config = GPTConfig(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=16)
    return TextGenerator(GPT(config).eval(), tokenizer)


def make_encoder(tokenizer, head):
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=16)
    labels = ("no", "yes") if head == "classify" else ()
    return TextEncoder(Bert(BertConfig(**sizes, head=head, labels=labels, pooler="tanh")).eval(), tokenizer)


def test_translate_single_line(seq2seq):
    (best,) = seq2seq.translate("one two three")
    assert best == seq2seq.translate(["one two three"])[0][0]
    assert best.text == seq2seq("one two three") == "trois deux un"
    assert seq2seq.translate("")[0].text == ""
    assert len(seq2seq.translate("one two", DecodeConfig(beam=3, n_best=2))) == 2


def test_calls_with_a_list_give_a_list(seq2seq, generator, tokenizer):
    lines = ["one two", "three"]
    assert seq2seq(lines) == [seq2seq(line) for line in lines] == ["deux un", "trois"]
    assert seq2seq([]) == []
    assert generator(tuple(lines)) == [n_best[0].text for n_best in generator.generate(lines)]
    encoder, texts = make_encoder(tokenizer, "mask"), ["one <mask>", "<mask> two"]
    assert encoder.fill(texts, 2) == [encoder.fill(text, 2) for text in texts]


def test_results_in_a_cell_are_short(seq2seq, generator, tokenizer):
    """Notebooks display the value of the last line of a cell, without the recipe and the arrays inside."""
    classifier = make_encoder(tokenizer, "classify")
    images = ImageModel(ViT(ViTConfig(width=16, heads=2, layers=1, image_height=8, image_width=8, patch=4)))
    assert repr(seq2seq).splitlines() == [
        f"Translator: seq2seq of width 32, {sum(p.numel() for p in seq2seq.model.parameters()):,} parameters, on cpu",
        f"  input: word tokenizer of {seq2seq.source_tokenizer.vocab_size} entries",
        "  training: step 120, bleu 12.5",
    ]
    for pipeline in (generator, classifier, images):
        pipeline.training |= {"recipe": {"model": "x" * 3000}}
        assert len(repr(pipeline).splitlines()) <= 3
        assert len(repr(pipeline)) < 300
    assert repr(seq2seq.translate("one")[0]) == f"Translation(text='un', score={seq2seq.translate('one')[0].score!r})"
    assert "hypothesis" not in repr(generator.generate("one", SAMPLE)[0])
    with record(seq2seq.model) as recording:
        seq2seq.translate("one two")
    for short in (recording, look(seq2seq, "one two").maps, look(images, torch.zeros(3, 8, 8)).maps):
        assert "decoder.attention" in repr(short) or "blocks.0" in repr(short)
        assert "tensor" not in repr(short)
        assert len(repr(short)) < 300


def test_prefix_with_unknown_words_is_an_error(seq2seq, tmp_path):
    """The output would not begin with it."""
    with pytest.raises(RegardError, match=r"Prefix 2, 'dix trente', cannot .* lacks 'trente'"):
        seq2seq.translate(["one", "two"], prefixes=["dix", "dix trente"])
    with pytest.raises(RegardError, match="Expected one prefix per line: got 1 prefixes for 2 lines"):
        seq2seq.translate(["one", "two"], prefixes=["dix"])
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    with pytest.raises(RegardError, match=r"^The prefix, 'dix trente', cannot be generated"):
        seq2seq.translate_file(tmp_path / "in.txt", tmp_path / "out.txt", prefixes="dix trente")
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_score_single_input(seq2seq, generator):
    assert seq2seq.score(("one", "un")) == seq2seq.score([("one", "un")])[0]
    assert seq2seq.score((("one", "un"), ("two", "deux"))) == seq2seq.score([("one", "un"), ("two", "deux")])
    with pytest.raises(RegardError, match=r"score expects a pair of source and target \(got a string\)\."):
        seq2seq.score("one")
    assert generator.score("one two") == generator.score(["one two"])[0]


def test_generate_single_prompt(generator):
    assert generator.generate("one two", SAMPLE) == generator.generate(["one two"], SAMPLE)[0]
    assert generator.evaluate("one two") == generator.evaluate(["one two"])


def test_encoder_single_input(tokenizer):
    encoder = make_encoder(tokenizer, "classify")
    assert encoder.classify("one two") == encoder.classify(["one two"])[0]
    assert np.array_equal(encoder.embed("one two"), encoder.embed(["one two"])[0])
    answerer = make_encoder(tokenizer, "answer")
    question = Question("1", "one", "two three four")
    assert answerer.answer(question) == answerer.answer([question])[0]
    with pytest.raises(RegardError, match=r"A question needs its context \(got a string\)\. Pass Question"):
        answerer.answer("one?")


# Splitting into sentences. The models of these tests support 15 words and have no capital letters.

LONG = "one two three. 1 " * 6  # six sentences of five tokens each; too long in total


def split_line(translator, line, split):
    return [text for text, _ in translator._encode_sentences([line], [split])[0]]


def test_long_line_is_split_into_sentences(seq2seq):
    sentences = split_line(seq2seq, LONG, "auto")
    assert sentences == ["one two three."] + ["1 one two three."] * 5 + ["1"]
    (result,) = seq2seq.translate(LONG, split="auto")
    parts = [n_best[0] for n_best in seq2seq.translate(sentences)]
    assert result.text == " ".join(part.text for part in parts)
    assert result.hypothesis.ids == [token for part in parts for token in part.hypothesis.ids]
    assert result.hypothesis.logprob == pytest.approx(sum(part.hypothesis.logprob for part in parts))
    assert seq2seq(LONG) == result.text


def test_short_line_is_split_only_with_always(seq2seq):
    line = "one two. 3 four"
    assert split_line(seq2seq, line, "auto") == split_line(seq2seq, line, "never") == [line]
    assert split_line(seq2seq, line, "always") == ["one two.", "3 four"]
    assert seq2seq.translate([line], split="auto") == seq2seq.translate([line])
    always = seq2seq.translate([line, "", "five"], split="always")
    assert [len(n_best) for n_best in always] == [1, 1, 1]
    assert always[1][0].text == ""


def test_long_sentence_raises_with_its_line_number(learned):
    lines = ["one", "two. 3 " + "four " * 20]
    with pytest.raises(RegardError, match=r"^line 2 has 21 tokens"):
        learned.translate(lines, split="auto")
    assert len(learned.translate(lines, split="auto", truncate=True)) == 2


def test_prefix_applies_to_the_first_sentence(seq2seq):
    (result,) = seq2seq.translate([LONG], prefixes=["neuf"], split="auto")
    assert result[0].text.startswith("neuf")
    assert result[0].text.count("neuf") == 1


def test_n_best_with_split_always_raises(seq2seq):
    config = DecodeConfig(beam=3, n_best=2)
    assert len(seq2seq.translate(["one. 2 two"], config, split="auto")[0]) == 2
    with pytest.raises(RegardError, match=r"one translation per line, without search history\. Use n_best=1"):
        seq2seq.translate(["one. 2 two"], config, split="always")


def test_samples_depend_on_the_line_index_and_not_on_the_block(seq2seq):
    lines = ["one two three", "four five", LONG, "six one", "one two three"]
    config = dataclasses.replace(SAMPLE, temperature=3.0)
    one_call = [n_best[0].text for n_best in seq2seq.translate(lines, config, split="auto")]
    blocks = [
        n_best[0].text
        for begin, end in ((0, 3), (3, 4), (4, 5))
        for n_best in seq2seq.translate(lines[begin:end], config, split="auto", first_index=begin)
    ]
    assert one_call == blocks
    assert one_call[0] != one_call[4]
