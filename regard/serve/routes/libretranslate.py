"""Routes in the format of LibreTranslate: /translate, /languages and /detect; requests are JSON or forms."""

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from regard.data.text.languages import nearest_codes
from regard.serve.error_responses import describe_validation
from regard.serve.errors import RequestError
from regard.serve.registry import ServedModel
from regard.serve.routes.schemas import DetectBody, LibreTranslateBody
from regard.serve.service import Service
from regard.viewer.page.request_checks import FORM, JSON

B = TypeVar("B", bound=BaseModel)


def make_libretranslate_router(service: Service) -> APIRouter:
    """The routes in the format of LibreTranslate."""
    router = APIRouter(tags=["LibreTranslate"])

    @router.post("/translate", openapi_extra=_describe_body(LibreTranslateBody))
    async def translate(request: Request) -> dict[str, Any]:
        """Translate a text, or a list of texts, from one language to another."""
        body = await _read_body(service, request, LibreTranslateBody)
        texts = [body.q] if isinstance(body.q, str) else body.q
        timeout = service.limits.request_timeout(request.headers.get("x-request-timeout"))
        service.limits.check_texts(texts)
        detected: dict[str, Any] | None = None
        source = body.source
        if source == "auto" and (detector := _find_detector(service)) is not None and texts:
            detected = (await _detect(service, detector, " ".join(texts), timeout))[0]
            source = detected["language"]
        model = _find_translator(service, source, body.target)
        request.scope["state"]["model"] = model.name
        # Every line of a text is translated separately, and the texts of HTML between its tags.
        parts = [split_html(text) if body.format == "html" else _split_lines(text) for text in texts]
        lines = [line for pieces, _ in parts for line in pieces]
        count = min(1 + body.alternatives, service.limits.max_beam)
        config = replace(model.pipeline.decoding, n_best=1)
        if count > 1:
            config = replace(config, method="beam", beam=max(config.beam, count), n_best=count)
        languages: dict[str, Any] = {"to": body.target} if model.has_languages else {}
        if model.language_tokens is not None and source != "auto":
            languages["source_language"] = source
        prepared = await service.prepare(
            lines, lambda: model.pipeline.prepare(lines, config, split="auto", **languages)
        )
        results = iter(await service.decode(model, prepared, timeout))
        translated: list[str] = []
        alternatives: list[list[str]] = []
        for pieces, join in parts:
            n_best = [next(results) for _ in pieces]
            outputs = [
                join([alternatives[min(rank, len(alternatives) - 1)].text for alternatives in n_best])
                for rank in range(count)
            ]
            translated.append(outputs[0])
            alternatives.append(list(dict.fromkeys(output for output in outputs[1:] if output != outputs[0])))
        is_single = isinstance(body.q, str)
        response: dict[str, Any] = {"translatedText": translated[0] if is_single else translated}
        if body.alternatives:
            response["alternatives"] = alternatives[0] if is_single else alternatives
        if body.source == "auto":
            sources = [source for source, target in model.language_pairs if target == body.target]
            default = model.language_tokens.default_source if model.language_tokens is not None else None
            fallback = default or next(iter(sources), "auto")
            found = detected or {"confidence": 0, "language": fallback}
            response["detectedLanguage"] = found if is_single else [found] * len(texts)
        return response

    @router.get("/languages")
    async def languages() -> JSONResponse:
        """The languages that the translators of this server state."""
        targets: dict[str, set[str]] = {}
        for model in service.registry.models:
            for source, target in model.language_pairs:
                targets.setdefault(source, set()).add(target)
                targets.setdefault(target, set())
            codes = () if model.language_tokens is None else model.language_tokens.ids.keys()
            for code in codes:
                targets.setdefault(code, set()).update(codes)
                targets[code].discard(code)
        # Validating the 40,000 targets of NLLB as a model of FastAPI would take longer than all the rest.
        return JSONResponse(
            [
                {"code": code, "name": language_name(code), "targets": sorted(codes)}
                for code, codes in sorted(targets.items())
            ]
        )

    @router.post("/detect", openapi_extra=_describe_body(DetectBody))
    async def detect(request: Request) -> list[dict[str, Any]]:
        """The language of a text, if a language-identification model is served."""
        body = await _read_body(service, request, DetectBody)
        detector = _find_detector(service)
        if detector is None:
            raise RequestError(
                "No language-identification model is served.",
                "Serve a text classifier whose labels are language codes.",
                status=404,
            )
        timeout = service.limits.request_timeout(request.headers.get("x-request-timeout"))
        return await _detect(service, detector, body.q, timeout)

    return router


def _split_lines(text: str) -> tuple[list[str], Any]:
    return text.split("\n"), "\n".join


def _find_detector(service: Service) -> ServedModel | None:
    return next((model for model in service.registry.models if model.detects_languages), None)


async def _detect(service: Service, model: ServedModel, text: str, timeout: float) -> list[dict[str, Any]]:
    """The languages of a text, most probable first."""
    (result,) = await service.classify(model, [text], True, timeout)
    ranked = sorted(result.probabilities.items(), key=lambda item: -item[1])
    return [{"confidence": round(100 * share, 1), "language": code} for code, share in ranked if share >= 0.01]


def _find_translator(service: Service, source: str, target: str) -> ServedModel:
    """The translator from one language to another; the only one, if it does not state its languages."""
    translators = [model for model in service.registry.models if "translate" in model.tasks]
    if len(translators) == 1 and not translators[0].has_languages:
        return translators[0]
    for model in translators:
        if model.translates(source, target):
            return model
    pairs = ", ".join("-".join(pair) for model in translators for pair in model.language_pairs)
    hints = [f"Language pairs: {pairs}."] if pairs else []
    for tokens in (model.language_tokens for model in translators):
        if tokens is not None:
            unknown = next((code for code in (target, source) if code not in tokens.ids), target)[:40]
            nearest = ", ".join(nearest_codes(unknown, list(tokens.ids)))
            hints.append(f"Nearest to {unknown!r} of {len(tokens.ids)} languages: {nearest}.")
    message = f"No model translates from {source[:40]!r} to {target[:40]!r}."
    raise RequestError(message, " ".join(hints) or "Language pairs: none.", status=400)


async def _read_body(service: Service, request: Request, body_class: type[B]) -> B:
    """The body of a request, JSON or a form; its field api_key is a token."""
    content = await request.body()
    try:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == FORM:
            form = parse_qs(content.decode(), keep_blank_values=True, max_num_fields=1000)
            fields: Any = {name: values if len(values) > 1 else values[0] for name, values in form.items()}
        else:
            fields = json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError(f"The body is neither JSON nor a form ({FORM}).", "Fix the request.", status=400) from None
    key = fields.get("api_key") if isinstance(fields, dict) else None
    authorization = request.headers.get("authorization")
    if not service.authentication.accepts(authorization, key if isinstance(key, str) else None):
        raise RequestError("The token is missing or wrong.", "Send it in the field api_key.", status=403)
    try:
        return body_class.model_validate(fields)
    except ValidationError as error:
        raise RequestError(describe_validation(error.errors())[2], status=400) from None


def _describe_body(body_class: type[BaseModel]) -> dict[str, Any]:
    """The description of the body for OpenAPI."""
    schema = body_class.model_json_schema()
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in (
        JSON, FORM)}}}  # fmt: skip


# The start of a comment, or of an element whose content is not text; or a tag.
_START = re.compile(r"(?i)<!--|<(script|style|code|pre)\b[^>]*>|<[^<>]*>")
_TAG = re.compile(r"<[^<>]*>")


def _find_markup(source: str) -> Iterator[tuple[int, int]]:
    """The start and the end of each piece of markup. The time is linear: an end that is missing is searched once."""
    position = 0
    missing: set[str] = set()
    while match := _START.search(source, position):
        start, position = match.span()
        end = r"-->" if match[0] == "<!--" else rf"</{match[1].lower()}\s*>" if match[1] else ""
        closing = re.compile(f"(?i){end}").search(source, position) if end and end not in missing else None
        if closing is not None:
            position = closing.end()
        elif end:  # not closed: only its tag, if it has one, is markup
            missing.add(end)
            tag = _TAG.match(source, start)
            position = start + 1 if tag is None else tag.end()
            if tag is None:
                continue
        yield start, position


def split_html(source: str) -> tuple[list[str], Callable[[list[str]], str]]:
    """The texts between the tags of a fragment, and a function that puts their translations in their places.

    >>> texts, join = split_html("<p>The cat <b>sleeps</b> &amp; eats.</p>")
    >>> texts, join(["LE CHAT", "DORT", "& MANGE."])
    (['The cat', 'sleeps', '& eats.'], '<p>LE CHAT <b>DORT</b> &amp; MANGE.</p>')
    """
    parts: list[tuple[str, bool]] = []
    end = 0
    for start, stop in _find_markup(source):
        parts += [(source[end:start], True), (source[start:stop], False)]
        end = stop
    parts.append((source[end:], True))
    texts = [html.unescape(part).strip() for part, is_text in parts if is_text and part.strip()]

    def join(translations: list[str]) -> str:
        rest = iter(translations)
        result = []
        for part, is_text in parts:
            if is_text and part.strip():
                before, after = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
                part = before + html.escape(next(rest), quote=False) + after
            result.append(part)
        return "".join(result)

    return texts, join


LANGUAGE_NAMES = {
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali",
    "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish",
    "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian",
    "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese",
    "ka": "Georgian", "kk": "Kazakh", "kn": "Kannada", "ko": "Korean", "la": "Latin", "lt": "Lithuanian",
    "lv": "Latvian", "mk": "Macedonian", "ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi", "ms": "Malay",
    "mt": "Maltese", "nb": "Norwegian Bokmål", "ne": "Nepali", "nl": "Dutch", "nn": "Norwegian Nynorsk",
    "no": "Norwegian", "pa": "Punjabi", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "sk": "Slovak", "sl": "Slovenian", "sq": "Albanian", "sr": "Serbian", "sv": "Swedish", "sw": "Swahili",
    "ta": "Tamil", "te": "Telugu", "th": "Thai", "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu",
    "uz": "Uzbek", "vi": "Vietnamese", "xh": "Xhosa", "zh": "Chinese", "zu": "Zulu",
}  # fmt: skip


def language_name(code: str) -> str:
    """The English name of a language, or its code if the name is not known; the region of mBART's codes is ignored.

    >>> language_name("fr"), language_name("fr_XX"), language_name("xx")
    ('French', 'French', 'xx')
    """
    language = code[:2] if re.fullmatch("[a-z]{2}_[A-Z]{2}", code) else code
    return LANGUAGE_NAMES.get(language, code)
