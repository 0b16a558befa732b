"""Routes in the format of OpenAI: /v1/models, /v1/completions, /v1/chat/completions and /v1/embeddings."""

import asyncio
import base64
import secrets
import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request

from regard.decode import DecodeConfig, Hypothesis
from regard.decode.rules import TOKEN_RULES, length_limits
from regard.pipelines import Continuation, TextGenerator
from regard.pipelines.decoding_request import DecodingRequest
from regard.pipelines.text_generator import TokenScores
from regard.serve.errors import RequestError
from regard.serve.registry import ServedModel
from regard.serve.routes.responses import event_stream, find_model, json_response
from regard.serve.routes.schemas import ChatBody, CompletionBody, EmbeddingsBody, GenerationBody, StreamOptions
from regard.serve.service import Service

# A temperature below this is greedy decoding.
MIN_TEMPERATURE = 0.001
DEFAULT_CHAT_TOKENS = 256
_DECODED_TOKENS = 16
T = TypeVar("T")


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
        prompts = _prompts(body.prompt)
        if body.max_tokens == 0 and not body.echo:
            raise RequestError("max_tokens must be at least 1 without echo (got 0).", "Raise it.")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        call = await _prepare_call(service, model, prompts, body, max(1, max_tokens))
        if body.stream:
            if len(prompts) != 1 or body.echo or body.logprobs is not None:
                raise RequestError("stream supports one prompt, without echo and logprobs.", "Leave out stream.")
            return await event_stream(request, _stream(service, call, timeout, body.stream_options, is_chat=False))
        results = [[_NOTHING]] * len(prompts)
        if max_tokens > 0:
            results = await service.decode(model, call.request, timeout)
        outputs = await _in_thread(body, lambda: call.finish_all(results))
        sequences = [[*call.request.encoded.sources[output.source], *output.ids] for output in outputs]
        scores: list[TokenScores | None] = [None] * len(outputs)
        if body.logprobs is not None and (body.echo or body.logprobs):
            scores = await service.score_tokens(model, sequences, timeout)

        def make_choice(index: int) -> dict[str, Any]:
            output = outputs[index]
            prompt, text, logprobs = prompts[output.source], output.text, None
            if body.echo:
                text = (prompt if isinstance(prompt, str) else model.pipeline.tokenizer.decode(prompt)) + text
            if body.logprobs is not None:
                first = len(call.request.encoded.sources[output.source])
                if body.echo:  # all but the start token
                    first = len(model.pipeline.special.add_special_tokens([])) if isinstance(prompt, str) else 0
                offset = len(text) - len(output.text)
                logprobs = _logprobs(call, output, scores[index], first, offset, has_top=body.logprobs > 0)
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.reason}

        choices = await _in_thread(body, lambda: list(map(make_choice, range(len(outputs)))))
        return await json_response(call.response("text_completion", choices, call.usage(outputs)))

    @router.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Any:
        """Answer a conversation with a language model that has a chat template."""
        model, timeout = find_model(service, request, body.model, "chat")
        messages = [message.model_dump() for message in body.messages]
        prompt = model.pipeline.chat_prompt(messages)
        tokens = body.max_completion_tokens or body.max_tokens or DEFAULT_CHAT_TOKENS
        call = await _prepare_call(service, model, [prompt], body, tokens)
        if body.stream:
            return await event_stream(request, _stream(service, call, timeout, body.stream_options, is_chat=True))
        results = await service.decode(model, call.request, timeout)
        outputs = await _in_thread(body, lambda: call.finish_all(results))
        choices = []
        for index, output in enumerate(outputs):
            message = {"role": "assistant", "content": output.text}
            choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": output.reason})
        return await json_response(call.response("chat.completion", choices, call.usage(outputs)))

    @router.post("/embeddings")
    async def embed(body: EmbeddingsBody, request: Request) -> Any:
        """Embed texts as vectors."""
        model, timeout = find_model(service, request, body.model, "embed")
        texts = [body.input] if isinstance(body.input, str) else body.input
        width = model.pipeline.embedding_width
        if body.dimensions not in (None, width):
            raise RequestError(f"dimensions must be {width} for this model (got {body.dimensions}).", "Leave it out.")
        vectors = await service.embed(model, texts, False, timeout)
        encode = _to_base64 if body.encoding_format == "base64" else lambda vector: vector
        data = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
        count = sum(len(model.pipeline.encode_for_embedding(text, truncate=True)) for text in texts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return await json_response({"object": "list", "data": data, "model": model.name, "usage": usage})

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


_NOTHING = Continuation("", 0.0, Hypothesis([], 0.0, 0.0, []))
"""the output of a prompt that is not continued"""


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a request: a text, texts, the ids of tokens, or lists of them."""
    is_single = isinstance(value, str) or (value and isinstance(value[0], int))
    return [value] if is_single else value


@dataclass(frozen=True)
class _Output:
    """An output up to its stop sequence."""

    source: int
    """index of its prompt"""
    text: str
    ids: list[int]
    """its tokens, including those of the stop sequence"""
    logprobs: list[float]
    reason: str


MAX_STOP_SEQUENCES = 4


class StopSequences:
    """Cuts a text that arrives piece by piece before the first stop sequence.

    >>> stop = StopSequences(["END"])
    >>> [stop.add(piece) for piece in ("one E", "N", "D two")], stop.is_found
    (['one ', '', ''], True)
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        self.sequences = [sequence for sequence in sequences if sequence]
        self.is_found = False
        self._held = ""

    @classmethod
    def from_field(cls, value: str | Sequence[str] | None) -> "StopSequences":
        """From the field `stop` of a request: a string, a list or nothing."""
        sequences = [] if value is None else [value] if isinstance(value, str) else list(value)
        if len(sequences) > MAX_STOP_SEQUENCES:
            raise RequestError(f"stop has {len(sequences)} sequences; at most {MAX_STOP_SEQUENCES} are allowed.")
        return cls(sequences)

    def add(self, piece: str) -> str:
        """The text that can be shown: the end that may begin a stop sequence is held back."""
        if self.is_found:
            return ""
        text = self._held + piece
        starts = [start for sequence in self.sequences if (start := text.find(sequence)) >= 0]
        if starts:
            self.is_found, self._held = True, ""
            return text[: min(starts)]
        held = max((_overlap(text, sequence) for sequence in self.sequences), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def cut(self, text: str) -> tuple[str, bool]:
        """A whole text before its first stop sequence, and whether there was one.

        >>> StopSequences(["."]).cut("One. Two.")
        ('One', True)
        """
        stop = StopSequences(self.sequences)
        return stop.add(text) + stop.flush(), stop.is_found


def _overlap(text: str, sequence: str) -> int:
    """The length of the longest end of the text that is a beginning of the sequence."""
    lengths = range(min(len(text), len(sequence) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(sequence[:length])), 0)


@dataclass
class _Call:
    """A prepared completion."""

    model: ServedModel
    request: DecodingRequest[list[Continuation]]
    limits: list[int]
    stop: StopSequences
    id: str
    created: int

    def finish_all(self, results: list[list[Continuation]]) -> list[_Output]:
        """All outputs of all prompts."""
        return [self.finish(i, output) for i, n_best in enumerate(results) for output in n_best]

    def finish(self, source: int, output: Continuation) -> _Output:
        """The output of a prompt before a stop sequence."""
        text, is_cut = self.stop.cut(output.text)
        hypothesis = output.hypothesis
        ids = self.until_stop(hypothesis.ids, source) if is_cut else hypothesis.ids
        reason = "length" if len(ids) >= self.limits[source] and not is_cut else "stop"
        return _Output(source, text, ids, hypothesis.token_logprobs, reason if output is not _NOTHING else "length")

    def until_stop(self, ids: list[int], source: int = 0) -> list[int]:
        """The tokens of an output until it has a stop sequence."""
        decoder = self.model.pipeline.stream_decoder(self.request.encoded.sources[source])
        has_stop = lambda count: self.stop.cut(decoder.decode(ids[:count]))[1]  # noqa: E731
        return ids[: bisect_left(range(len(ids)), True, key=has_stop)]

    def usage(self, outputs: list[_Output]) -> dict[str, int]:
        prompt, completion = sum(map(len, self.request.encoded.sources)), sum(len(output.ids) for output in outputs)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def response(self, kind: str, choices: list[Any], usage: dict[str, int] | None = None) -> dict[str, Any]:
        content = {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}
        return {**content, "choices": choices, **({"usage": usage} if usage is not None else {})}


async def _prepare_call(
    service: Service,
    model: ServedModel,
    prompts: Sequence[str | list[int]],
    body: GenerationBody,
    max_tokens: int,
) -> _Call:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream.", "Set stream, or leave out stream_options.", status=400)
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
    limits = length_limits(request.encoded)
    prefix = "chatcmpl" if is_chat else "cmpl"
    stop = StopSequences.from_field(body.stop)
    return _Call(model, request, limits, stop, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))


async def _stream(
    service: Service, call: _Call, timeout: float, options: StreamOptions | None, *, is_chat: bool
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a completion."""
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    has_usage = options is not None and bool(options.include_usage)

    def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if is_chat:
            content = {"delta": {"role": "assistant", "content": text} if reason is None else {}}
        response = call.response(kind, [{"index": 0, **content, "logprobs": None, "finish_reason": reason}])
        return response | ({"usage": None} if has_usage else {})

    stop = StopSequences(call.stop.sequences)
    (decoder,) = call.model.pipeline.stream_decoders(call.request)
    output = _Output(0, "", [], [], "stop")
    stream = service.stream(call.model, call.request, decoder, timeout)
    try:
        async for piece in stream:
            if isinstance(piece, str):
                if text := stop.add(piece):
                    yield chunk(text)
                if stop.is_found:
                    output = replace(output, ids=call.until_stop(list(decoder.tokens)))
                    break
            else:
                ids = piece[0][0].ids
                output = replace(output, ids=ids, reason="length" if len(ids) >= call.limits[0] else "stop")
        if not stop.is_found and (text := stop.flush()):
            yield chunk(text)
        yield chunk("", output.reason)
        if has_usage:
            yield call.response(kind, [], call.usage([output]))
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def _in_thread(body: GenerationBody, function: Callable[[], T]) -> T:
    """The value of a function, computed in another thread if it decodes token by token."""
    is_long = body.stop is not None or getattr(body, "logprobs", None) is not None
    return await asyncio.to_thread(function) if is_long else function()


def _logprobs(
    call: _Call, output: _Output, scores: TokenScores | None, first: int, offset: int, *, has_top: bool
) -> dict[str, Any]:
    """The log-probabilities of the tokens of a prompt and its output, from the token `first` on.

    The first token of a prompt has none. `offset` is the place of the output in the text. With `has_top`, the
    likeliest tokens are added.
    """
    source, generator = call.request.encoded.sources[output.source], call.model.pipeline
    tokens, offsets = _token_texts(generator, source[:first], source[first:])
    own, starts = _token_texts(generator, source, output.ids)
    # The stop sequence is no part of the output, nor are the tokens that have nothing else.
    end = next((i for i, token in enumerate(own) if token and starts[i] >= len(output.text)), len(own))
    tokens, offsets = [*tokens, *own[:end]], [*offsets, *(offset + start for start in starts[:end])]
    of_prompt = [None, *scores.logprobs.tolist()] if scores is not None else [None] * len(source)
    values = [*of_prompt[: len(source)], *output.logprobs][first : first + len(tokens)]
    top: list[dict[str, float] | None] | None = None
    if has_top and scores is not None:
        likeliest = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist())
        every = [None, *({generator.tokenizer.decode([token]): value} for token, value in likeliest)]
        top = every[first : first + len(tokens)]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _token_texts(generator: TextGenerator, context: list[int], ids: list[int]) -> tuple[list[str], list[int]]:
    """The text of each token after a context, and where it starts; of the tokens of one character, the last has it."""
    decoder, texts = generator.stream_decoder(context), []
    for i, token in enumerate(ids, 1):
        texts.append(decoder.add(token))
        if texts[-1] and len(decoder.tokens) >= _DECODED_TOKENS:  # it decodes all of its tokens each time
            decoder = generator.stream_decoder([*context[-_DECODED_TOKENS:], *ids[max(0, i - _DECODED_TOKENS) : i]])
    return texts, [*accumulate(map(len, texts), initial=0)][: len(texts)]


def _to_base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
