"""A server with one small model of each kind, in a thread of the tests."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regard.data.text.languages import LanguagePair
from regard.pipelines import load, save
from regard.serve.application import make_application
from regard.serve.limits import ServeLimits
from regard.serve.registry import ModelRegistry
from regard.serve.server import HttpServer
from tests.pipelines.test_image_model import make_image_model
from tests.pipelines.test_text_encoder import make_encoder
from tests.pipelines.test_text_generator import make_generator

LIMITS = ServeLimits(max_body_bytes=200_000, max_characters=4000, max_texts=64, max_output_tokens=256, timeout=120)


class RunningServer:
    """The address of a server, its service, and requests to it."""

    def __init__(self, url: str, service: Any) -> None:
        self.url, self.service = url, service

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and content of a response, from JSON if it is JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            response = urllib.request.urlopen(urllib.request.Request(self.url + path, data, names))
        except urllib.error.HTTPError as error:
            response = error
        with response:
            content = response.read()
            is_json = "json" in response.headers.get("content-type", "")
            return response.status, json.loads(content) if is_json else content.decode()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The response to a request that must succeed."""
        status, content = self.request(path, body, **headers)
        assert status == 200, content
        return content


@contextmanager
def run_in_thread(registry: ModelRegistry, **options: Any) -> Iterator[RunningServer]:
    app = make_application(registry, **({"limits": LIMITS} | options))
    server = HttpServer(app, port=0)
    server.config.timeout_graceful_shutdown = 5
    sock = server.bind()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield RunningServer(f"http://127.0.0.1:{sock.getsockname()[1]}", app.state.service)
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, transformer_folder: Path) -> dict[str, Path]:
    """Model folders by name."""
    parent = tmp_path_factory.mktemp("served")
    translator = load(transformer_folder, "cpu")
    translator.language_pairs = (LanguagePair("en", "fr"),)
    chat = make_generator(max_len=512)
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }} {% endfor %}"
    chat.training["imported"] = {"chat_template": template, "special_tokens": {}}
    pipelines = {
        "numbers": translator,
        "letters": make_generator(max_len=512),
        "talk": chat,
        "moods": make_encoder("classify"),
        "langid": make_encoder("classify", labels=("de", "en", "fr")),
        "answers": make_encoder("answer"),
        "animals": make_image_model(),
        "regions": make_image_model("segment"),
    }
    for name, pipeline in pipelines.items():
        save(parent / name, pipeline)
    return {name: parent / name for name in pipelines}


@pytest.fixture(scope="session")
def local(folders: dict[str, Path]) -> dict[str, Any]:
    """The same models, loaded in the test."""
    return {name: load(path, "cpu") for name, path in folders.items()}


@pytest.fixture(scope="session")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    registry = ModelRegistry(list(folders.values()), device="cpu", latency_target=30, workers=2)
    with run_in_thread(registry) as running:
        yield running
