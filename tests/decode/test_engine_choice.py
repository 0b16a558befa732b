"""`explain` lists what computed the steps of each call, with the reason."""

import threading

import pytest

from regard.attention import record
from regard.decode import DecodeConfig, EngineChoice, Request, decode_all, engine, explain
from tests.decode.models import make_sources, transformer

SOURCES = make_sources(3)
FAST = {"max_len": 4}
REASONS = {
    'engine="plain"': ("model", {"engine": "plain"}),
    "the coverage penalty needs the attention weights of every step": ("static", {"coverage_penalty": 0.2}),
}


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_compiled_steps(method, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(engine, "COMPILED_SENTENCES", 3)
    monkeypatch.setattr(engine, "_decoded", 0)
    with explain() as choices:
        for count in (2, 3):
            decode_all(transformer(), Request(SOURCES[:count], DecodeConfig(method, **FAST)))
    few = "compiled kernels are loaded for 3 sentences or more"
    assert choices == [EngineChoice("static", few, 2), EngineChoice("compiled", "", 3)]


@pytest.mark.parametrize("reason", REASONS)
def test_reasons(reason):
    stepper, options = REASONS[reason]
    with explain() as choices:
        decode_all(transformer(), Request(SOURCES, DecodeConfig(**FAST, **options)))
    assert choices == [EngineChoice(stepper, reason, 3)]


def test_recorded_attention_is_that_of_the_model():
    model = transformer()
    with explain() as choices, record(model):
        decode_all(model, Request(SOURCES[:1], DecodeConfig(**FAST)))
    assert choices[0].stepper == "model"
    assert "attention is recorded" in choices[0].reason


def test_calls_are_listed_in_nested_blocks_of_this_thread_only():
    model = transformer()

    def decode(count):
        decode_all(model, Request(SOURCES[:count], DecodeConfig("greedy", **FAST)))

    with explain() as outer:
        decode(1)
        with explain() as inner:
            decode(2)
        thread = threading.Thread(target=decode, args=(3,))
        thread.start()
        thread.join()
        decode(0)
    decode(3)
    assert [choice.sentences for choice in outer] == [1, 2, 0]
    assert [choice.sentences for choice in inner] == [2]
