"""Errors as JSON: in the format of OpenAI below /v1, otherwise as a sentence in the field `error`."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from regard.errors import RegardError
from regard.serve.serve_errors import Overloaded, RequestError

logger = logging.getLogger("regard.serve")

_SENTENCES = {
    401: "The token is missing or wrong. Send the header: Authorization: Bearer TOKEN",
    404: "There is no such path. See /docs for all paths.",
    405: "This path does not support the method. See /docs for all paths.",
}


def error_response(path: str, status: int, message: str, kind: str = "invalid_request_error") -> JSONResponse:
    """The response for an error.

    >>> error_response("/translate", 404, "No such model.").body
    b'{"error":"No such model."}'
    """
    content: dict[str, Any] = {"error": message}
    if path.startswith("/v1/"):
        content = {"error": {"message": message, "type": kind, "param": None, "code": None}}
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
        return error_response(path, 422, validation_sentence(error.errors()))
    logger.error("internal error", exc_info=error)
    return error_response(path, 500, "Internal error. See the log of the server for details.", "server_error")


def validation_sentence(errors: Any) -> str:
    """The first invalid field of a request as a sentence, without its value.

    >>> validation_sentence([{"loc": ("body", "beam"), "msg": "Input should be a valid integer"}])
    'beam: Input should be a valid integer.'
    """
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{place}: {message}." if place else f"The request is invalid: {message}."


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors of the application as JSON."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return exception_response(request.url.path, error)

    for kind in (RegardError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle)
