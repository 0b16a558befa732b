"""Native routes, /api/…: everything that the pipelines can do, with all options; `regard.connect` uses them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from regard.data.text.questions import Question
from regard.serve.errors import RequestError
from regard.serve.registry import ServedModel, attention_page
from regard.serve.routes.responses import event_stream, find_model, json_response
from regard.serve.routes.schemas import (
    AnswerBody,
    AttentionBody,
    ClassifyBody,
    EmbedBody,
    GenerateBody,
    ScoreBody,
    SegmentBody,
    TranslateBody,
)
from regard.serve.service import MAX_WEIGHTS, Service, decode_images
from regard.viewer import Look


def make_native_router(service: Service) -> APIRouter:
    """The native routes."""
    router = APIRouter(prefix="/api", tags=["Regard"])

    @router.post("/translate")
    async def translate(body: TranslateBody, request: Request) -> Response:
        """The n-best translations of each text, with scores."""
        model, timeout = find_model(service, request, body.model, "translate")
        phrases = {"prefixes": body.prefixes, "required": body.required, "forbidden": body.forbidden}
        options: dict[str, Any] = {**phrases, "to": body.to, "source_language": body.source_language}
        _check_count("prefixes", body.prefixes, len(body.texts))
        config = body.options.to_config(model.pipeline.decoding)
        prepared = await service.prepare(
            body.texts,
            lambda: model.pipeline.prepare(body.texts, config, split=body.split, truncate=body.truncate, **options),
            **phrases,
        )
        results = await service.decode(model, prepared, timeout)
        return await json_response({"model": model.name, "translations": [_outputs(n_best) for n_best in results]})

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Any:
        """Continuations of each prompt, with scores; with `stream`, pieces of text as server-sent events."""
        model, timeout = find_model(service, request, body.model, "generate")
        config = body.options.to_config(model.pipeline.decoding)
        options = {"forbidden": body.forbidden, "truncate": body.truncate}
        prepared = await service.prepare(
            body.prompts, lambda: model.pipeline.prepare(body.prompts, config, **options), forbidden=body.forbidden
        )
        if not body.stream:
            results = await service.decode(model, prepared, timeout)
            return await json_response({"model": model.name, "continuations": [_outputs(n_best) for n_best in results]})
        if len(body.prompts) != 1 or config.n_best > 1:
            raise RequestError("stream supports one prompt and n_best = 1.", "Leave out stream.")

        async def pieces() -> AsyncIterator[dict[str, str]]:
            stream = service.stream(model, prepared, model.pipeline.stream_decoders(prepared)[0], timeout)
            try:
                async for piece in stream:
                    if isinstance(piece, str):
                        yield {"text": piece}
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

        return await event_stream(request, pieces())

    @router.post("/classify")
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """The label of each text, pair of texts or image, with the probabilities of all labels."""
        model, timeout = find_model(service, request, body.model, "classify")
        inputs: list[Any]
        if "embed" in model.tasks:
            if body.texts is None or body.images is not None:
                raise RequestError(f"{model.name} classifies texts.", "Pass texts, and no images.")
            inputs = list(body.texts)
        else:
            if body.images is None or body.texts is not None:
                raise RequestError(f"{model.name} classifies images.", "Pass images, and no texts.")
            inputs = await _decode_images(service, body.images)
        results = await service.classify(model, inputs, body.truncate, timeout)
        columns = ("label", "probability", "probabilities")
        rows = [{name: getattr(result, name) for name in columns} for result in results]
        return await json_response({"model": model.name, "results": rows})

    @router.post("/segment")
    async def segment(body: SegmentBody, request: Request) -> Response:
        """The label index of every pixel of each image."""
        model, timeout = find_model(service, request, body.model, "segment")
        masks = await service.segment(model, await _decode_images(service, body.images), timeout)
        return await json_response({"model": model.name, "labels": list(model.pipeline.labels), "masks": masks})

    @router.post("/answer")
    async def answer(body: AnswerBody, request: Request) -> dict[str, Any]:
        """The answer to each question, a span of its context."""
        model, timeout = find_model(service, request, body.model, "answer")
        questions = [Question(str(i), question.question, question.context) for i, question in enumerate(body.questions)]
        return {"model": model.name, "answers": await service.answer(model, questions, body.empty, timeout)}

    @router.post("/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        """A vector for each text."""
        model, timeout = find_model(service, request, body.model, "embed")
        vectors = await service.embed(model, body.texts, body.truncate, timeout)
        return await json_response({"model": model.name, "vectors": vectors})

    @router.post("/score")
    async def score(body: ScoreBody, request: Request) -> dict[str, Any]:
        """The log-probability of each text, or of each target given its source."""
        model, timeout = find_model(service, request, body.model, "score")
        is_translator = "translate" in model.tasks
        inputs: Any = body.pairs if is_translator else body.texts
        if inputs is None:
            needed = "pairs of source and target" if is_translator else "texts"
            raise RequestError(f"{model.name} scores {needed}.", f"Pass {'pairs' if is_translator else 'texts'}.")
        languages = (body.to, body.source_language)
        scores = await service.score(model, list(inputs), body.truncate, timeout, languages)
        return {"model": model.name, "scores": [{"logprob": score.logprob, "tokens": score.tokens} for score in scores]}

    @router.post("/attention", response_model=None)
    async def attention(body: AttentionBody, request: Request) -> Response:
        """The attention of a model on a text or an image, as a page of the viewer or as arrays."""
        model, timeout = find_model(service, request, body.model, "attention")
        if body.format == "page":
            page = await _look(service, model, body, attention_page, timeout)
            return HTMLResponse(page, headers={"Cache-Control": "no-store"})
        return await json_response(
            {"model": model.name, **await _look(service, model, body, _attention_arrays, timeout)}
        )

    return router


def _attention_arrays(seen: Any) -> dict[str, Any]:
    """The weights of all attentions, with their rows and columns."""
    if not isinstance(seen, Look):
        raise RequestError("Arrays are available for texts.", 'Pass format "page".')
    if sum(layer.heads * len(layer.rows) * len(layer.columns) for layer in seen.maps.values()) > MAX_WEIGHTS:
        raise RequestError(f"There are more than {MAX_WEIGHTS:,} weights.", "Pass a shorter text.", status=413)
    maps = {
        name: {"kind": layer.kind, "rows": layer.rows, "columns": layer.columns, "weights": layer.weights}
        for name, layer in seen.maps.items()
    }
    return {"source": seen.source, "output": seen.translation, "maps": maps}


async def _look(service: Service, model: ServedModel, body: AttentionBody, read: Any, timeout: float) -> Any:
    if model.pipeline.tokenizers:
        if body.text is None or body.image is not None:
            raise RequestError(f"{model.name} processes texts.", "Pass text, and no image.")
        languages = (body.to, body.source_language)
        return await service.look(model, body.text, read, timeout, languages, target=body.target, context=body.context)
    if body.image is None or body.text is not None:
        raise RequestError(f"{model.name} processes images.", "Pass image, and no text.")
    (image,) = await _decode_images(service, [body.image])
    return await service.look(model, image, read, timeout)


async def _decode_images(service: Service, images: list[str]) -> list[Any]:
    service.limits.check_texts([""] * len(images))
    async with service.image_lock:  # the images of one request at a time are decoded
        return await asyncio.to_thread(decode_images, images, service.limits.max_pixels)


def _check_count(name: str, values: list[str] | None, count: int) -> None:
    if values is not None and len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} texts.", "Pass one per text.")


def _outputs(n_best: list[Any]) -> list[dict[str, Any]]:
    """Translations or continuations, best first."""
    return [
        {
            "text": output.text,
            "score": output.score,
            "logprob": output.hypothesis.logprob,
            "tokens": output.hypothesis.ids,
            "token_logprobs": output.hypothesis.token_logprobs,
        }
        for output in n_best
    ]
