"""Real clients: the packages openai and libretranslatepy, and `regard.connect`."""

import numpy as np
import pytest
from PIL import Image

import regard
from regard.data.text.questions import Question
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.serve.client import OPTIONS
from regard.serve.routes.schemas import DecodeOptions


def test_openai(server, local):
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    assert "letters" in [model.id for model in client.models.list()]
    expected = local["letters"].generate("Un", DecodeConfig(method="greedy", max_len=12))[0].text
    options = {"model": "letters", "prompt": "Un", "max_tokens": 12, "temperature": 0}
    assert client.completions.create(**options).choices[0].text == expected
    stream = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    messages = [{"role": "user", "content": "Un chat"}]
    answer = client.chat.completions.create(model="talk", messages=messages, max_tokens=12, temperature=0)
    expected = local["talk"].chat(messages, DecodeConfig(method="greedy", max_len=12))
    assert answer.choices[0].message.content == expected
    stream = client.chat.completions.create(model="talk", messages=messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    vectors = client.embeddings.create(model="moods", input=["the cat"])  # this client asks for base64
    np.testing.assert_allclose(vectors.data[0].embedding, local["moods"].embed("the cat"), atol=1e-5)
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError, match="no chat template"):
        client.chat.completions.create(model="letters", messages=[{"role": "user", "content": "Hello"}])


def test_libretranslate(server, local):
    from libretranslatepy import LibreTranslateAPI

    client = LibreTranslateAPI(f"{server.url}/")
    assert client.translate("one two", "en", "fr") == local["numbers"]("one two")
    assert client.languages()[0]["code"] == "en"
    assert client.detect("the cat")[0]["language"] == local["langid"].classify("the cat").label


def test_connect_has_the_calls_of_a_local_model(server, local):
    remote = {name: regard.connect(server.url, name) for name in local}
    numbers = remote["numbers"]
    assert numbers("one two") == local["numbers"]("one two")
    assert numbers(["one two", "three"]) == local["numbers"](["one two", "three"])
    config = DecodeConfig(beam=4, n_best=3)
    lines = ["one two", "three four five"] * 40
    for ours, theirs in zip(numbers.translate(lines, config), local["numbers"].translate(lines, config), strict=True):
        assert [one.hypothesis.ids for one in ours] == [one.hypothesis.ids for one in theirs]
        assert ours[0].score == pytest.approx(theirs[0].score, abs=1e-4)
    streamed = [n_best[0].text for n_best in numbers.translate_stream(iter(["one\n", "two\n"]), block_size=1)]
    assert streamed == [local["numbers"](line) for line in ("one", "two")]
    assert numbers.score(("one", "un")).tokens == local["numbers"].score(("one", "un")).tokens
    assert numbers.attention_page("one two").startswith(b"<!doctype html>")
    letters, sampling = remote["letters"], DecodeConfig(method="sample", max_len=8, seed=5)
    assert letters.generate("Un", sampling)[0].text == local["letters"].generate("Un", sampling)[0].text
    assert "".join(letters.generate_stream("Un", sampling)) == local["letters"].generate("Un", sampling)[0].text
    np.testing.assert_allclose(remote["moods"].embed(["owls"]), local["moods"].embed(["owls"]), atol=1e-5)
    assert remote["moods"].classify("owls").label == local["moods"].classify("owls").label
    question = Question("", "the cat", "that old dog hears the cat")
    assert remote["answers"].answer(question) == local["answers"].answer(question)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (12, 16, 3), np.uint8))
    assert remote["animals"].classify([image])[0].label == local["animals"].classify([image])[0].label
    np.testing.assert_array_equal(remote["regions"].segment([image])[0], local["regions"].segment([image])[0])


def test_errors_of_connect(server, tmp_path):
    with pytest.raises(RegardError, match="several models: numbers"):
        regard.connect(server.url)
    with pytest.raises(RegardError, match="has no model 'x'"):
        regard.connect(server.url, "x")
    with pytest.raises(RegardError, match="is not the address of a server"):
        regard.connect("localhost:8000")
    with pytest.raises(RegardError, match="did not respond"):
        regard.connect("http://127.0.0.1:9", "x")
    numbers = regard.connect(server.url, "numbers")
    with pytest.raises(RegardError, match="beam must be at most 16"):
        numbers.translate("one", DecodeConfig(beam=20))
    with pytest.raises(RegardError, match="coverage_penalty cannot be set"):
        numbers.translate("one", DecodeConfig(coverage_penalty=1.0))
    with pytest.raises(RegardError, match="cannot be read"):
        regard.connect(server.url, "animals").classify(tmp_path / "none.png")


def test_the_client_knows_all_options():
    assert set(OPTIONS) == set(DecodeOptions.model_fields)
