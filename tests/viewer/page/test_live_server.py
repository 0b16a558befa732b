"""The server of the live page: responses to its own page, and refused requests."""

import errno
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from socketserver import TCPServer
from threading import Thread

import numpy as np
import pytest

from regard.cli import main
from regard.cli.inference import look as command
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.models import Bert, BertConfig
from regard.pipelines import TextEncoder, Translator
from regard.viewer import look
from regard.viewer.page import requests
from regard.viewer.page.live_server import KEPT_RESPONSES, MAX_REQUEST_BYTES, PAUSE, LiveServer
from regard.viewer.page.requests import Response, TextRequestHandler
from regard.viewer.page.text_scene import build_scene

REQUEST = {"look": {"source": "one two three", "target": "trois deux un"}}


@pytest.fixture(scope="module")
def scene(transformer):
    return build_scene(look(transformer, "one two", "deux un"))


@pytest.fixture
def live(transformer, scene):
    server = LiveServer(TextRequestHandler(transformer, "numbers"), scene)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def send(live, method="GET", endpoint="", body=None, token=None, path=None, **headers):
    """Status, headers and content of the response. Headers with None are left out."""
    sent = {"Host": f"127.0.0.1:{live.server_port}"}
    if body is not None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", live.server_port)
    path = path if path is not None else f"/{live.token if token is None else token}/{endpoint}"
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def refused(*arguments, status, **options) -> str:
    """The error message of a refused request: problem and hint, and nothing else."""
    got, headers, content = send(*arguments, **options)
    assert got == status
    assert headers["content-type"] == "application/json"
    header = json.loads(content)
    assert list(header) == ["error"]
    assert re.fullmatch(r"\w[^\n]+\. [A-Z][^\n]+\.", header["error"]), header["error"]
    return header["error"]


def blobs_of(live, header):
    count = 1 + max(one[part]["at"] for one in header["scene"]["attentions"] for part in ("q", "k"))
    return [send(live, endpoint=f"blob/{header['blobs'] + n}")[2] for n in range(count)]


# Responses to its own page


def test_page_and_scene(live, transformer):
    status, headers, content = send(live)
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', content.decode())[1]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert b"<title>one two  \xe2\x86\x92  deux un</title>" in content
    assert b'id="scene"' not in content
    made = build_scene(look(transformer, "one two", "deux un"))
    header = json.loads(send(live, endpoint="scene")[2])
    assert header["scene"] == json.loads(json.dumps(made.header))
    assert header["fields"] == ["source", "target"]
    assert [send(live, endpoint=f"blob/{header['blobs'] + n}")[2] for n in range(len(made.blobs))] == made.blobs


def test_response_has_the_weights_of_a_look(live, transformer):
    status, _, content = send(live, "POST", "request", REQUEST)
    assert status == 200
    header = json.loads(content)
    blobs = blobs_of(live, header)
    seen = look(transformer, "one two three", "trois deux un")
    assert header["scene"]["texts"] == {"source": "one two three", "target": "trois deux un"}
    assert header["scene"]["model"]["name"] == "numbers"
    for one in header["scene"]["attentions"]:
        q, k = (np.frombuffer(blobs[one[part]["at"]], "<f4").reshape(one[part]["shape"]) for part in ("q", "k"))
        scores = one["score"]["scale"] * np.einsum("thd,shd->hts", q, k)
        if one["kind"] == "masked":
            scores = np.where(np.tri(*scores.shape[1:], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(weights, seen.maps[one["name"]].weights, atol=1e-5)
    # A new tab shows the initial scene, not that of another tab.
    assert json.loads(send(live, endpoint="scene")[2])["scene"]["texts"] == live.initial.header["scene"]["texts"]


def test_without_a_target_the_model_translates(live, transformer):
    for target in ({}, {"target": "  "}):
        header = json.loads(send(live, "POST", "request", {"look": {"source": "one two three"} | target})[2])
        assert header["scene"]["texts"]["target"] == transformer("one two three")


def test_blobs_of_several_pages_are_kept_apart(live):
    first = json.loads(send(live, "POST", "request", REQUEST)[2])
    before = blobs_of(live, first)
    second = json.loads(send(live, "POST", "request", {"look": {"source": "four five six seven"}})[2])
    assert blobs_of(live, first) == before != blobs_of(live, second)
    for _ in range(KEPT_RESPONSES):
        send(live, endpoint="scene")
    assert "no longer available" in refused(live, endpoint=f"blob/{first['blobs']}", status=404)


def test_initial_scene_has_no_attentions(transformer):
    with LiveServer(TextRequestHandler(transformer, "numbers")) as server:
        header = server.publish(server.initial)
    assert header["scene"]["attentions"] == []
    assert header["scene"]["model"]["family"] == "transformer"
    assert set(header["scene"]) <= set(build_scene(look(transformer, "one", "un")).header)


def test_registered_requests_are_handled(live, monkeypatch):
    def count(handler, arguments):
        assert handler.lock.locked()
        return Response({"count": len(arguments)}, [b"1", b"2"])

    monkeypatch.setitem(requests.REQUESTS, "count", count)
    header = json.loads(send(live, "POST", "request", {"count": [3, 4, 5]})[2])
    assert header["count"] == 3
    assert send(live, endpoint=f"blob/{header['blobs'] + 1}")[2] == b"2"
    assert json.loads(send(live, endpoint="scene")[2])["scene"]["title"] == "one two  →  deux un"


def test_connection_is_kept_alive(live):
    connection = http.client.HTTPConnection("127.0.0.1", live.server_port)
    for _ in range(2):
        connection.request("POST", f"/{live.token}/request", json.dumps(REQUEST), {"Content-Type": "application/json"})
        assert "scene" in json.loads(connection.getresponse().read())
    connection.close()


# Refused requests


def test_out_of_descriptors(live, monkeypatch, caplog):
    accept, attempts = TCPServer.get_request, []

    def refuse(server):
        attempts.append(time.monotonic())
        if len(attempts) > 2:
            return accept(server)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(TCPServer, "get_request", refuse)
    assert send(live, endpoint="scene")[0] == 200
    assert attempts[2] - attempts[0] >= 2 * PAUSE
    assert [record.message for record in caplog.records] == [
        "The live page cannot accept a connection (Too many open files); it tries again."
    ]


def test_server_listens_on_loopback_with_a_long_token(live):
    assert live.socket.getsockname()[0] == "127.0.0.1"
    assert live.address == f"http://127.0.0.1:{live.server_port}/{live.token}/"
    assert len(live.token) >= 32


def test_servers_have_different_tokens(live, transformer):
    with LiveServer(TextRequestHandler(transformer)) as other:
        assert other.token != live.token


ENDPOINTS = [("GET", "", None), ("GET", "scene", None), ("GET", "blob/0", None), ("POST", "request", REQUEST)]


@pytest.mark.parametrize(("method", "endpoint", "body"), ENDPOINTS)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", None])
def test_wrong_host_header_is_refused(live, method, endpoint, body, host):
    host = host and host.format(port=live.server_port)
    assert "Host header" in refused(live, method, endpoint, body, Host=host, status=400)


def test_localhost_is_accepted(live):
    assert send(live, Host=f"localhost:{live.server_port}")[0] == 200


def test_two_host_headers_are_refused(live):
    request = f"GET /{live.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{live.server_port}\r\nHost: evil.example\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.server_port)) as connection:
        connection.sendall(request.encode())
        assert b" 400 " in connection.recv(100)


@pytest.mark.parametrize(("method", "endpoint", "body"), ENDPOINTS)
@pytest.mark.parametrize("token", ["", "wrong", "é", "{short}", "{long}"])
def test_wrong_token_is_refused(live, method, endpoint, body, token):
    token = {"{short}": live.token[:-1], "{long}": live.token + "x", "é": "%C3%A9"}.get(token, token)
    assert "token" in refused(live, method, endpoint, body, token=token, status=403)


@pytest.mark.parametrize("path", ["/", "/scene", "/favicon.ico", "*", "http://127.0.0.1/{token}/", "/{token}"])
def test_paths_without_token_are_refused(live, path):
    assert "token" in refused(live, path=path.format(token=live.token), status=403)


CROSS = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "https://127.0.0.1:{port}"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
    {"Origin": "http://127.0.0.1:{port}", "Sec_Fetch_Site": "cross-site"},
]


@pytest.mark.parametrize("headers", CROSS)
@pytest.mark.parametrize(("method", "endpoint", "body"), ENDPOINTS[1:])
def test_cross_origin_requests_are_refused(live, method, endpoint, body, headers):
    headers = {name: value.format(port=live.server_port) for name, value in headers.items()}
    assert "Another page" in refused(live, method, endpoint, body, **headers, status=403)


@pytest.mark.parametrize("headers", [*CROSS, {"Host": "evil.example"}])
def test_only_its_own_page_opens_the_browser(live, headers):
    opened = []
    live.open_browser = opened.append
    headers = {name: value.format(port=live.server_port) for name, value in headers.items()}
    assert send(live, path="/open", **headers)[0] in (400, 403)
    assert opened == []
    assert live.token.encode() not in send(live, path="/open")[2]
    assert opened == [live.address]


def test_same_origin_requests_are_accepted(live):
    own = {"Origin": f"http://127.0.0.1:{live.server_port}", "Sec_Fetch_Site": "same-origin"}
    assert send(live, "POST", "request", REQUEST, **own)[0] == 200
    # A link with the full address on another page may lead here.
    assert send(live, Sec_Fetch_Site="cross-site")[0] == 200


def test_security_headers_of_every_response(live):
    for options in (ENDPOINTS[0], ENDPOINTS[1], ENDPOINTS[3], ("OPTIONS", "request", None), ("GET", "nothing", None)):
        _, headers, _ = send(live, *options, Origin=f"http://127.0.0.1:{live.server_port}")
        assert not [name for name in headers if name.startswith("access-control")]
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"])
def test_other_methods_are_refused(live, method):
    refused(live, method, status=501)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_content_types_other_than_json_are_refused(live, kind):
    assert "JSON" in refused(live, "POST", "request", REQUEST, Content_Type=kind, status=415)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"look": NaN', b"[" * 100_000])
def test_invalid_json_is_refused(live, body):
    assert "not valid JSON" in refused(live, "POST", "request", body, status=400)


def test_too_large_body_is_refused(live):
    assert "1 MB" in refused(live, "POST", "request", REQUEST, Content_Length=str(MAX_REQUEST_BYTES + 1), status=413)


@pytest.mark.parametrize("length", [None, "-1", "ten", "1" * 30])
def test_missing_or_invalid_content_length_is_refused(live, length):
    assert "Content-Length" in refused(live, "POST", "request", REQUEST, Content_Length=length, status=411)


def test_chunked_encoding_is_refused(live):
    assert "Content-Length" in refused(live, "POST", "request", REQUEST, Transfer_Encoding="chunked", status=411)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("../../etc/passwd", "blob/../../../etc/passwd", "blob/-1", "blob/0x1", "blob/", "blob/%31", "blob/١"),
        *("blob/999999", "blob/" + "9" * 5000, "scene/", "Scene", "//etc/passwd", "web/index.js", "request"),
    ],
)
def test_unknown_paths_are_not_found(live, endpoint):
    request = f"GET /{live.token}/{endpoint} HTTP/1.1\r\nHost: 127.0.0.1:{live.server_port}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.server_port)) as connection:
        connection.sendall(request.encode())
        assert connection.recv(1000).split()[1] == b"404"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], "Invalid request. Supported requests: look"),
        ({}, "Invalid request."),
        ({"fetch": {}}, "Invalid request."),
        (REQUEST | {"more": 1}, "Invalid request."),
        ({"look": "one"}, "Invalid request to look"),
        ({"look": {"target": "un"}}, "Invalid request to look"),
        ({"look": {"source": "one", "layers": "*"}}, "Invalid request to look"),
        ({"look": {"source": 1}}, "source is not valid text"),
        ({"look": {"source": "one", "target": None}}, "target is not valid text"),
        ({"look": {"source": "one \ud800"}}, "source is not valid text"),
        ({"look": {"source": "  "}}, "The text is empty"),
        ({"look": {"source": "one " * 99}}, "the source"),
    ],
)
def test_invalid_requests_have_an_error_message(live, request_, message, monkeypatch):
    monkeypatch.setattr(Translator, "length_limit", 16)  # as with learned positions
    assert message in refused(live, "POST", "request", request_, status=422)
    assert send(live, "POST", "request", REQUEST)[0] == 200


def test_internal_errors_are_logged_but_not_sent(live, monkeypatch, caplog):
    def broken(handler, arguments):
        raise KeyError("a secret")

    monkeypatch.setitem(requests.REQUESTS, "look", broken)
    assert "Internal error" in refused(live, "POST", "request", REQUEST, status=500)
    assert "a secret" in caplog.text
    assert not live.handler.lock.locked()


def test_unknown_fields_are_refused(transformer):
    class SourceOnly(TextRequestHandler):
        fields = ("source",)

    with pytest.raises(RegardError, match=r"Invalid request to look\. Expected the texts: source\."):
        SourceOnly(transformer).handle(REQUEST)


def test_unavailable_port_raises_an_error(live):
    with pytest.raises(RegardError, match=rf"port {live.server_port} is not available: .+ Choose another"):
        LiveServer(live.handler, port=live.server_port)
    with pytest.raises(RegardError, match="port 65536 is not available"):
        LiveServer(live.handler, port=65536)


# The command


def test_command_serves_until_ctrl_c(transformer_folder, tmp_path):
    program = "import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["look", str(transformer_folder), "one two", "--live", "--no-browser", "--device", "cpu"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Children of a background shell ignore Ctrl-C by default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        address_line, hint_line = (process.stderr.readline() for _ in range(2))
        port, token = re.fullmatch(r"Live page: http://127\.0\.0\.1:(\d+)/([\w-]{32})/\n", address_line).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port))
        connection.request("GET", f"/{token}/scene")
        header = json.loads(connection.getresponse().read())
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate()
        connection.close()
    assert header["scene"]["texts"]["source"] == "one two"
    assert process.returncode == 0
    assert (out, hint_line, rest) == ("", "Stop with Ctrl-C.\n", "Live page stopped.\n")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def opened(monkeypatch):
    """Addresses opened in a browser; the server closes immediately."""
    found = []
    monkeypatch.setattr(command.webbrowser, "open", found.append)

    def closed(self, poll_interval=0.5):
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", closed)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_browser_opens_if_there_is_a_display(opened, monkeypatch, capsys, transformer_folder):
    at = ["look", str(transformer_folder), "--live", "--device", "cpu"]
    monkeypatch.setattr(command.sys, "platform", "linux")
    assert main(at) == 0
    assert opened == []
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert main([*at, "--no-browser"]) == 0
    assert opened == []
    capsys.readouterr()
    assert main(at) == 0
    assert opened == re.findall(r"http://\S+", capsys.readouterr().err)
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["one", "--live", "--out", "x.html"], "--live and --out cannot be combined"),
        (["one", "--port", "8000"], "--port and --no-browser require --live"),
        (["one", "--no-browser"], "--port and --no-browser require --live"),
        ([], "The input text is missing"),
        (["--live", "--target", "un"], "The input text is missing"),
        (["one", "--live", "--attention", "decoder.9.cross"], "no attention 'decoder.9.cross'"),
        (["--live", "--port", "70000"], "--port must be between 0 and 65,535 (got 70000)"),
    ],
)
def test_invalid_options_raise_errors(opened, capsys, transformer_folder, options, message):
    assert main(["look", str(transformer_folder), "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def test_live_page_of_a_model_without_attention_has_a_trace(blind):
    assert TextRequestHandler(blind).look({"source": "one two"}).header["trace"] is not None


def test_question_answering_model_has_a_context_field():
    tokenizer = Tokenizer.train(["who sat the cat sat there"], "word")
    sizes = dict(width=8, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size)
    handler = TextRequestHandler(TextEncoder(Bert(BertConfig(**sizes, head="answer")).eval(), tokenizer))
    assert handler.fields == ["source", "context"]
    (side,) = handler.look({"source": "who sat", "context": "the cat sat there"}).header["sides"].values()
    assert side["tokens"][1:3] == ["who", "sat"]
    assert side["tokens"][-5:-1] == ["the", "cat", "sat", "there"]
