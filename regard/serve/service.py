"""The work of a server: requests run on the schedulers of its models; nothing here depends on an API format."""

import asyncio
import base64
import binascii
import io
from collections.abc import AsyncIterator, Callable, Hashable, Sequence, Sized
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from PIL import Image

from regard.data.images.decoding import image_errors, open_header
from regard.data.text.questions import Question
from regard.decode import NBest
from regard.pipelines.decoding_request import DecodingRequest
from regard.pipelines.text_generator import StreamDecoder
from regard.serve.authentication import Authentication
from regard.serve.errors import RequestError
from regard.serve.limits import ServeLimits
from regard.serve.load_shedding import RequestQueue
from regard.serve.metrics import RequestMetrics
from regard.serve.registry import ModelRegistry, ServedModel
from regard.viewer import look

T = TypeVar("T")
Languages = tuple[str | None, str | None]
"""codes of target and source language, for a translator of several"""
NO_LANGUAGES: Languages = (None, None)
# Longer texts are tokenized, and longer outputs decoded, in another thread, so that other requests do not wait.
_INLINE_CHARACTERS = 4000
_INLINE_TOKENS = 2000
# Weights of an attention response.
MAX_WEIGHTS = 4_000_000


@dataclass
class Service:
    """Models, limits and tokens of a server."""

    registry: ModelRegistry
    limits: ServeLimits = field(default_factory=ServeLimits)
    authentication: Authentication = field(default_factory=Authentication)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    queue: RequestQueue = field(default_factory=RequestQueue)
    is_stopping: bool = False
    image_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: int = 0
    """requests that have reached the application"""

    def excess_seconds(self, more: int = 0) -> float:
        """How much longer than allowed a new request would wait for the event loop and a model; 0: it is accepted.

        `more` requests wait in front of the queue.
        """
        items = len(self.queue) + max(0, more)
        seconds = items * self.queue.seconds_per_request
        return min(model.scheduler.excess_seconds(seconds, items) for model in self.registry.models)

    async def prepare(
        self, texts: Sequence[Sized], make: Callable[[], DecodingRequest[T]], **phrases: Sequence[str] | None
    ) -> DecodingRequest[T]:
        """Check the limits and encode the texts of a request; `phrases` are those of `ServeLimits.check_texts`."""
        self.limits.check_texts(texts, **phrases)
        is_short = sum(map(len, texts)) <= _INLINE_CHARACTERS and not any(phrases.values())
        request = make() if is_short else await asyncio.to_thread(make)
        self.limits.check_config(request.encoded.config)
        self.limits.check_sources(request.encoded.sources)
        return request

    async def decode(self, model: ServedModel, request: DecodingRequest[T], timeout: float) -> list[T]:
        """Decode a request and return its results. If the caller is cancelled, so is the work."""
        results = await asyncio.wrap_future(model.scheduler.submit(request, timeout=timeout))
        tokens = sum(len(hypothesis.ids) for n_best in results for hypothesis in n_best)
        return request.finish(results) if tokens <= _INLINE_TOKENS else await asyncio.to_thread(request.finish, results)

    async def call(
        self,
        model: ServedModel,
        kind: tuple[Hashable, ...],
        function: Callable[[list[Any]], Sequence[Any]],
        inputs: list[Any],
        timeout: float,
        is_alone: bool = False,
    ) -> list[Any]:
        """Run a function of a list of inputs, batched with other requests of the same kind."""
        if not inputs:
            return []
        future = model.scheduler.call(kind, function, inputs, timeout=timeout, is_alone=is_alone)
        return await asyncio.wrap_future(future)

    async def check_texts(self, model: ServedModel, texts: Sequence[str], *, truncate: bool = False) -> None:
        """Check the limits on texts that a model encodes as a whole."""
        self.limits.check_texts(texts)
        # One character may become several tokens: characters of other scripts, ligatures.
        long = [text for text in texts if len(text) > self.limits.max_source_tokens // 20]
        if long and not truncate:
            self.limits.check_sources(await asyncio.to_thread(model.pipeline.tokenizers[0].encode_batch, long))

    async def embed(self, model: ServedModel, texts: Sequence[str], truncate: bool, timeout: float) -> list[Any]:
        await self.check_texts(model, texts, truncate=truncate)
        embed = model.pipeline.embed
        return await self.call(
            model, ("embed", truncate), lambda batch: embed(batch, truncate=truncate), list(texts), timeout
        )

    async def classify(self, model: ServedModel, inputs: Sequence[Any], truncate: bool, timeout: float) -> list[Any]:
        """Classify texts, pairs of texts, or images."""
        await self.check_texts(model, [text for item in inputs for text in _texts_of(item)], truncate=truncate)
        classify, options = model.pipeline.classify, {"truncate": truncate} if "embed" in model.tasks else {}
        return await self.call(
            model, ("classify", truncate), lambda batch: classify(batch, **options), list(inputs), timeout
        )

    async def answer(self, model: ServedModel, questions: list[Question], empty: bool, timeout: float) -> list[str]:
        texts = [text for question in questions for text in (question.question, question.context)]
        await self.check_texts(model, texts)
        answer = model.pipeline.answer
        return await self.call(model, ("answer", empty), lambda batch: answer(batch, empty=empty), questions, timeout)

    async def score(
        self,
        model: ServedModel,
        inputs: Sequence[Any],
        truncate: bool,
        timeout: float,
        languages: Languages = NO_LANGUAGES,
    ) -> list[Any]:
        """Score texts, or pairs of source and target."""
        await self.check_texts(model, [text for item in inputs for text in _texts_of(item)], truncate=truncate)
        score = model.pipeline.with_target(*languages).score
        return await self.call(
            model, ("score", truncate, languages), lambda batch: score(batch, truncate=truncate), list(inputs), timeout
        )

    async def score_tokens(self, model: ServedModel, sequences: list[list[int]], timeout: float) -> list[Any]:
        """The log-probabilities of the tokens of sequences, None for those of one token."""
        self.limits.check_sources(sequences)
        longer = [ids for ids in sequences if len(ids) > 1]
        scores = iter(await self.call(model, ("score tokens",), model.pipeline.score_tokens, longer, timeout))
        return [next(scores) if len(ids) > 1 else None for ids in sequences]

    async def segment(self, model: ServedModel, images: Sequence[Any], timeout: float) -> list[Any]:
        return await self.call(model, ("segment",), model.pipeline.segment, list(images), timeout)

    async def look(
        self,
        model: ServedModel,
        source: Any,
        read: Callable[[Any], T],
        timeout: float,
        languages: Languages = NO_LANGUAGES,
        **options: Any,
    ) -> T:
        """What `read` makes of the recorded attention of a model on an input."""

        def run(inputs: list[Any]) -> list[T]:
            with model.look_lock:
                pipeline = model.viewed_pipeline.with_target(*languages)
                return [read(look(pipeline, inputs[0], name=model.name, **options))]

        if isinstance(source, str):
            await self.check_texts(model, [source, *(text for text in options.values() if isinstance(text, str))])
        return (await self.call(model, ("look",), run, [source], timeout, is_alone=True))[0]

    async def stream(
        self, model: ServedModel, request: DecodingRequest[Any], decoder: StreamDecoder, timeout: float
    ) -> AsyncIterator[str | list[NBest]]:
        """The text of the first source of a request, piece by piece; at the end its hypotheses.

        Closing the iterator stops the work. The request is submitted by the first `anext`.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def on_token(index: int, token: int) -> None:
            if index == 0 and (text := decoder.add(token)):
                loop.call_soon_threadsafe(pieces.put_nowait, text)

        future: Future[list[NBest]] = model.scheduler.submit(request, timeout=timeout, on_token=on_token)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(pieces.put_nowait, None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            results = future.result(timeout=0)
            if request.encoded.config.method == "beam" and results and results[0]:
                rest = decoder.decode(results[0][0].ids)
            else:
                rest = decoder.flush()
            if rest:
                yield rest
            yield results
        finally:
            future.cancel()


def _texts_of(value: Any) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ("",)


def decode_images(contents: Sequence[str], max_pixels: int) -> list[Image.Image]:
    """Images from files in base64, never from paths; an error if all together have too many pixels.

    >>> decode_images(["bm8gaW1hZ2U="], 1000)
    Traceback (most recent call last):
    regard.errors.RegardError: image 1: not a readable image. Replace or remove it. Supported formats: ...
    """
    with ExitStack() as stack:
        images, pixels = [], 0
        for i, content in enumerate(contents, 1):
            with image_errors(f"image {i}"):
                file = io.BytesIO(_from_base64(content))
                images.append(stack.enter_context(open_header(file)))
            pixels += images[-1].width * images[-1].height
            if pixels > max_pixels:
                message = f"The images of the request have more than {max_pixels} pixels."
                raise RequestError(message, "Send fewer or smaller ones.", status=413)
        for i, image in enumerate(images, 1):
            with image_errors(f"image {i}"):
                image.load()
        return [image.copy() for image in images]


def _from_base64(content: str) -> bytes:
    try:
        return base64.b64decode(content.partition(",")[2] if content.startswith("data:") else content, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the base64 is invalid") from None
