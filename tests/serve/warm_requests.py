"""Time the first requests of every kind to a server that is ready: python -m tests.serve.warm_requests FOLDER

The folder has the models of the tests, by name. Prints one JSON object: the modules imported and the kernels compiled
by the first request of each route, and the seconds of its first and of its best later request.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from regard.serve.application import make_application
from regard.serve.model_registry import ModelRegistry
from tests.serve.test_routes import png


def bodies() -> dict[str, dict[str, Any]]:
    image, question = png()[0], {"question": "the cat", "context": "that old dog hears the cat in the tree"}
    chat = [{"role": "user", "content": "Un"}]
    return {
        "/translate": {"q": "one two three", "source": "en", "target": "fr"},
        "/translate html": {"q": "<p>one <b>two</b></p>", "source": "auto", "target": "fr", "format": "html"},
        "/translate alternatives": {"q": "one two. three.", "source": "en", "target": "fr", "alternatives": 3},
        "/detect": {"q": "the cat"},
        "/api/translate": {"texts": ["one two three"]},
        "/api/translate greedy": {"texts": ["one two three"], "options": {"method": "greedy"}},
        "/api/translate sample": {"texts": ["one two three"], "options": {"method": "sample"}},
        "/api/translate forbidden": {"texts": ["one two three"], "forbidden": ["deux"]},
        "/api/translate required": {"texts": ["one two three"], "required": ["deux"]},
        "/api/generate": {"model": "letters", "prompts": ["Un"]},
        "/api/generate greedy": {"model": "letters", "prompts": ["Un"], "options": {"method": "greedy"}},
        "/api/generate beam": {"model": "letters", "prompts": ["Un"], "options": {"method": "beam"}},
        "/api/generate stream": {"model": "letters", "prompts": ["Un"], "stream": True},
        "/v1/completions": {"model": "letters", "prompt": "Un", "logprobs": 1, "stop": "e"},
        "/v1/completions greedy": {"model": "letters", "prompt": "Un", "temperature": 0},
        "/v1/chat/completions": {"model": "talk", "messages": chat, "max_tokens": 16},
        "/v1/embeddings": {"model": "moods", "input": "the cat"},
        "/api/embed": {"model": "moods", "texts": ["the cat"]},
        "/api/classify": {"model": "moods", "texts": ["the cat"]},
        "/api/classify image": {"model": "animals", "images": [image]},
        "/api/segment": {"images": [image]},
        "/api/answer": {"questions": [question]},
        "/api/score": {"model": "letters", "texts": ["Un"]},
        "/api/score pairs": {"model": "numbers", "pairs": [["one two", "deux un"]]},
        "/api/attention": {"model": "numbers", "text": "one two"},
        "/api/attention arrays": {"model": "numbers", "text": "one two", "format": "arrays"},
        "/api/attention generator": {"model": "letters", "text": "Un"},
        "/api/attention encoder": {"model": "moods", "text": "the cat"},
        "/api/attention image": {"model": "animals", "image": image},
    }


def main(folder: str) -> None:
    logging.disable(logging.WARNING)
    folders = [path for path in sorted(Path(folder).iterdir()) if (path / "config.json").exists()]
    app = make_application(ModelRegistry(folders, device="cpu", latency_target=30, workers=1))
    compiled: list[str] = []
    try:
        from numba.core import event

        class Listener(event.Listener):
            def on_start(self, event: Any) -> None:
                compiled.append(str(event.data))

            def on_end(self, event: Any) -> None:
                pass

        event.register("numba:compile", Listener())
    except ImportError:
        pass
    report = {}
    with TestClient(app) as client:
        client.get("/ready")
        for name, body in bodies().items():
            modules = set(sys.modules)
            compiled.clear()
            seconds = []
            for _ in range(6):
                start = time.perf_counter()
                response = client.post(name.partition(" ")[0], json=body)
                seconds.append(time.perf_counter() - start)
                assert response.status_code == 200, (name, response.text)
                if len(seconds) == 1:
                    imported, kernels = sorted(set(sys.modules) - modules), list(compiled)
            report[name] = {
                "imported": imported,
                "compiled": kernels,
                "first": seconds[0],
                "later": sorted(seconds[1:])[2],
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
