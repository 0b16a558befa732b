"""Python client of a server: the same calls as a local model."""

import base64
import dataclasses
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from regard.data.text.questions import Question
from regard.decode import DecodeConfig, Hypothesis
from regard.errors import RegardError
from regard.pipelines import Classification, Continuation, SequenceScore, Translation
from regard.pipelines.image_model import ImageLike
from regard.pipelines.pipeline import best_text
from regard.pipelines.translation import Split

# Texts of one request.
BLOCK_SIZE = 64
# Options of the search that a request can set.
OPTIONS = (
    "method", "beam", "n_best", "length_penalty", "max_len", "min_len", "temperature", "top_k", "top_p", "seed",
    "shortlist",
)  # fmt: skip


def connect(url: str, model: str | None = None, *, token: str | None = None, timeout: float = 60.0) -> "RemoteModel":
    """A model of a server (`regard serve`), with the same calls as a local one.

    `model` is its name; it is not needed if the server has one model. A request that the server refuses because it is
    at its capacity is sent again when the server says so, within `timeout` seconds.

    >>> model = connect("http://127.0.0.1:8000")  # doctest: +SKIP
    >>> model("The cat chased the mouse.")  # doctest: +SKIP
    'Le chat a chassé la souris.'
    """
    if not url.startswith(("http://", "https://")):
        raise RegardError(f"{url!r} is not the address of a server.", "Pass an address such as http://127.0.0.1:8000.")
    client = RemoteModel(url.rstrip("/"), model or "", {}, token, timeout)
    models = {served["id"]: served for served in client.request("/v1/models")["data"]}
    if model is None and len(models) > 1:
        raise RegardError(f"{url} has several models: {', '.join(models)}.", "Pass the name of one.")
    if model is not None and model not in models:
        raise RegardError(f"{url} has no model {model!r}.", f"Models: {', '.join(models)}.")
    description = models[model] if model is not None else next(iter(models.values()))
    return dataclasses.replace(client, name=description["id"], description=description)


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """A model on a server. Make it with `connect`."""

    url: str
    name: str
    description: dict[str, Any]
    """tasks and languages of the model"""
    token: str | None = dataclasses.field(default=None, repr=False)
    timeout: float = 60.0

    @overload
    def __call__(self, texts: str, to: str | None = None, source_language: str | None = None) -> str: ...
    @overload
    def __call__(
        self, texts: Sequence[str], to: str | None = None, source_language: str | None = None
    ) -> list[str]: ...
    def __call__(self, texts: str | Sequence[str], to: str | None = None, source_language: str | None = None) -> Any:
        """The best translation of a text (between these languages, for a model of several), or its continuation; a list
        for several.
        """
        if "translate" in self.description["tasks"]:
            return best_text(texts, self.translate(texts, split="auto", to=to, source_language=source_language))
        return best_text(texts, self.generate(texts))

    def translate(
        self,
        lines: str | Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        split: Split = "never",
        **options: Any,
    ) -> Any:
        """The `n_best` translations of each line, best first; one list for a single string.

        `options` are other fields of the request: `required`, `forbidden`, `truncate`, `to`, `source_language`.
        """
        if isinstance(lines, str):
            return self.translate([lines], config, prefixes=prefixes, split=split, **options)[0]
        results: list[list[Translation]] = []
        for start in range(0, len(lines), BLOCK_SIZE):
            block = slice(start, start + BLOCK_SIZE)
            response = self._call(
                "translate",
                texts=list(lines[block]),
                options=_options(config),
                prefixes=None if prefixes is None else list(prefixes[block]),
                split=split,
                **options,
            )
            results += [_outputs(Translation, n_best) for n_best in response["translations"]]
        return results

    def translate_stream(
        self, lines: Iterable[str], config: DecodeConfig | None = None, *, block_size: int = BLOCK_SIZE, **options: Any
    ) -> Iterator[list[Translation]]:
        """The translations of each line, like `translate`, for any number of lines."""
        iterator = iter(lines)
        while block := [line.removesuffix("\n") for line in islice(iterator, block_size)]:
            yield from self.translate(block, config, **options)

    def generate(
        self,
        prompts: str | Sequence[str],
        config: DecodeConfig | None = None,
        *,
        forbidden: Sequence[str] | None = None,
        truncate: bool = False,
    ) -> Any:
        """The continuations of each prompt, by default sampled; one list for a single string."""
        if isinstance(prompts, str):
            return self.generate([prompts], config, forbidden=forbidden, truncate=truncate)[0]
        words = None if forbidden is None else list(forbidden)
        response = self._call(
            "generate", prompts=list(prompts), options=_options(config), forbidden=words, truncate=truncate
        )
        return [_outputs(Continuation, n_best) for n_best in response["continuations"]]

    def generate_stream(
        self, prompt: str, config: DecodeConfig | None = None, *, truncate: bool = False
    ) -> Iterator[str]:
        """The continuation of a prompt, piece by piece as it is generated. Closing the iterator stops the server."""
        body = {"prompts": [prompt], "options": _options(config), "truncate": truncate, "stream": True}
        with self._open("/api/generate", {"model": self.name, **body}) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RegardError(event["error"])
                yield event["text"]

    def embed(self, texts: str | Sequence[str], *, truncate: bool = False) -> Float[np.ndarray, "..."]:
        """Embeddings, one per text; one vector for a single string."""
        if isinstance(texts, str):
            return self.embed([texts], truncate=truncate)[0]
        return np.array(self._call("embed", texts=list(texts), truncate=truncate)["vectors"], np.float32)

    def classify(self, inputs: Any, *, truncate: bool = False) -> Any:
        """The label of each text, pair of texts or image; one result for a single text or the path of an image."""
        if isinstance(inputs, str | Path):
            return self.classify([inputs], truncate=truncate)[0]
        if "embed" in self.description["tasks"]:
            response = self._call("classify", texts=list(inputs), truncate=truncate)
        else:
            response = self._call("classify", images=[_encode_image(image) for image in inputs])
        return [Classification(**result) for result in response["results"]]

    def segment(self, images: ImageLike | Sequence[ImageLike]) -> Any:
        """The label index of every pixel of each image; one mask for the path of a single file."""
        if isinstance(images, str | Path):
            return self.segment([images])[0]
        several = cast(Sequence[ImageLike], images)
        response = self._call("segment", images=[_encode_image(image) for image in several])
        dtype = np.min_scalar_type(max(0, len(response["labels"]) - 1))
        masks: list[Int[np.ndarray, "_ _"]] = [np.array(mask, dtype) for mask in response["masks"]]
        return masks

    def answer(self, questions: Question | Sequence[Question], *, empty: bool = False) -> Any:
        """The answer to each question, a span of its context; one answer for a single `Question`."""
        if isinstance(questions, Question):
            return self.answer([questions], empty=empty)[0]
        asked = [{"question": question.question, "context": question.context} for question in questions]
        return self._call("answer", questions=asked, empty=empty)["answers"]

    def score(self, inputs: Any, *, truncate: bool = False) -> Any:
        """The log-probability of each text, or of each pair of source and target; one score for a single input."""
        is_translator = "translate" in self.description["tasks"]
        if isinstance(inputs, str) or (isinstance(inputs, tuple) and all(isinstance(text, str) for text in inputs)):
            return self.score([inputs], truncate=truncate)[0]
        field = "pairs" if is_translator else "texts"
        response = self._call("score", **{field: list(inputs)}, truncate=truncate)
        return [SequenceScore(**score) for score in response["scores"]]

    def attention_page(self, text: str, target: str | None = None, *, context: str | None = None) -> bytes:
        """The page of the viewer with the attention of the model on a text."""
        body = {"model": self.name, "text": text, "target": target, "context": context}
        with self._open("/api/attention", body) as response:
            return response.read()

    def _call(self, task: str, **fields: Any) -> Any:
        body = {"model": self.name, **{name: value for name, value in fields.items() if value is not None}}
        return self.request(f"/api/{task}", body)

    def request(self, path: str, body: Any = None) -> Any:
        """The response of the server to a request, from JSON."""
        with self._open(path, body) as response:
            return json.load(response)

    def _open(self, path: str, body: Any = None) -> Any:
        deadline = time.monotonic() + self.timeout
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        while True:
            request = urllib.request.Request(self.url + path, data, headers)
            try:
                return urllib.request.urlopen(request, timeout=self.timeout)
            except urllib.error.HTTPError as error:
                with error:
                    wait = error.headers.get("Retry-After", "") if error.code == 429 else ""
                    message = _error_message(error.read(), error.code)
                if not wait.isdigit() or time.monotonic() + int(wait) > deadline:
                    raise RegardError(message) from None
                time.sleep(int(wait))
            except (OSError, HTTPException) as error:
                reason = getattr(error, "reason", error)
                raise RegardError(f"{self.url} did not respond ({reason}).", "Check that the server runs.") from None


def _error_message(content: bytes, status: int) -> str:
    try:
        error = json.loads(content)["error"]
        return str(error if isinstance(error, str) else error["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server responded with status {status}."


def _options(config: DecodeConfig | None) -> dict[str, Any]:
    """The options of a configuration that differ from the defaults."""
    if config is None:
        return {}
    options = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "method" or value != field.default:
            if field.name not in OPTIONS:
                raise RegardError(f"{field.name} cannot be set for a model on a server.", "Leave it out.")
            options[field.name] = value
    return options


def _outputs(kind: Any, n_best: list[dict[str, Any]]) -> list[Any]:
    """Translations or continuations from JSON."""
    return [
        kind(
            output["text"],
            output["score"],
            Hypothesis(output["tokens"], output["score"], output["logprob"], output["token_logprobs"]),
        )
        for output in n_best
    ]


def _encode_image(image: ImageLike) -> str:
    if isinstance(image, str | Path):
        try:
            content = Path(image).read_bytes()
        except OSError as error:
            raise RegardError(f"{image}: cannot be read ({error.strerror}).", "Fix the path.") from None
    else:
        buffer = io.BytesIO()
        (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, "PNG")
        content = buffer.getvalue()
    return base64.b64encode(content).decode()
