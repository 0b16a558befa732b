"""Fields of OpenAI's API: each is supported as OpenAI documents it, or refused by name."""

import json

import pytest

from regard.decode import DecodeConfig
from regard.serve.application import make_application
from tests.serve.test_routes import read_events

GREEDY = {"model": "letters", "prompt": "Un", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "talk", "messages": [{"role": "user", "content": "Un"}], "max_tokens": 12, "temperature": 0}


def completion(path):
    return CHAT if "chat" in path else GREEDY


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_end_with_usage_if_asked(server, path):
    body = completion(path)
    expected = server.post(path, body)["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = read_events(server, path, body | options)
    assert (last["choices"], last["usage"]) == ([], expected)
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events)
    for without in ({"stream": True}, {"stream": True, "stream_options": {"include_usage": False}}):
        assert not any("usage" in event for event in read_events(server, path, body | without))
    status, content = server.request(path, body | {"stream_options": {"include_usage": True}})
    assert (status, "stream_options needs stream" in content["error"]["message"]) == (400, True)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_usage_counts_tokens_until_the_stop_sequence(server, local, is_streamed):
    generator = local["letters"]
    (whole,) = generator.generate("Un", DecodeConfig(method="greedy", max_len=40))
    stop = whole.text[3:5]
    decoder = generator.stream_decoder(generator.encode_prompt("Un"))
    ids = whole.hypothesis.ids
    count = next(i for i in range(len(ids)) if stop in decoder.decode(ids[:i]))
    assert count < len(ids)
    body = GREEDY | {"max_tokens": 40, "stop": stop}
    if is_streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        usage = read_events(server, "/v1/completions", body | options)[-1]["usage"]
    else:
        usage = server.post("/v1/completions", body)["usage"]
    prompt = len(generator.encode_prompt("Un"))
    expected = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    assert usage == expected


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "suffix", "."),
        ("/v1/completions", "logit_bias", {"5": 3}),
        ("/v1/completions", "best_of", 3),
        ("/v1/completions", "presence_penalty", 0.5),
        ("/v1/completions", "frequency_penalty", -0.5),
        ("/v1/completions", "top_k", 5),
        ("/v1/chat/completions", "tools", [{"type": "function"}]),
        ("/v1/chat/completions", "logprobs", True),
        ("/v1/chat/completions", "response_format", {"type": "json_object"}),
        ("/v1/chat/completions", "stream_options", {"stream": 1}),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "a", "name": "b"}]),
        ("/v1/embeddings", "truncate", True),
    ],
)
def test_unsupported_fields_are_refused_by_name(server, path, field, value):
    body = {"model": "moods", "input": "a"} if "embed" in path else completion(path)
    status, content = server.request(path, body | {field: value})
    name = {"stream_options": "stream_options.stream", "messages": "messages.0.name"}.get(field, field)
    assert (status, content["error"]["message"]) == (400, f"{name} is not supported. Leave it out.")
    assert content["error"]["param"] == name


def test_fields_that_ask_for_nothing_are_accepted(server):
    neutral = {"suffix": None, "logit_bias": {}, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    assert (
        server.post("/v1/completions", GREEDY | neutral)["choices"] == server.post("/v1/completions", GREEDY)["choices"]
    )
    neutral = {"tools": [], "logprobs": False, "response_format": {"type": "text"}, "store": False, "user": "x"}
    assert server.post("/v1/chat/completions", CHAT | neutral)["usage"]


def test_prompts_of_tokens(server, local):
    generator = local["letters"]
    text = server.post("/v1/completions", GREEDY)
    ids = generator.encode_prompt("Un")
    assert isinstance(ids[0], int)
    for prompt in (ids, [ids]):
        response = server.post("/v1/completions", GREEDY | {"prompt": prompt})
        assert (response["choices"], response["usage"]) == (text["choices"], text["usage"])
    several = [ids, generator.encode_prompt("ao")]
    choices = server.post("/v1/completions", GREEDY | {"prompt": several, "echo": True})["choices"]
    texts = server.post("/v1/completions", GREEDY | {"prompt": ["Un", "ao"], "echo": True})["choices"]
    assert [one["text"] for one in choices] == [one["text"] for one in texts]
    events = read_events(server, "/v1/completions", GREEDY | {"prompt": ids, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == text["choices"][0]["text"]
    vocab = generator.model.config.vocab
    for prompt, message in (
        ([vocab], f"has the token {vocab}, but the vocabulary of the model has {vocab} tokens."),
        ([[1], []], "prompt 2 is empty."),
        ([-1], "prompt.0: Input should be greater than or equal to 0."),
        ([1, "a"], "prompt.1: Input should be a valid integer."),
        ([1] * 5000, "The request has 5000 characters; at most 4000"),
    ):
        status, content = server.request("/v1/completions", GREEDY | {"prompt": prompt})
        assert (status in (413, 422), message in content["error"]["message"]) == (True, True), content


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo_with_logprobs(server, local, max_tokens):
    """All log-probabilities are those of the model for prompt and output as one text."""
    generator = local["letters"]
    body = GREEDY | {"prompt": "Un chéri", "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    response = server.post("/v1/completions", body)
    (choice,) = response["choices"]
    prefix = generator.special.add_special_tokens([])
    ids = generator.encode_prompt("Un chéri")
    ids += generator.generate("Un chéri", DecodeConfig(method="greedy", max_len=6))[0].hypothesis.ids[:max_tokens]
    assert response["usage"]["total_tokens"] == len(ids)
    (scores,) = generator.score_tokens([ids])
    expected = [None, *scores.logprobs.tolist()][len(prefix) :]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Un chéri")
    assert choice["finish_reason"] == "length"
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-4)
    assert (logprobs["token_logprobs"][0] is None) == (not prefix)
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    top = [value for one in logprobs["top_logprobs"][1:] for value in one.values()]
    assert all(best >= value - 1e-5 for best, value in zip(top, logprobs["token_logprobs"][1:], strict=True))
    total = generator.score("Un chéri")
    if max_tokens == 0 and prefix:
        end = float(generator.score_tokens([[*ids, generator.special.eos]])[0].logprobs[-1])
        assert sum(logprobs["token_logprobs"]) == pytest.approx(total.logprob - end, abs=1e-3)


def test_echo_of_tokens_with_logprobs(server, local):
    ids = local["letters"].tokenizer.encode("Un chéri")
    body = GREEDY | {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = server.post("/v1/completions", body)["choices"]
    (scores,) = local["letters"].score_tokens([ids])
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores.logprobs.tolist(), abs=1e-4)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    (choice,) = server.post("/v1/completions", body | {"prompt": ids[:1]})["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]
    status, content = server.request("/v1/completions", body | {"echo": False})
    assert (status, "without echo" in content["error"]["message"]) == (422, True)


def test_alternatives_are_clamped(server):
    limit = server.service.limits.max_beam
    for count in (limit - 1, limit, 10**30):
        body = {"q": "one two", "source": "en", "target": "fr", "alternatives": count}
        response = server.post("/translate", body)
        assert 0 < len(response["alternatives"]) < limit


@pytest.mark.parametrize(
    "value", [None, 5, True, [], [5], [[5]], {}, {"a": [1]}, "\ud800", ["\ud800"], [["a", "b", "c"]], 1e300]
)
def test_messages_have_no_names_of_types_or_functions(server, value):
    schema = make_application(server.service.registry).openapi()
    for path, operations in schema["paths"].items():
        if "requestBody" not in operations.get("post", {}):
            continue
        body = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]] if "$ref" in body else body
        for field in body["properties"]:
            content = server.request(path, {"model": "letters", field: value})[1]
            text = json.dumps(content)
            for word in (
                "function-",
                "check_text",
                "constrained",
                "instance of",
                "Value error",
                "list[",
                "tuple[",
                "|",
            ):
                assert word not in text, (path, field, text)
            for name in ("Body", "TextOrTexts", "StreamOptions", "DecodeOptions", "pydantic", "Tuple"):
                assert name not in text, (path, field, text)
