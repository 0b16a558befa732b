"""Checks of requests to a server on this machine, to which any page in the browser can send requests too.

A page on the web can send a request to a local server, though not read the response. It can read it as well if the name
of its own site resolves to the local address (DNS rebinding); the Host header then has that name. The live page and
`regard serve` make the same checks.
"""

from collections.abc import Callable, Collection, Sequence

JSON, FORM = "application/json", "application/x-www-form-urlencoded"


class RefusedRequest(Exception):
    """A request that is refused, with its HTTP status.

    >>> RefusedRequest(415, "The request must be JSON.").status
    415
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_host(hosts: Sequence[str], is_own: Callable[[str], bool]) -> None:
    """Refuse a request unless it has one Host header, and that is an own address.

    >>> check_host(["localhost:8000"], lambda host: host == "localhost:8000")
    """
    if len(hosts) != 1 or not is_own(hosts[0]):
        raise RefusedRequest(400, "The Host header is not the address of this server. Use the printed address.")


def check_origin(origin: str | None, fetch_site: str | None, own: str, trusted: Collection[str] = ()) -> None:
    """Refuse a request of another page, by its headers Origin and Sec-Fetch-Site. Only browsers send them.

    >>> check_origin("https://other.example", None, "http://localhost:8000")
    Traceback (most recent call last):
    regard.viewer.page.request_checks.RefusedRequest: Another page sent this request. Use ...
    """
    if origin is not None and (origin in trusted or "*" in trusted):
        return
    if fetch_site not in (None, "same-origin", "none") or origin not in (None, own):
        raise RefusedRequest(403, "Another page sent this request. Use the page at the printed address.")


def check_content_type(header: str | None, allowed: Sequence[str] = (JSON,)) -> None:
    """Refuse other content types: browsers let any page send plain text and forms without asking the server first.

    >>> check_content_type("application/json; charset=utf-8")
    """
    if (header or "").partition(";")[0].strip().lower() not in allowed:
        kind = "JSON" if len(allowed) == 1 else "JSON or a form"
        raise RefusedRequest(415, f"The request must be {kind}. Send it as {' or '.join(allowed)}.")
