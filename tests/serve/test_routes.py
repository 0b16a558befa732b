"""Responses of the routes equal what the pipelines compute."""

import base64
import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from regard.data.text.questions import Question
from regard.decode import DecodeConfig
from tests.conftest import number_pairs

LINES = [source for source, _ in number_pairs(24, seed=9)]


def read_events(server, path, body):
    """The events of a stream, from JSON."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def png(size=(16, 12)) -> tuple[str, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode(), pixels


def test_translations_under_load_equal_those_alone(server, local):
    expected = {line: local["numbers"].translate(line, DecodeConfig(n_best=2)) for line in LINES}

    def translate(line: str):
        body = {"model": "numbers", "texts": [line], "options": {"n_best": 2}}
        return server.post("/api/translate", body)["translations"][0]

    with ThreadPoolExecutor(16) as pool:
        for line, outputs in zip(LINES * 3, pool.map(translate, LINES * 3)):
            assert [one["text"] for one in outputs] == [one.text for one in expected[line]]
            assert outputs[0]["tokens"] == expected[line][0].hypothesis.ids


def test_libretranslate(server, local):
    body = {"q": "one two\nthree four", "source": "en", "target": "fr", "alternatives": 2}
    response = server.post("/translate", body)
    assert response["translatedText"] == f"{local['numbers']('one two')}\n{local['numbers']('three four')}"
    assert len(response["alternatives"]) <= 2
    form = server.post("/translate", b"q=one+two&source=en&target=fr", content_type="application/x-www-form-urlencoded")
    assert form == {"translatedText": local["numbers"]("one two")}
    several = server.post("/translate", {"q": ["one two", ""], "source": "en", "target": "fr"})
    assert several["translatedText"] == [local["numbers"]("one two"), ""]
    html = {"q": "<p>one <b>two</b></p>", "source": "en", "target": "fr", "format": "html"}
    expected = f"<p>{local['numbers']('one')} <b>{local['numbers']('two')}</b></p>"
    assert server.post("/translate", html)["translatedText"] == expected


def test_languages(server, local):
    languages = server.request("/languages")[1]
    assert languages[0] == {"code": "en", "name": "English", "targets": ["fr"]}
    (best, *_) = server.post("/detect", {"q": "the cat"})
    expected = local["langid"].classify("the cat")
    assert best == {"language": expected.label, "confidence": pytest.approx(100 * expected.probability, abs=0.1)}
    status, content = server.request("/translate", {"q": "one", "source": "en", "target": "xx"})
    assert (status, content["error"]) == (400, "No model translates from 'en' to 'xx'. Language pairs: en-fr.")


def test_completions(server, local):
    body = {"model": "letters", "prompt": "Un", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    response = server.post("/v1/completions", body)
    (expected,) = local["letters"].generate("Un", DecodeConfig(method="greedy", max_len=12))
    (choice,) = response["choices"]
    assert choice["text"] == expected.text
    assert "".join(choice["logprobs"]["tokens"]) == expected.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.hypothesis.token_logprobs[:12], abs=1e-4)
    assert response["usage"]["completion_tokens"] == len(expected.hypothesis.ids)
    sampled = {"model": "letters", "prompt": ["Un", "La"], "max_tokens": 8, "seed": 3, "n": 2, "echo": True}
    config = DecodeConfig(method="sample", max_len=8, seed=3, n_best=2)
    texts = [choice["text"] for choice in server.post("/v1/completions", sampled)["choices"]]
    results = local["letters"].generate(["Un", "La"], config)
    assert texts == [prompt + one.text for prompt, n_best in zip(("Un", "La"), results) for one in n_best]


def test_default_options_of_models_apply(server, local, monkeypatch):
    served = {model.name: model.pipeline for model in server.service.registry.models}
    short = DecodeConfig(method="greedy", max_len=1)
    monkeypatch.setattr(served["numbers"], "decoding", short)
    body = {"q": "one two three", "source": "en", "target": "fr"}
    expected = local["numbers"].translate("one two three", short)[0].text
    assert server.post("/translate", body)["translatedText"] == expected != local["numbers"]("one two three")
    monkeypatch.setattr(served["letters"], "decoding", DecodeConfig(repetition_penalty=3.0))
    body = {"model": "letters", "prompt": "Un", "max_tokens": 12, "temperature": 0}
    greedy = DecodeConfig(method="greedy", max_len=12)
    plain, penalized = (
        local["letters"].generate("Un", config)[0].text for config in (greedy, replace(greedy, repetition_penalty=3.0))
    )
    assert server.post("/v1/completions", body)["choices"][0]["text"] == penalized != plain


def test_completions_are_streamed(server, local):
    body = {"model": "letters", "prompt": "Un", "max_tokens": 12, "temperature": 0, "stream": True}
    *pieces, last = read_events(server, "/v1/completions", body)
    expected = local["letters"].generate("Un", DecodeConfig(method="greedy", max_len=12))[0].text
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert len(pieces) > 2
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
    native = {"model": "letters", "prompts": ["Un"], "options": {"method": "greedy", "max_len": 12}, "stream": True}
    assert "".join(event["text"] for event in read_events(server, "/api/generate", native)) == expected


def test_stop_sequences(server, local):
    body = {"model": "letters", "prompt": "Un", "max_tokens": 40, "temperature": 0}
    text = server.post("/v1/completions", body)["choices"][0]["text"]
    stop = text[3:5]
    for is_streamed in (False, True):
        stopped = body | {"stop": [stop, "never"], "stream": is_streamed}
        if is_streamed:
            choices = [event["choices"][0] for event in read_events(server, "/v1/completions", stopped)]
        else:
            choices = server.post("/v1/completions", stopped)["choices"]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_chat_needs_a_template(server):
    body = {"model": "letters", "messages": [{"role": "user", "content": "Hello"}]}
    status, content = server.request("/v1/chat/completions", body)
    assert status == 422
    assert content["error"]["message"] == (
        "The model 'letters' cannot chat: it has no chat template. Use /v1/completions."
    )


def test_chat(server, local):
    messages = [{"role": "user", "content": "Un chat"}]
    body = {"model": "talk", "messages": messages, "max_tokens": 12, "temperature": 0}
    response = server.post("/v1/chat/completions", body)
    expected = local["talk"].chat(messages, DecodeConfig(method="greedy", max_len=12))
    assert response["choices"][0]["message"] == {"role": "assistant", "content": expected}
    events = read_events(server, "/v1/chat/completions", body | {"stream": True})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected


def test_embeddings(server, local):
    texts = ["the cat", "owls"]
    expected = local["moods"].embed(texts)
    floats = server.post("/v1/embeddings", {"model": "moods", "input": texts})["data"]
    np.testing.assert_allclose([one["embedding"] for one in floats], expected, atol=1e-5)
    (encoded,) = server.post("/v1/embeddings", {"model": "moods", "input": "owls", "encoding_format": "base64"})["data"]
    vector = np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[1], atol=1e-5)


def test_classification_answers_scores_and_masks(server, local):
    texts = ["the cat sees a dog", "owls"]
    results = server.post("/api/classify", {"model": "moods", "texts": texts})["results"]
    for result, expected in zip(results, local["moods"].classify(texts)):
        assert result["label"] == expected.label
        assert result["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)
    question = {"question": "the cat", "context": "that old dog hears the cat in the tree"}
    answers = server.post("/api/answer", {"questions": [question]})["answers"]
    assert answers == [local["answers"].answer(Question("0", **question))]
    (score,) = server.post("/api/score", {"model": "numbers", "pairs": [["one two", "deux un"]]})["scores"]
    assert score["logprob"] == pytest.approx(local["numbers"].score(("one two", "deux un")).logprob, abs=1e-4)
    (score,) = server.post("/api/score", {"model": "letters", "texts": ["Un chat"]})["scores"]
    assert score["logprob"] == pytest.approx(local["letters"].score("Un chat").logprob, abs=1e-3)
    encoded, pixels = png()
    (result,) = server.post("/api/classify", {"model": "animals", "images": [encoded]})["results"]
    assert result["label"] == local["animals"].classify([pixels])[0].label
    (mask,) = server.post("/api/segment", {"images": [encoded]})["masks"]
    assert mask == local["regions"].segment([pixels])[0].tolist()


def test_attention(server, local):
    body = {"model": "numbers", "text": "one two three", "format": "arrays"}
    response = server.post("/api/attention", body)
    from regard import look

    seen = look(local["numbers"], "one two three")
    assert response["output"] == seen.translation
    for name, one in seen.maps.items():
        assert response["maps"][name]["rows"] == one.rows
        np.testing.assert_allclose(response["maps"][name]["weights"], one.weights, atol=1e-5)
    page = server.post("/api/attention", {"model": "animals", "image": png()[0]})
    assert page.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/translate", {"texts": ["one"], "options": {"beam": 99}}, 422, "beam must be at most 16 (got 99)."),
        ("/api/translate", {"texts": ["one"], "options": {"beam": 0}}, 422, "beam must be between 1 and 1,000"),
        ("/api/translate", {"texts": ["a" * 5000]}, 413, "at most 4000 are allowed"),
        ("/api/translate", {"texts": ["a"] * 65}, 413, "The request has 65 texts; at most 64"),
        ("/api/translate", {"texts": [3]}, 422, "texts.0: Input should be a valid string."),
        ("/api/translate", {"texts": ["one"], "beam": 3}, 422, "beam: Extra inputs are not permitted."),
        ("/api/translate", {"texts": ["\ud800"]}, 422, "must be text in UTF-8"),
        ("/api/translate", {"texts": ["one"], "prefixes": []}, 422, "prefixes has 0 entries for 1 texts."),
        ("/api/translate", {"texts": ["one"], "model": "nubmers"}, 404, "Did you mean numbers?"),
        ("/api/translate", {"texts": ["one"], "model": "moods"}, 422, "'moods' cannot translate"),
        ("/api/classify", {"texts": ["one"]}, 422, "Several models can classify: moods, langid, animals."),
        ("/api/classify", {"model": "moods", "images": ["x"]}, 422, "moods classifies texts."),
        ("/api/classify", {"model": "animals", "images": ["/etc/passwd"]}, 422, "image 1: not a readable image"),
        ("/api/segment", {"images": ["*"]}, 422, "the base64 is invalid"),
        (
            "/api/generate",
            {"model": "letters", "prompts": ["a"], "options": {"max_len": 300}},
            422,
            "max_len must be at most 256",
        ),
        ("/v1/completions", {"model": "letters", "prompt": "a", "n": 40}, 422, "n_best must be at most 16 (got 40)."),
        ("/v1/completions", {"model": "letters", "prompt": "a", "n": 2, "temperature": 0}, 422, "n must be 1"),
        ("/v1/completions", {"model": "numbers", "prompt": "a"}, 422, "'numbers' cannot generate"),
        ("/v1/completions", {"model": "letters", "prompt": ["a"] * 2, "stream": True}, 422, "stream supports one"),
        ("/v1/embeddings", {"model": "moods", "input": "a", "dimensions": 3}, 422, "dimensions must be 16"),
        ("/api/translate", {"texts": ["one"], "to": "xx"}, 422, "Unknown target language 'xx'."),
        ("/translate", {"q": "one"}, 400, "target: Field required."),
        ("/translate", {"q": 3, "target": "fr"}, 400, "q: must be a string or a list of strings."),
        ("/translate", [], 400, "The request is invalid: Input should be an object."),
        ("/api/translate", b"{,", 422, "The body is not JSON: Expecting property name"),
        ("/api/translate", dict.fromkeys(map(str, range(500))), 422, "has 500 fields; at most 100 are allowed."),
        ("/api/translate", {"texts": [], "\ud800": 1}, 422, "The request is invalid: must be text in UTF-8."),
        ("/translate", {"q": "a", "source": "\ud800"}, 400, "source: must be text in UTF-8."),
        (
            "/api/translate",
            b'{"texts": %s}' % (b"[" * 5000 + b"]" * 5000),
            400,
            "or a number or its nesting is too large.",
        ),
        (
            "/api/translate",
            b'{"texts": ["a"], "to": %s}' % (b"1" * 5000),
            400,
            "or a number or its nesting is too large.",
        ),
        ("/api/classify", {"model": "moods", "texts": ["a", 3]}, 422, "texts.1: must be a text or a pair of texts."),
        ("/api/classify", {"model": "moods", "texts": [["a"]]}, 422, "texts.0: must be a pair of texts."),
        ("/api/score", {"model": "numbers", "pairs": [["a"] * 3]}, 422, "pairs.0: must be a pair of texts."),
        ("/translate", b"{", 400, "The body is neither JSON nor a form"),
        ("/nothing", {}, 404, "There is no such path."),
        ("/health", {}, 405, "does not support the method"),
    ],
)
def test_errors_are_sentences(server, path, body, status, message):
    code, content = server.request(path, body)
    text = content["error"]["message"] if path.startswith("/v1") else content["error"]
    assert (code, message in text) == (status, True), text


def test_time_limits(server):
    slow = {"model": "numbers", "texts": ["one two"] * 60, "options": {"beam": 16, "min_len": 200, "max_len": 256}}
    status, content = server.request("/api/translate", slow, x_request_timeout="0.05")
    assert status == 504, content
    assert "time limit of 0.05 s" in content["error"]
    status, content = server.request("/api/translate", slow, x_request_timeout="nan")
    assert (status, "X-Request-Timeout" in content["error"]) == (422, True)


def test_status_and_metrics(server):
    assert server.request("/health")[1]["status"] == "ok"
    assert server.request("/ready")[1]["status"] == "ready"
    server.post("/translate", {"q": "one", "source": "en", "target": "fr"})
    metrics = server.request("/metrics")[1]
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    completed = {sample.labels["model"]: sample.value for sample in families["regard_model_completed"].samples}
    assert completed["numbers"] >= 1
    names = {sample.labels["path"] for sample in families["regard_requests"].samples}
    assert "/translate" in names
    buckets = [s for s in families["regard_request_duration_seconds"].samples if s.labels["path"] == "/translate"]
    assert buckets


def test_no_cors_headers_by_default(server):
    request = urllib.request.Request(server.url + "/health", headers={"Origin": "http://elsewhere"})
    with urllib.request.urlopen(request) as response:
        assert "access-control-allow-origin" not in response.headers
        assert len(response.headers["x-request-id"]) == 32
