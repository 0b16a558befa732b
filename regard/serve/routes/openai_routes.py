"""Routes in the format of OpenAI: /v1/models, /v1/completions, /v1/chat/completions and /v1/embeddings."""

import base64
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from regard.decode import DecodeConfig, Hypothesis
from regard.decode.engine.engine_runner import length_limits
from regard.decode.rules.token_rules import TOKEN_RULES
from regard.pipelines import Continuation, TextGenerator
from regard.pipelines.decoding_request import DecodingRequest
from regard.serve.model_registry import ServedModel
from regard.serve.routes.route_helpers import event_stream, find_model
from regard.serve.routes.schemas import ChatBody, CompletionBody, EmbeddingsBody
from regard.serve.routes.stop_sequences import StopSequences
from regard.serve.serve_errors import RequestError
from regard.serve.service import Service

# A temperature below this is greedy decoding.
MIN_TEMPERATURE = 0.001
DEFAULT_CHAT_TOKENS = 256


def make_openai_router(service: Service) -> APIRouter:
    """The routes in the format of OpenAI."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """The models of this server."""
        return {"object": "list", "data": [describe_model(model) for model in service.registry.models]}

    @router.get("/models/{name}")
    async def show_model(name: str) -> dict[str, Any]:
        """One model of this server."""
        models = {model.name: model for model in service.registry.models}
        if name not in models:
            raise RequestError(f"There is no model {name[:100]!r}.", f"Models: {', '.join(models)}.", status=404)
        return describe_model(models[name])

    @router.post("/completions")
    async def complete(body: CompletionBody, request: Request) -> Any:
        """Continue prompts with a language model; with `stream`, as server-sent events."""
        model, timeout = find_model(service, request, body.model, "generate")
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        call = await _prepare_call(service, model, prompts, body, body.max_tokens or 16)
        if body.stream:
            if len(prompts) != 1 or body.echo or body.logprobs is not None:
                raise RequestError("stream supports one prompt, without echo and logprobs.", "Leave out stream.")
            return await event_stream(request, _stream(service, call, timeout, is_chat=False))
        results = await service.decode(model, call.request, timeout)
        choices: list[dict[str, Any]] = []
        for prompt, source, limit, outputs in zip(prompts, call.request.sources, call.limits, results):
            for output in outputs:
                text, reason = call.finish(output.text, output.hypothesis, limit)
                logprobs = None
                if body.logprobs is not None:
                    logprobs = _logprobs(model.pipeline, source, output.hypothesis, text)
                text = prompt + text if body.echo else text
                choices.append({"index": len(choices), "text": text, "logprobs": logprobs, "finish_reason": reason})
        return call.response("text_completion", choices, _usage(call.request, results))

    @router.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Any:
        """Answer a conversation with a language model that has a chat template."""
        model, timeout = find_model(service, request, body.model, "chat")
        messages = [message.model_dump() for message in body.messages]
        prompt = model.pipeline.chat_prompt(messages)
        tokens = body.max_completion_tokens or body.max_tokens or DEFAULT_CHAT_TOKENS
        call = await _prepare_call(service, model, [prompt], body, tokens)
        if body.stream:
            return await event_stream(request, _stream(service, call, timeout, is_chat=True))
        results = await service.decode(model, call.request, timeout)
        choices = []
        for index, output in enumerate(results[0]):
            text, reason = call.finish(output.text, output.hypothesis, call.limits[0])
            message = {"role": "assistant", "content": text}
            choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reason})
        return call.response("chat.completion", choices, _usage(call.request, results))

    @router.post("/embeddings")
    async def embed(body: EmbeddingsBody, request: Request) -> Any:
        """Embed texts as vectors."""
        model, timeout = find_model(service, request, body.model, "embed")
        texts = [body.input] if isinstance(body.input, str) else body.input
        width = model.pipeline.embedding_width
        if body.dimensions not in (None, width):
            raise RequestError(f"dimensions must be {width} for this model (got {body.dimensions}).", "Leave it out.")
        vectors = await service.embed(model, texts, False, timeout)
        encode = _to_base64 if body.encoding_format == "base64" else lambda vector: [float(x) for x in vector]
        data = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
        count = sum(len(model.pipeline.encode_for_embedding(text, truncate=True)) for text in texts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    return router


def describe_model(model: ServedModel) -> dict[str, Any]:
    """A model in the list of models."""
    description: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": "regard",
    }
    description |= {"tasks": model.tasks, "language_pairs": [list(pair) for pair in model.language_pairs]}
    # A translator between any two of its languages has no list of pairs.
    return description | ({} if model.language_tokens is None else {"languages": list(model.language_tokens.ids)})


@dataclass
class _Call:
    """A prepared completion."""

    model: ServedModel
    request: DecodingRequest[list[Continuation]]
    limits: list[int]
    stop: StopSequences
    id: str
    created: int

    def finish(self, text: str, hypothesis: Hypothesis, limit: int) -> tuple[str, str]:
        """The text before a stop sequence, and why it ended."""
        text, is_cut = self.stop.cut(text)
        return text, "length" if len(hypothesis.ids) >= limit and not is_cut else "stop"

    def response(self, kind: str, choices: list[Any], usage: dict[str, int] | None = None) -> dict[str, Any]:
        content = {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}
        return {**content, "choices": choices, **({"usage": usage} if usage is not None else {})}


async def _prepare_call(
    service: Service, model: ServedModel, prompts: list[str], body: CompletionBody | ChatBody, max_tokens: int
) -> _Call:
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported.", "Leave it out, or set it to 0.")
    temperature = 1.0 if body.temperature is None else body.temperature
    count = body.n or 1
    generator: TextGenerator = model.pipeline
    # Rules of the model about tokens apply; the request states everything else.
    options: dict[str, Any] = {name: getattr(generator.decoding, name) for name in TOKEN_RULES}
    options |= {"max_len": max_tokens, "min_len": 0}
    if temperature < MIN_TEMPERATURE:
        if count > 1:
            raise RequestError(f"n must be 1 at temperature 0 (got {count}): all outputs are equal.", "Raise it.")
        config = DecodeConfig(method="greedy", **options)
    else:
        seed = secrets.randbits(31) if body.seed is None else body.seed
        options |= {"temperature": temperature, "top_p": 1.0 if body.top_p is None else body.top_p}
        config = DecodeConfig(method="sample", n_best=min(count, 1000), seed=seed, **options)
    if body.stream and count > 1:
        raise RequestError(f"stream supports n = 1 (got {count}).", "Leave out stream, or n.")
    is_chat = isinstance(body, ChatBody)  # the template writes special tokens; elsewhere they are text
    request = await service.prepare(prompts, lambda: generator.prepare(prompts, config, special_tokens=is_chat))
    limits = length_limits(request.sources, request.config, request.special, None, request.max_total_len)
    prefix = "chatcmpl" if is_chat else "cmpl"
    stop = StopSequences.from_field(body.stop)
    return _Call(model, request, limits, stop, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))


async def _stream(service: Service, call: _Call, timeout: float, *, is_chat: bool) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a completion."""
    kind = "chat.completion.chunk" if is_chat else "text_completion"

    def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if is_chat:
            content = {"delta": {"role": "assistant", "content": text} if reason is None else {}}
        return call.response(kind, [{"index": 0, **content, "logprobs": None, "finish_reason": reason}])

    stop = StopSequences(call.stop.sequences)
    (decoder,) = call.model.pipeline.stream_decoders(call.request)
    reason = "stop"
    stream = service.stream(call.model, call.request, decoder, timeout)
    try:
        async for piece in stream:
            if isinstance(piece, str):
                if text := stop.add(piece):
                    yield chunk(text)
                if stop.is_found:
                    break
            else:
                reason = "length" if len(piece[0][0].ids) >= call.limits[0] else "stop"
        if not stop.is_found and (text := stop.flush()):
            yield chunk(text)
        yield chunk("", reason)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


def _logprobs(generator: TextGenerator, source: list[int], hypothesis: Hypothesis, text: str) -> dict[str, Any]:
    """The log-probabilities of the tokens of a text."""
    ids = list(hypothesis.ids)
    decoder = generator.stream_decoder(source)
    pieces = [decoder.add(token) for token in ids]
    tokens: list[str] = []
    values: list[float] = []
    offsets: list[int] = []
    offset = 0
    for piece, value in zip(pieces, hypothesis.token_logprobs):
        if offset >= len(text) and piece:
            break
        tokens.append(piece)
        values.append(value)
        offsets.append(offset)
        offset += len(piece)
    top = [{token: value} for token, value in zip(tokens, values)]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _usage(request: DecodingRequest[Any], results: list[Any]) -> dict[str, int]:
    prompt = sum(map(len, request.sources))
    completion = sum(len(output.hypothesis.ids) for outputs in results for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _to_base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
