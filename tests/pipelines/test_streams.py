"""Streams: endless input is translated lazily and in order; text is generated piece by piece and on demand."""

import gc
import itertools
import threading

import pytest

from regard.decode import DecodeConfig, decode_all
from regard.errors import RegardError
from regard.pipelines import decoding_request
from regard.pipelines.callback_iterator import iterate_callback
from tests.conftest import number_pairs
from tests.pipelines.test_text_generator import GREEDY, SAMPLE, make_generator

LINES = [source for source, _ in number_pairs(40, seed=4)]


@pytest.fixture(autouse=True)
def _no_threads_left():
    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() == before


# Translation


@pytest.mark.parametrize(
    "config", [None, DecodeConfig(beam=3, n_best=2), DecodeConfig(method="sample", n_best=2, seed=1)]
)
def test_stream_has_the_translations_of_translate(seq2seq, config):
    lines = ["", *LINES, ""]
    expected = [[one.text for one in n_best] for n_best in seq2seq.translate(lines, config)]
    for size in (1, 7, 1000):
        stream = seq2seq.translate_stream(iter(lines), config, block_size=size)
        assert [[one.text for one in n_best] for n_best in stream] == expected


def test_endless_stream_is_read_lazily(seq2seq):
    read = []

    def lines():
        for i in itertools.count():
            read.append(i)
            yield LINES[i % len(LINES)] + "\n"  # as from a file

    stream = seq2seq.translate_stream(lines(), DecodeConfig(method="greedy"), block_size=4)
    assert read == []
    first = [next(stream)[0].text for _ in range(10)]
    assert len(read) == 12
    assert first == [n_best[0].text for n_best in seq2seq.translate(LINES[:10], DecodeConfig(method="greedy"))]
    one_by_one = seq2seq.translate_stream(lines(), block_size=1)
    read.clear()
    next(one_by_one)
    assert read == [0]


def test_options_of_a_stream(seq2seq, learned):
    (n_best,) = seq2seq.translate_stream(["one two"], prefixes="trois")
    assert n_best[0].text.startswith("trois")
    long = " ".join(["one"] * 30)
    assert list(learned.translate_stream([long], truncate=True))
    with pytest.raises(RegardError, match="30 tokens"):
        list(learned.translate_stream([long]))
    with pytest.raises(RegardError, match="block_size must be at least 1"):
        seq2seq.translate_stream(LINES, block_size=0)
    with pytest.raises(RegardError, match="expects an iterable of lines"):
        seq2seq.translate_stream("one two")


# Generation


@pytest.mark.parametrize("kind", ["char", "word", "bytes", "bpe"])
@pytest.mark.parametrize("config", [GREEDY, SAMPLE, DecodeConfig(beam=2)], ids=["greedy", "sample", "beam"])
def test_pieces_join_to_the_generated_text(kind, config):
    generator = make_generator(kind)
    for prompt in ("Un  café", "猫"):
        pieces = list(generator.generate_stream(prompt, config))
        assert "".join(pieces) == generator.generate(prompt, config)[0].text
        assert config.method == "beam" or kind != "char" or len(pieces) > 1


def test_generation_stops_with_the_consumer(monkeypatch):
    generator, steps = make_generator(max_len=400), []
    threads = set(threading.enumerate())

    def decode_and_count(*arguments, on_token, **options):
        def count(index: int, token: int) -> None:
            steps.append(token)
            on_token(index, token)

        return decode_all(*arguments, on_token=count, **options)

    monkeypatch.setattr(decoding_request, "decode_all", decode_and_count)
    config = DecodeConfig(method="greedy", min_len=300, max_len=300)
    stream = generator.generate_stream("Un", config)
    assert not steps
    for _ in range(3):
        next(stream)
    stream.close()
    assert 3 <= len(steps) <= 8
    for text in generator.generate_stream("Un", config):  # an iterator that is no longer used
        assert text
        break
    gc.collect()
    assert len(steps) <= 16
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= threads


def test_errors_of_generation():
    generator = make_generator(positions="learned")
    with pytest.raises(RegardError, match=r"one text \(got n_best=2\)"):
        generator.generate_stream("Un", DecodeConfig(method="sample", n_best=2))
    with pytest.raises(RegardError, match="tokens; the model supports"):  # before the first piece
        generator.generate_stream("Un café " * 20)
    assert list(generator.generate_stream("Un café " * 20, truncate=True)) is not None


# Callbacks


def test_callback_runs_at_most_two_values_ahead():
    seen = []

    def count(emit):
        for i in itertools.count():
            seen.append(i)
            emit(i)

    numbers = iterate_callback(count)
    assert seen == []
    for i in range(5):
        assert next(numbers) == i
        assert len(seen) <= i + 3
    numbers.close()
    assert len(seen) <= 8


def test_error_of_the_function_is_raised_after_its_values():
    def fail(emit):
        emit(1)
        raise ValueError("broken")

    values = iterate_callback(fail)
    assert next(values) == 1
    with pytest.raises(ValueError, match="broken"):
        next(values)


def test_error_of_the_consumer_ends_the_function():
    ended = threading.Event()

    def count(emit):
        try:
            for i in itertools.count():
                emit(i)
        finally:
            ended.set()

    numbers = iterate_callback(count)
    assert next(numbers) == 0
    with pytest.raises(KeyError):
        numbers.throw(KeyError)
    assert ended.wait(5)
