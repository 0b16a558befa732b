"""Sentences that arrive while others are decoded have the results that they have alone."""

from dataclasses import replace

import pytest
import torch

from regard.decode import DecodeConfig, LexicalConstraints, Request, TokenTexts, decode_all, engine
from regard.decode.engine import LiveDecoder, round_shape
from regard.decode.slots import LiveSentence, LiveShape, needed_shape
from regard.decode.steppers import captured
from regard.models import GPT
from tests.decode.models import (
    CONFIGS,
    OPTIONS,
    VOCAB,
    assert_equal_histories,
    assert_equal_search,
    gpt,
    make_sources,
    seq2seq,
    special_options,
    with_option,
)
from tests.decode.models import transformer as make_transformer
from tests.decode.steppers import test_captured
from tests.decode.steppers.test_captured import kernels as kernels  # a fixture


def limit_of(model, source, config):
    limit = config.limit(len(source))
    return min(limit, 40 - len(source)) if isinstance(model, GPT) else limit


def decode_live(model, sources, config, arrivals, cancelled=(), special=None, phrases=None, history=False):
    """Decode sentences that arrive at these steps; returns results by index, and the streamed tokens."""
    results, tokens, indices = {}, {}, {}
    special = special or special_options(model)["special"]
    options = {"history": history, "has_phrases": phrases is not None}
    with torch.inference_mode():
        decoder = LiveDecoder(model, config, special, LiveShape(12, 40, 0), **options)
        for step in range(1000):
            for i, source in enumerate(sources):
                if arrivals[i] == step:
                    sentence = LiveSentence(
                        source,
                        limit_of(model, source, config),
                        on_result=lambda n_best, i=i: results.update({i: n_best}),
                        on_token=lambda token, i=i: tokens.setdefault(i, []).append(token),
                        random_key=(config.seed, i),
                        phrases=None if phrases is None else phrases[i],
                        on_error=lambda error, i=i: results.update({i: error}),
                    )
                    indices[i] = decoder.add(sentence)
                if i in cancelled and arrivals[i] + 2 == step:
                    decoder.cancel(indices[i])
            decoder.advance()
            if step > max(arrivals) and decoder.is_idle:
                return results, tokens, decoder
    raise AssertionError("The decoder never became idle.")


def decode_alone(model, sources, config, **options):
    options = special_options(model) | options
    return decode_all(model, Request(sources, replace(config, engine="plain"), **options))


@pytest.mark.parametrize("config", ["greedy", "beam", "samples"])
@pytest.mark.parametrize("make", [make_transformer, gpt, seq2seq])
def test_sentences_that_arrive_later_have_the_same_results(make, config, monkeypatch):
    monkeypatch.setattr(engine, "CPU_ROWS", 16)
    model, sources = make(), make_sources(14)
    arrivals = [0, 0, 1, 1, 1, 2, 3, 3, 4, 9, 9, 20, 60, 61]
    results, tokens, decoder = decode_live(model, sources, CONFIGS[config], arrivals)
    plain = decode_alone(model, sources, CONFIGS[config])
    assert_equal_search([results[i] for i in range(len(sources))], plain)
    if config == "greedy":
        assert [tokens.get(i, []) for i in range(len(sources))] == [n_best[0].ids for n_best in plain]
    assert len(decoder.decoder.sentences) == 1  # the batch shrinks when there is little to do
    assert (decoder.job.sentences, decoder.job.sources) == ({}, {})  # nothing is kept


ENGINES = {"the fastest": {}, "the model itself": {"engine": "plain"}}


@pytest.mark.parametrize("choice", ENGINES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make", [make_transformer, gpt])
def test_every_option_works_for_sentences_that_arrive_later(make, option, choice):
    if option == "coverage" and make is gpt:
        pytest.skip("a language model has no cross-attention")
    model, sources = make(), make_sources(6)
    config, options = with_option(option, model, 6, **ENGINES[choice])
    phrases, special = options.get("lexical"), options["special"]
    arrivals = [0, 0, 1, 3, 3, 20]
    results, _, _ = decode_live(model, sources, config, arrivals, (), special, phrases, options["history"])
    results, expected = [results[i] for i in range(6)], decode_alone(model, sources, config, **options)
    assert_equal_search(results, expected)
    assert_equal_histories(results, expected)
    if option == "phrases":
        assert all(300 + i in one.ids for i in (1, 3, 5) for one in results[i])


def test_a_sentence_without_output_fails_alone():
    model, config = make_transformer(), DecodeConfig(beam=1, max_len=2, suppress_sequences=((5,),))
    texts = TokenTexts([b""] * 4 + [f" {i}".encode() for i in range(4, VOCAB)])
    phrases = [LexicalConstraints(texts, [], []), LexicalConstraints(texts, ["5"], [])]
    results, _, _ = decode_live(model, make_sources(2), config, [0, 1], phrases=phrases)
    assert results[0][0].score > -torch.inf
    assert "found no output" in str(results[1])


def test_cancelled_sentences_leave_the_batch():
    model, sources, config = make_transformer(), make_sources(6), CONFIGS["beam"]
    config = replace(config, min_len=10)  # nothing is finished before it is cancelled
    results, _, _ = decode_live(model, sources, config, [0] * 6, cancelled=(1, 4))
    assert sorted(results) == [0, 2, 3, 5]
    plain = decode_alone(model, sources, config)
    assert_equal_search([results[i] for i in sorted(results)], [plain[i] for i in sorted(results)])


def test_shapes_respect_the_length_limit_of_the_model():
    model = make_transformer(positions="learned")
    needed = needed_shape([5] * 20, 30, (), continues_source=False)
    assert round_shape(model, needed).capacity == 64
    assert round_shape(make_transformer(), needed_shape([5] * 90, 180, (7,), continues_source=False)) == LiveShape(
        128, 256, 1
    )


@pytest.mark.skipif(test_captured.pytestmark.args[0], reason="needs Triton")
def test_captured_steps_have_the_same_results(kernels, monkeypatch):
    """The decoder of GPUs, in the interpreter."""
    monkeypatch.setattr(engine, "GPU_ROWS", 6)
    monkeypatch.setattr(engine, "MIN_CAPACITY", 16)
    model = test_captured.MODELS["pre-norm"]().to(test_captured.DEVICE)
    sources, config = test_captured.few_sources(4, longest=5), DecodeConfig(beam=3, n_best=2, max_len=3)
    monkeypatch.setattr(captured, "UNROLLED_STEPS", 2)
    results, _, decoder = decode_live(model, sources, config, [0, 0, 1, 12])
    assert decoder.is_graph
    assert_equal_search([results[i] for i in range(4)], decode_alone(model, sources, config), tolerance=1e-4)
