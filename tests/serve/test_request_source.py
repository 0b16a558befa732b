"""Pages of other sites cannot use a server on this machine, and programs and its own page can."""

import json

import pytest

from regard.serve.registry import ModelRegistry
from tests.serve.conftest import run_in_thread
from tests.serve.test_robustness import send_raw

TRANSLATE = json.dumps({"q": "one", "source": "en", "target": "fr"}).encode()


def post(server, path: str = "/translate", body: bytes = TRANSLATE, **headers: str | None) -> tuple[int, bytes]:
    """The status and content of a response. Headers with None are left out."""
    given = {"Host": "localhost", "Content_Type": "application/json"} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value is not None]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "Connection: close", "", ""])
    response = send_raw(server, head.encode() + body)
    return int(response.split(None, 2)[1]), response


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", None])
def test_content_types_that_any_page_can_send_are_refused(server, kind):
    for path in ("/translate", "/api/translate", "/v1/completions"):
        status, response = post(server, path, Content_Type=kind)
        assert (status, b"The request must be JSON" in response) == (415, True)


def test_forms_are_accepted_where_libretranslate_has_them(server):
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert post(server, "/translate", b"q=one&source=en&target=fr", **form)[0] == 200
    assert post(server, "/api/translate", b"texts=one", **form)[0] == 415


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},  # another server on this machine
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://evil.example", "Content_Type": "application/x-www-form-urlencoded"},
    ],
)
def test_requests_of_other_pages_are_refused(server, headers):
    assert post(server, **headers)[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", None]
)
def test_a_foreign_host_is_refused(server, host):
    """The name of a page that resolves to this machine: DNS rebinding."""
    assert post(server, Host=host)[0] == 400
    lines = b"" if host is None else b"Host: %s\r\n" % host.encode()
    for path in (b"/", b"/health", b"/v1/models", b"/health/"):
        response = send_raw(server, b"GET %s HTTP/1.1\r\n%s\r\n" % (path, lines))
        assert b" 400 " in response.splitlines()[0]
        assert b"evil" not in response


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:9000", "LOCALHOST:1", "127.1.2.3"])
def test_own_pages_and_programs_are_accepted(server, host):
    assert post(server, Host=host)[0] == 200
    assert post(server, Host=host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin")[0] == 200


def test_configured_origins_are_accepted(folders):
    """The page of another site, and the public name of a proxy that passes it on."""
    registry = ModelRegistry([folders["numbers"]], device="cpu", latency_target=30, workers=1)
    with run_in_thread(registry, allowed_origins=["https://page.example"]) as server:
        assert post(server, Origin="https://page.example", Sec_Fetch_Site="cross-site")[0] == 200
        assert post(server, Host="page.example")[0] == 200
        assert post(server, Origin="https://other.example")[0] == 403
        assert post(server, Host="other.example")[0] == 400
