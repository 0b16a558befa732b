"""Inputs longer than those of training: models whose positions extrapolate run on them, and warn once."""

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
from regard.models.lengths import length_limit
from regard.pipelines import LanguageModel, TextEncoder, Translator
from regard.viewer import look

WORDS = "one two three four five six"
LONG = "one two three " * 10
SIZES = dict(width=16, heads=2, feedforward=32, max_len=12, dropout=0.0)
STACK = SIZES | {"layers": 1}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1}
EXTRAPOLATING = ("sinusoidal", "rotary", "relative", "none")


def translator_of(config) -> Translator:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([WORDS], "word")
    size = tokenizer.vocab_size
    model = make_model(dataclasses.replace(config, source_vocab=size, target_vocab=size, shared_vocab=True))
    return Translator(model.eval(), tokenizer, tokenizer)


def writer_of(**changes) -> LanguageModel:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["abcdefgh "], "char", exact=True)
    return LanguageModel(GPT(GPTConfig(**STACK, vocab=tokenizer.vocab_size, **changes)).eval(), tokenizer)


def encoder_of(head: str, **changes) -> TextEncoder:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([WORDS], "word", mask=True)
    needed = {"labels": ("even", "odd"), "pooler": "tanh"} if head == "classify" else {}
    config = BertConfig(**STACK, vocab=tokenizer.vocab_size, head=head, **needed, **changes)
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
def test_only_tables_limit_the_length(config, limit):
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
def test_a_translator_reads_more_than_in_training(config, warnings):
    translator = translator_of(config)
    source, target = translator.source_ids(LONG), translator.target_ids(LONG)
    assert (len(source), len(target)) == (31, 30)
    assert translator.model(*translator.teacher_forced([(source, target)])).shape[0] == 31
    [score] = translator.score([(LONG, LONG)])
    assert score.tokens == 31
    assert np.isfinite(score.logprob)
    config = DecodeConfig(method="greedy", min_len=20, max_len=20)
    [[found]] = translator.translate([LONG], config)
    assert len(found.hypothesis.ids) == 20
    assert warnings() == [
        "Warning: a text is longer than the 12 tokens that the model was trained on; quality may be lower."
    ]


def test_translations_alone_can_be_longer_than_in_training(warnings):
    translator = translator_of(TransformerConfig(**SIZES, **LAYERS))
    translator.translate(["one"], DecodeConfig(method="greedy", min_len=11, max_len=11))
    assert warnings() == []
    translator.translate(["one"], DecodeConfig(method="greedy", min_len=12, max_len=12))
    assert len(warnings()) == 1


def test_a_long_sentence_of_a_split_line_is_translated_whole():
    translator = translator_of(TransformerConfig(**SIZES, **LAYERS))
    lines = translator.sentences("one two. 3 " + "four " * 20, "auto")
    assert len(lines) == 2
    assert len(translator.source_ids(lines[1])) > 12
    assert translator.translate("one two. 3 " + "four " * 20, split="auto")


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal", "none"])
def test_a_language_model_reads_and_writes_more_than_in_training(positions, warnings):
    writer = writer_of(positions=positions)
    [[found]] = writer.generate(["abcdefgh" * 2], DecodeConfig(method="greedy", min_len=9, max_len=9))
    assert len(found.hypothesis.ids) == 9
    assert writer.score(["abcdefgh" * 2])[0].tokens == 17
    assert len(warnings()) == 1


@torch.no_grad()
def test_what_is_written_beyond_the_trained_length_is_what_reading_gives(warnings):
    writer = writer_of()
    [[found]] = writer.generate(["abc"], DecodeConfig(method="greedy", min_len=20, max_len=20))
    ids = [*writer.prompt_ids("abc"), *found.hypothesis.ids]
    rows = writer.model(writer.packed([ids])).log_softmax(-1)[3:-1]
    by_hand = rows.gather(1, torch.tensor(found.hypothesis.ids)[:, None]).squeeze(1)
    assert found.hypothesis.token_logprobs[:20] == pytest.approx(by_hand.tolist(), abs=1e-4)
    assert len(warnings()) == 1


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal", "none"])
def test_an_encoder_reads_more_than_in_training(positions, warnings):
    critic = encoder_of("classify", positions=positions)
    assert critic.classify([LONG, (LONG, "two")])[0].label in ("even", "odd")
    assert critic.embed([LONG, "one"]).shape == (2, 16)
    assert len(encoder_of("mask", positions=positions).fill("<mask> " + LONG, count=2)[0]) == 2
    reader = encoder_of("answer", positions=positions)
    assert isinstance(reader.answer(Question("1", "one", LONG)), str)
    assert len(warnings()) == 2  # two models: the reader reads long contexts in pieces


def test_looking_at_more_than_in_training():
    translator = translator_of(TransformerConfig(**SIZES, **LAYERS, positions="rotary"))
    seen = look(translator, LONG, LONG)
    assert seen.maps["decoder.0.cross"].weights.shape[-2:] == (31, 31)


@pytest.mark.parametrize("changes", [{"positions": "learned"}, {"cross_score": "location"}])
def test_tables_refuse_what_is_longer(changes):
    translator = translator_of(TransformerConfig(**SIZES, **LAYERS, **changes))
    with pytest.raises(RegardError, match="line 1 has 30 tokens, and the model takes at most 11"):
        translator.translate([LONG])
    assert translator.translate([LONG], truncate=True)


def test_truncate_cuts_to_the_trained_length(warnings):
    translator = translator_of(TransformerConfig(**SIZES, **LAYERS))
    assert len(translator.source_ids(LONG, truncate=True)) == 12
    assert len(writer_of().prompt_ids("abcdefgh" * 2, truncate=True)) == 12
    assert warnings() == []
