"""Sentences that arrive while others are decoded have the results that they have alone."""

from dataclasses import replace

import pytest
import torch

from regard.decode import DecodeConfig, Request, decode_all
from regard.decode.engine import engine_runner, live_decoder
from regard.decode.engine.captured import graph_decoder
from regard.decode.engine.live_decoder import LiveDecoder, LiveSentence, LiveShape, needed_shape, round_shape
from regard.models import GPT
from tests.decode.engine.captured import test_cuda_decoder
from tests.decode.engine.captured.test_cuda_decoder import kernels as kernels  # a fixture
from tests.decode.engine.helpers import CONFIGS, assert_equal_search, gpt, make_sources, seq2seq, special_options
from tests.decode.engine.helpers import transformer as make_transformer


def limit_of(model, source, config):
    limit = config.limit(len(source))
    return min(limit, 40 - len(source)) if isinstance(model, GPT) else limit


def decode_live(model, sources, config, arrivals, cancelled=()):
    """Decode sentences that arrive at these steps; returns results by index, and the streamed tokens."""
    results, tokens, indices = {}, {}, {}
    special = special_options(model)["special"]
    with torch.inference_mode():
        decoder = LiveDecoder(model, config, special, LiveShape(12, 40, 0))
        for step in range(1000):
            for i, source in enumerate(sources):
                if arrivals[i] == step:
                    sentence = LiveSentence(
                        source,
                        limit_of(model, source, config),
                        on_result=lambda n_best, i=i: results.update({i: n_best}),
                        on_token=lambda token, i=i: tokens.setdefault(i, []).append(token),
                        random_key=(config.seed, i),
                    )
                    indices[i] = decoder.add(sentence)
                if i in cancelled and arrivals[i] + 2 == step:
                    decoder.cancel(indices[i])
            decoder.advance()
            if step > max(arrivals) and decoder.is_idle:
                return results, tokens, decoder
    raise AssertionError("The decoder never became idle.")


def decode_alone(model, sources, config):
    options = special_options(model)
    return decode_all(model, Request(sources, replace(config, engine="plain"), **options))


@pytest.mark.parametrize("config", ["greedy", "beam", "samples"])
@pytest.mark.parametrize("make", [make_transformer, gpt, seq2seq])
def test_sentences_that_arrive_later_have_the_same_results(make, config, monkeypatch):
    monkeypatch.setattr(engine_runner, "CPU_ROWS", 16)
    model, sources = make(), make_sources(14)
    arrivals = [0, 0, 1, 1, 1, 2, 3, 3, 4, 9, 9, 20, 60, 61]
    results, tokens, decoder = decode_live(model, sources, CONFIGS[config], arrivals)
    plain = decode_alone(model, sources, CONFIGS[config])
    assert_equal_search([results[i] for i in range(len(sources))], plain)
    if config == "greedy":
        assert [tokens.get(i, []) for i in range(len(sources))] == [n_best[0].ids for n_best in plain]
    assert len(decoder.decoder.sentences) == 1  # the batch shrinks when there is little to do
    assert (decoder.job.sentences, decoder.job.sources) == ({}, {})  # nothing is kept


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


@pytest.mark.skipif(test_cuda_decoder.pytestmark.args[0], reason="needs Triton")
def test_captured_steps_have_the_same_results(kernels, monkeypatch):
    """The decoder of GPUs, in the interpreter."""
    monkeypatch.setattr(engine_runner, "GPU_ROWS", 6)
    monkeypatch.setattr(live_decoder, "MIN_CAPACITY", 16)
    model = test_cuda_decoder.MODELS["pre-norm"]().to(test_cuda_decoder.DEVICE)
    sources, config = test_cuda_decoder.few_sources(4, longest=5), DecodeConfig(beam=3, n_best=2, max_len=3)
    for module in (graph_decoder, live_decoder):
        monkeypatch.setattr(module, "UNROLLED_STEPS", 2)
    results, _, decoder = decode_live(model, sources, config, [0, 0, 1, 12])
    assert decoder.is_graph
    assert_equal_search([results[i] for i in range(4)], decode_alone(model, sources, config), tolerance=1e-4)
