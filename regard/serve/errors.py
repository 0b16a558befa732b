"""Errors of requests to a server, each with its HTTP status."""

import math

from regard.errors import RegardError


class RequestError(RegardError):
    """A request that the server refuses or cannot complete.

    >>> RequestError("The beam is 99 wide; at most 16 is allowed.", "Lower it.").status
    422
    """

    status = 422
    kind = "invalid_request_error"
    """type of the error in the format of OpenAI"""

    def __init__(self, message: str, hint: str = "", *, status: int | None = None) -> None:
        super().__init__(message, hint)
        if status is not None:
            self.status = status


class Overloaded(RequestError):
    """More requests than the server can complete within its latency target.

    >>> Overloaded(1.2).retry_after
    2
    """

    status = 429
    kind = "rate_limit_error"

    def __init__(self, wait: float) -> None:
        self.retry_after = max(1, math.ceil(wait))
        super().__init__("The server is at its capacity.", f"Retry after {self.retry_after} s.")


class DeadlineExceeded(RequestError):
    """The time limit of a request passed before it was completed.

    >>> DeadlineExceeded(30).status
    504
    """

    status = 504
    kind = "timeout_error"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The request was not completed within its time limit of {seconds:g} s.",
            "Send shorter texts, or raise the limit with the header X-Request-Timeout.",
        )


class ShuttingDown(RequestError):
    """The server finishes what it accepted and takes no new requests.

    >>> ShuttingDown().status
    503
    """

    status = 503
    kind = "server_error"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", "Send the request to another server, or retry later.")
