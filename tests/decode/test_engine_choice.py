"""`explain` lists the engine of each call, with the reason."""

import threading

import pytest

from regard.attention import record
from regard.decode import DecodeConfig, EngineChoice, LexicalConstraints, Request, TokenTexts, decode_all, explain
from tests.decode.engine.helpers import VOCAB, make_sources, transformer

SOURCES = make_sources(3)
FAST = {"max_len": 4}
PLAIN_CALLS = {
    'engine="plain"': (DecodeConfig(engine="plain", **FAST), {}),
    "the search history is recorded": (DecodeConfig(**FAST), {"history": True}),
    "the coverage penalty needs the attention weights of every step": (DecodeConfig(coverage_penalty=0.2, **FAST), {}),
    "phrases are required or forbidden": (DecodeConfig(**FAST), {"lexical": True}),
}


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_engine(method):
    with explain() as choices:
        decode_all(transformer(), Request(SOURCES, DecodeConfig(method, **FAST)))
    assert choices == [EngineChoice("engine", "", 3)]


@pytest.mark.parametrize("reason", PLAIN_CALLS)
def test_plain_search(reason):
    config, options = PLAIN_CALLS[reason]
    if "lexical" in options:
        texts = TokenTexts([f" {i}".encode() for i in range(VOCAB)])
        options = {"lexical": [LexicalConstraints(texts, (), ("7",))] * 3}
    with explain() as choices:
        decode_all(transformer(), Request(SOURCES, config, **options))
    assert choices == [EngineChoice("plain", reason, 3)]


def test_recorded_attention_is_plain():
    model = transformer()
    with explain() as choices, record(model):
        decode_all(model, Request(SOURCES[:1], DecodeConfig(**FAST)))
    assert choices[0].engine == "plain"
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
