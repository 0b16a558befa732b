"""Inputs beyond the trained length: models whose positions extrapolate run on them and warn once."""

import dataclasses
import logging

import numpy as np
import pytest
import torch

from regard.data import Tokenizer
from regard.data.text.questions import Question
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models import GPT, Bert, BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.models.config_checks import length_limit
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.viewer import look

WORDS = "one two three four five six"
LONG = "one two three " * 10
SIZES = dict(width=16, heads=2, feedforward=32, max_len=12, dropout=0.0)
STACK = SIZES | {"layers": 1}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1}
EXTRAPOLATING = ("sinusoidal", "rotary", "relative", "none")


def make_translator(config) -> Translator:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([WORDS], "word")
    size = tokenizer.vocab_size
    model = make_model(dataclasses.replace(config, source_vocab=size, target_vocab=size, shared_vocab=True))
    return Translator(model.eval(), tokenizer, tokenizer)


def make_generator(**changes) -> TextGenerator:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["abcdefgh "], "char", exact=True)
    return TextGenerator(GPT(GPTConfig(**STACK, vocab=tokenizer.vocab_size, **changes)).eval(), tokenizer)


def make_encoder(head: str, **changes) -> TextEncoder:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([WORDS], "word", mask=True)
    head_options = {"labels": ("even", "odd"), "pooler": "tanh"} if head == "classify" else {}
    config = BertConfig(**STACK, vocab=tokenizer.vocab_size, head=head, **head_options, **changes)
    return TextEncoder(Bert(config).eval(), tokenizer)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "regard")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (TransformerConfig(), None),
        *((TransformerConfig(positions=kind), None) for kind in EXTRAPOLATING),
        (TransformerConfig(positions="learned"), 256),
        (TransformerConfig(cross_score="location"), 256),
        (GPTConfig(), None),
        (GPTConfig(score="location"), 256),
        (BertConfig(), 512),
        (BertConfig(positions="none"), None),
        (Seq2SeqConfig(), None),
        (Seq2SeqConfig(score="location"), 256),
        (Seq2SeqConfig(score="location", attention="none"), None),
    ],
)
def test_only_learned_tables_limit_the_length(config, limit):
    assert length_limit(config) == limit


@pytest.mark.parametrize(
    "config",
    [
        *(TransformerConfig(**SIZES, **LAYERS, positions=kind) for kind in EXTRAPOLATING),
        Seq2SeqConfig(width=16, max_len=12),
        Seq2SeqConfig(width=16, max_len=12, attention="none"),
    ],
    ids=lambda config: getattr(config, "positions", getattr(config, "attention", "")),
)
@torch.no_grad()
def test_translator_runs_beyond_the_trained_length(config, warnings):
    translator = make_translator(config)
    source, target = translator.encode_source(LONG), translator.encode_target(LONG)
    assert (len(source), len(target)) == (31, 30)
    assert translator.model(*translator.teacher_forced([(source, target)])).shape[0] == 31
    [score] = translator.score([(LONG, LONG)])
    assert score.tokens == 31
    assert np.isfinite(score.logprob)
    config = DecodeConfig(method="greedy", min_len=20, max_len=20)
    [[result]] = translator.translate([LONG], config)
    assert len(result.hypothesis.ids) == 20
    assert warnings() == ["Warning: a text exceeds the maximum training length of 12 tokens; quality may be lower."]


def test_translation_beyond_the_trained_length_warns(warnings):
    translator = make_translator(TransformerConfig(**SIZES, **LAYERS))
    translator.translate(["one"], DecodeConfig(method="greedy", min_len=11, max_len=11))
    assert warnings() == []
    translator.translate(["one"], DecodeConfig(method="greedy", min_len=12, max_len=12))
    assert len(warnings()) == 1


def test_long_sentence_of_a_split_line_is_not_truncated():
    translator = make_translator(TransformerConfig(**SIZES, **LAYERS))
    lines = [text for text, _ in translator._encode_sentences(["one two. 3 " + "four " * 20], ["auto"])[0]]
    assert len(lines) == 2
    assert len(translator.encode_source(lines[1])) > 12
    assert translator.translate("one two. 3 " + "four " * 20, split="auto")


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal", "none"])
def test_language_model_runs_beyond_the_trained_length(positions, warnings):
    generator = make_generator(positions=positions)
    [[result]] = generator.generate(["abcdefgh" * 2], DecodeConfig(method="greedy", min_len=9, max_len=9))
    assert len(result.hypothesis.ids) == 9
    assert generator.score(["abcdefgh" * 2])[0].tokens == 17
    assert len(warnings()) == 1


@torch.no_grad()
def test_generation_beyond_the_trained_length_matches_the_forward_pass(warnings):
    generator = make_generator()
    [[result]] = generator.generate(["abc"], DecodeConfig(method="greedy", min_len=20, max_len=20))
    ids = [*generator.encode_prompt("abc"), *result.hypothesis.ids]
    rows = generator.model(generator.pack([ids])).log_softmax(-1)[3:-1]
    expected = rows.gather(1, torch.tensor(result.hypothesis.ids)[:, None]).squeeze(1)
    assert result.hypothesis.token_logprobs[:20] == pytest.approx(expected.tolist(), abs=1e-4)
    assert len(warnings()) == 1


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal", "none"])
def test_encoder_runs_beyond_the_trained_length(positions, warnings):
    classifier = make_encoder("classify", positions=positions)
    assert classifier.classify([LONG, (LONG, "two")])[0].label in ("even", "odd")
    assert classifier.embed([LONG, "one"]).shape == (2, 16)
    assert len(make_encoder("mask", positions=positions).fill("<mask> " + LONG, count=2)[0]) == 2
    answerer = make_encoder("answer", positions=positions)
    assert isinstance(answerer.answer(Question("1", "one", LONG)), str)
    assert len(warnings()) == 2  # two models: question answering splits long contexts


def test_look_beyond_the_trained_length():
    translator = make_translator(TransformerConfig(**SIZES, **LAYERS, positions="rotary"))
    result = look(translator, LONG, LONG)
    assert result.maps["decoder.0.cross"].weights.shape[-2:] == (31, 31)


@pytest.mark.parametrize("changes", [{"positions": "learned"}, {"cross_score": "location"}])
def test_learned_tables_raise_beyond_their_length(changes):
    translator = make_translator(TransformerConfig(**SIZES, **LAYERS, **changes))
    with pytest.raises(RegardError, match="line 1 has 30 tokens; the model supports at most 11"):
        translator.translate([LONG])
    assert translator.translate([LONG], truncate=True)


def test_truncate_cuts_to_the_trained_length(warnings):
    translator = make_translator(TransformerConfig(**SIZES, **LAYERS))
    assert len(translator.encode_source(LONG, truncate=True)) == 12
    assert len(make_generator().encode_prompt("abcdefgh" * 2, truncate=True)) == 12
    assert warnings() == []
