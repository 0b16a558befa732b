"""The fuzz target `http`: requests to the application of a server with small models of each kind.

The first line of an input has the method, the path and, optionally, the content type; the rest is the body. Responses
with a status from 500 on, those that blame the weights, and requests without a response are failures; other refusals
count as errors of the reader.
"""

import asyncio
import base64
import dataclasses
import io
import json
import logging
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.data import Tokenizer
from regard.data.text.languages import LanguagePair
from regard.errors import RegardError
from regard.pipelines import save
from regard.serve.application import make_application
from regard.serve.limits import ServeLimits
from regard.serve.registry import ModelRegistry
from tests.fuzz import valid_files

LIMITS = ServeLimits(max_output_tokens=256, timeout=25)
_MODELS = "served"


def write_served(folder: Path) -> None:
    """Models of every kind, with a tokenizer of characters so that long texts have many tokens."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([valid_files.TEXT], "char")
    sizes = {"max_len": 64}
    vocab = {"source_vocab": tokenizer.vocab_size, "target_vocab": tokenizer.vocab_size}
    translator = valid_files.make_translator(**sizes, **vocab)
    translator.language_pairs = (LanguagePair("en", "fr"),)
    generator = valid_files.make_generator(**sizes, vocab=tokenizer.vocab_size)
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }} {% endfor %}"
    generator.training["imported"] = {"chat_template": template, "special_tokens": {}}
    heads: dict[str, dict[str, Any]] = {
        "labels": {"head": "classify", "labels": ("de", "en"), "pooler": "tanh"},
        "answers": {"head": "answer", "labels": ()},
    }
    pipelines: dict[str, Any] = {
        "translator": dataclasses.replace(translator, source_tokenizer=tokenizer, target_tokenizer=tokenizer),
        "generator": dataclasses.replace(generator, tokenizer=tokenizer),
        **{
            name: dataclasses.replace(
                valid_files.make_encoder(**sizes, vocab=tokenizer.vocab_size, **options), tokenizer=tokenizer
            )
            for name, options in heads.items()
        },
        "images": valid_files.make_image_model(),
        "regions": valid_files.make_image_model(head="segment"),
    }
    for name, pipeline in pipelines.items():
        save(folder / _MODELS / name, pipeline)


_errors: list[BaseException] = []


class _ErrorHandler(logging.Handler):
    """Keeps the exceptions that the server logs."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            _errors.append(record.exc_info[1])


@cache
def _application(folder: Path) -> tuple[Any, asyncio.Runner]:
    """The application, and the event loop of all its requests."""
    tempfile.tempdir = str(folder)  # nothing else may be written to
    logging.getLogger("regard.serve").addHandler(_ErrorHandler())
    models = sorted((folder / _MODELS).iterdir())
    with torch.inference_mode(False):
        registry = ModelRegistry(models, device="cpu", latency_target=1000.0, workers=1)
    return make_application(registry, limits=LIMITS), asyncio.Runner()


def send_request(folder: Path) -> None:
    """Send the request in the file of the target; a refusal is raised as a RegardError."""
    app, runner = _application(folder)
    line, _, body = (folder / "request").read_bytes().partition(b"\n")
    status, content = runner.run(_respond(app, line, body))
    if _errors:  # they are in the status, or in the events of a stream
        raise _errors.pop()
    assert 200 <= status < 500, f"status {status}: {content[:2000]!r}"
    assert b"contains NaN" not in content, content  # the weights are fine: the decoding engine is not
    if status >= 300:
        raise RegardError(f"{status}: {content[:300].decode(errors='replace')}")


async def _respond(app: Any, line: bytes, body: bytes) -> tuple[int, bytes]:
    method, path, kind = (*line.decode("latin-1").split(" "), "", "", "")[:3]
    path, _, query = path.partition("?")
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))]
    headers.append((b"content-type", (kind or "application/json").encode("latin-1")))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": headers,
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 9000),
        "state": {},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, chunks = 0, []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        chunks.append(message.get("body", b""))

    async with asyncio.timeout(2 * LIMITS.timeout):
        await app(scope, receive, send)
    return status, b"".join(chunks)


def _post(path: str, body: Any) -> bytes:
    return f"POST {path}\n{json.dumps(body)}".encode()


def make_seeds() -> list[bytes]:
    """A valid request for every route, with all fields that it supports."""
    buffer = io.BytesIO()
    valid_files.IMAGE.save(buffer, "PNG")
    image = base64.b64encode(buffer.getvalue()).decode()
    options: dict[str, Any] = {"method": "beam", "beam": 2, "n_best": 2, "length_penalty": 0.5, "max_len": 9}
    options |= {"min_len": 1, "temperature": 0.9, "top_k": 3, "top_p": 0.8, "seed": 3, "shortlist": False}
    phrases = {"forbidden": ["two"], "truncate": True}
    generation = {"max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["t", "wo"], "user": "a"}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    translate = {"texts": ["one two", "three"], "options": options, "split": "never", "prefixes": ["one", ""]}
    libretranslate = {"q": "<b>one</b> two", "source": "en", "target": "fr", "format": "html", "alternatives": 2}
    completion = {"model": "generator", "prompt": ["one", "two"], "n": 2, "logprobs": 1, "echo": True, **generation}
    chat = {"model": "generator", "messages": [{"role": "user", "content": "one two"}], **generation}
    question = {"question": "one", "context": "one two three"}
    gets = ("/", "/docs", "/openapi.json", "/health", "/ready", "/metrics", "/languages", "/v1/models")
    return [
        *(f"GET {path}\n".encode() for path in (*gets, "/v1/models/generator")),
        b"HEAD /health\n",
        b"POST /translate application/x-www-form-urlencoded\nq=one+two&source=en&target=fr",
        _post("/translate", libretranslate),
        _post("/translate", {"q": ["one two", "three"], "target": "fr", "api_key": "key"}),
        _post("/detect", {"q": "one two"}),
        _post("/api/translate", translate | phrases | {"required": ["one"]}),
        _post("/api/translate", {"texts": ["one two three four"], "options": {"method": "sample", "top_k": 2}}),
        _post("/api/generate", {"prompts": ["one"], "options": options | {"method": "greedy", "n_best": 1}, **phrases}),
        _post("/api/generate", {"prompts": ["one"], "options": {"method": "sample", "max_len": 5}, "stream": True}),
        _post("/api/classify", {"model": "labels", "texts": ["one", "two"], "truncate": True}),
        _post("/api/classify", {"model": "images", "images": [image]}),
        _post("/api/segment", {"images": [image]}),
        _post("/api/answer", {"questions": [question], "empty": True}),
        _post("/api/embed", {"model": "labels", "texts": ["one", "two"], "truncate": True}),
        _post("/api/score", {"model": "generator", "texts": ["one"], "truncate": True}),
        _post("/api/score", {"model": "translator", "pairs": [["one", "two"]], "to": "fr"}),
        _post("/api/attention", {"model": "translator", "text": "one two", "target": "two", "format": "arrays"}),
        _post("/api/attention", {"model": "answers", "text": "one", "context": "one two", "format": "arrays"}),
        _post("/api/attention", {"model": "generator", "text": "one two"}),
        _post("/api/attention", {"model": "images", "image": image}),
        _post("/v1/completions", completion),
        _post("/v1/completions", {"model": "generator", "prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True}),
        _post("/v1/completions", {"model": "generator", "prompt": "one", **generation, **usage}),
        _post("/v1/chat/completions", chat | {"n": 1}),
        _post("/v1/chat/completions", chat | usage),
        _post("/v1/embeddings", {"model": "labels", "input": ["one", "two"], "encoding_format": "base64"}),
    ]
