"""Requests are made once: typed options, errors for unknown ones, and one tokenization of each line."""

from dataclasses import fields, replace

import pytest

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models.gpt import GPT, GPTConfig
from regard.pipelines.text_generator import TextGenerator
from regard.pipelines.translation import TranslationOptions, TranslationRequest
from regard.pipelines.translation_files import FileOptions

GREEDY = DecodeConfig("greedy", max_len=4)


def test_typed_options_are_the_fields_of_requests():
    names = {field.name: field.type for field in fields(TranslationRequest) if field.name not in ("lines", "config")}
    assert names == TranslationOptions.__annotations__
    assert {*FileOptions.__annotations__} == {*names, "scores", "column"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("spilt", "Did you mean split?"),
        ("forbiden", "Did you mean forbidden?"),
        ("beam", "pass DecodeConfig(beam=…) as config"),
        ("xyz", "Its options are prefixes, "),
    ],
)
def test_unknown_options_are_errors_with_the_right_name(seq2seq, tmp_path, name, hint):
    options = {name: "auto"}
    calls = {
        "translate": [
            lambda: seq2seq.translate("one", **options),
            lambda: seq2seq.translate(["one"], **options),
            lambda: seq2seq.prepare(["one"], **options),
        ],
        "translate_stream": [lambda: seq2seq.translate_stream(["one"], **options)],
        "translate_file": [lambda: seq2seq.translate_file(["one"], tmp_path / "out.txt", **options)],
    }
    for function, variants in calls.items():
        for call in variants:
            with pytest.raises(RegardError, match=f"^{function} has no option {name}") as caught:
                call()
            assert hint in caught.value.hint


def test_unknown_options_of_generate(seq2seq):
    model = GPT(GPTConfig(width=8, heads=2, layers=1, feedforward=8, vocab=20))
    generator = TextGenerator(model, seq2seq.source_tokenizer)
    for call in (generator.generate, lambda prompt, **options: generator.prepare([prompt], **options)):
        with pytest.raises(RegardError, match="generate has no option histroy") as caught:
            call("one", histroy=True)
        assert caught.value.hint == "Did you mean history?"


@pytest.fixture
def encoded(seq2seq, monkeypatch):
    """The texts that the source tokenizer encodes."""
    texts: list[str] = []
    tokenizer = type(seq2seq.source_tokenizer)
    encode, encode_batch = tokenizer.encode, tokenizer.encode_batch

    def spy(self, text, **options):
        texts.append(text)
        return encode(self, text, **options)

    def spy_batch(self, lines, **options):
        texts.extend(lines)
        return encode_batch(self, lines, **options)

    monkeypatch.setattr(tokenizer, "encode", spy)
    monkeypatch.setattr(tokenizer, "encode_batch", spy_batch)
    return texts


def test_a_line_is_tokenized_once(seq2seq, encoded, tmp_path):
    lines = ["one two", "three", "four five"]
    seq2seq.translate(lines, GREEDY)
    assert encoded == lines
    encoded.clear()
    list(seq2seq.translate_stream(lines, GREEDY, block_size=2))
    assert encoded == lines
    encoded.clear()
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines))
    seq2seq.translate_file(tmp_path / "in.txt", tmp_path / "out.txt", GREEDY)
    assert encoded == lines


def test_a_prefix_for_all_lines_is_one_for_each(seq2seq):
    lines = ["one two", "three"]
    assert seq2seq.translate(lines, GREEDY, prefixes="dix") == seq2seq.translate(lines, GREEDY, prefixes=["dix"] * 2)


def test_a_block_has_the_samples_of_its_place(seq2seq):
    config = replace(GREEDY, method="sample")
    lines = [f"one {word}" for word in ("two", "three", "four")]
    together = seq2seq.translate(lines, config)
    assert [*seq2seq.translate_stream(lines, config, block_size=2)] == together
    assert seq2seq.translate(lines[1:], config, first_index=1) == together[1:]
