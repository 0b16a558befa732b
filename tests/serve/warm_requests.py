"""Time the first requests of every kind to a server that is ready: python -m tests.serve.warm_requests COUNT FOLDER …

The folders are the models numbers, talk, moods and animals of the tests. Prints one JSON object per kind of
request: what the first one imported, compiled or derived, and the seconds of COUNT of them.
"""

import gc
import json
import logging
import sys
import time
from typing import Any

from fastapi.testclient import TestClient

from regard.graph.entries import _graphs
from regard.serve.application import make_application
from regard.serve.registry import ModelRegistry
from tests.serve.test_routes import png


def bodies() -> dict[str, dict[str, Any]]:
    """One request per path through the server, by its route and what is special about it."""
    image, chat = png()[0], [{"role": "user", "content": "Un"}]
    return {
        "/translate": {"q": "one two three", "source": "en", "target": "fr"},
        "/translate html": {"q": "<p>one <b>two</b></p>", "source": "en", "target": "fr", "format": "html"},
        "/translate alternatives": {"q": "one two. three.", "source": "en", "target": "fr", "alternatives": 3},
        "/api/translate greedy": {"texts": ["one two three"], "options": {"method": "greedy"}},
        "/api/translate sample": {"texts": ["one two three"], "options": {"method": "sample"}},
        "/api/translate forbidden": {"texts": ["one two three"], "forbidden": ["deux"]},
        "/api/generate": {"prompts": ["Un"]},
        "/api/generate beam": {"prompts": ["Un"], "options": {"method": "beam"}},
        "/api/generate stream": {"prompts": ["Un"], "stream": True},
        "/v1/completions": {"model": "talk", "prompt": "Un", "logprobs": 1, "stop": "e"},
        "/v1/completions greedy": {"model": "talk", "prompt": "Un", "temperature": 0},
        "/v1/chat/completions": {"model": "talk", "messages": chat, "max_tokens": 16},
        "/v1/embeddings": {"model": "moods", "input": "the cat"},
        "/api/classify": {"model": "moods", "texts": ["the cat"]},
        "/api/classify image": {"model": "animals", "images": [image]},
        "/api/score": {"model": "talk", "texts": ["Un"]},
        "/api/score pairs": {"model": "numbers", "pairs": [["one two", "deux un"]]},
        "/api/attention": {"model": "numbers", "text": "one two"},
        "/api/attention arrays": {"model": "numbers", "text": "one two", "format": "arrays"},
        "/api/attention image": {"model": "animals", "image": image},
    }


def state() -> set[str]:
    """The modules, compiled kernels and derived graphs of this process."""
    modules = {f"module {name}" for name in sys.modules}
    dispatchers = [one for one in gc.get_objects() if type(one).__name__ == "CPUDispatcher"]
    kernels = {f"kernel {one.__name__} {signature}" for one in dispatchers for signature in one.overloads}
    graphs = {f"graph {id(model)} {key}" for model, made in _graphs.items() for key in made}
    return modules | kernels | graphs


def main(count: str, *folders: str) -> None:
    logging.disable(logging.WARNING)
    app = make_application(ModelRegistry(folders, device="cpu", latency_target=30, workers=1))
    with TestClient(app) as client:
        client.get("/ready")
        for name, body in bodies().items():
            before, seconds = state(), []
            for i in range(int(count)):
                start = time.perf_counter()
                response = client.post(name.partition(" ")[0], json=body)
                seconds.append(round(time.perf_counter() - start, 4))
                assert response.status_code == 200, (name, response.text)
                new = sorted(state() - before) if i == 0 else new
            print(json.dumps({"request": name, "new": new, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
