"""Errors as JSON: in the format of OpenAI below /v1, otherwise as a sentence in the field `error`."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from regard.errors import RegardError
from regard.serve.errors import Overloaded, RequestError
from regard.serve.routes.schemas import BRANCH

logger = logging.getLogger("regard.serve")

_SENTENCES = {
    400: "The body is not JSON, or a number or its nesting is too large. Fix the request.",
    401: "The token is missing or wrong. Send the header: Authorization: Bearer TOKEN",
    404: "There is no such path. See /docs for all paths.",
    405: "This path does not support the method. See /docs for all paths.",
}


def error_response(
    path: str, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
) -> JSONResponse:
    """The response for an error.

    >>> error_response("/translate", 404, "No such model.").body
    b'{"error":"No such model."}'
    """
    content: dict[str, Any] = {"error": message}
    if path.startswith("/v1/"):
        content = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    return JSONResponse(content, status)


def exception_response(path: str, error: Exception) -> JSONResponse:
    """The response for an exception; unexpected ones are logged."""
    if isinstance(error, RequestError):
        response = error_response(path, error.status, str(error), error.kind)
        if isinstance(error, Overloaded):
            response.headers["Retry-After"] = str(error.retry_after)
        return response
    if isinstance(error, RegardError):
        return error_response(path, 422, str(error))
    if isinstance(error, HTTPException):
        return error_response(path, error.status_code, _SENTENCES.get(error.status_code, str(error.detail)))
    if isinstance(error, RequestValidationError):
        status, place, message = describe_validation(error.errors(), is_openai=path.startswith("/v1/"))
        return error_response(path, status, message, param=place or None)
    logger.error("internal error", exc_info=error)
    return error_response(path, 500, "Internal error. See the log of the server for details.", "server_error")


def describe_validation(errors: Any, *, is_openai: bool = False) -> tuple[int, str, str]:
    """The status, the field and a sentence, without the value, for the first error of a request.

    >>> describe_validation([{"type": "int_type", "loc": ("body", "beam"), "msg": "Input should be a valid integer"}])
    (422, 'beam', 'beam: Input should be a valid integer.')
    """
    first = errors[0]
    kind, message = first["type"], str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    if kind == "json_invalid":
        return 422, "", f"The body is not JSON: {first.get('ctx', {}).get('error', message)}."
    place = ".".join(part for part in map(str, first["loc"]) if part != "body" and not part.startswith(BRANCH))
    place = place[:100].encode(errors="replace").decode()
    if kind == "extra_forbidden" and is_openai:
        return 400, place, f"{place} is not supported. Leave it out."
    if kind in ("model_type", "model_attributes_type"):  # it names the class
        message = "Input should be an object"
    if kind == "string_unicode":
        message = "must be text in UTF-8"
    return 422, place, f"{place}: {message}." if place else f"The request is invalid: {message}."


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors of the application as JSON."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return exception_response(request.scope["path"], error)

    for kind in (RegardError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle)
