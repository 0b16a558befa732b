"""The server on a Ray cluster of one machine. It needs ray[serve], whose many packages the tests do not install."""

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

HAS_RAY_SERVE = all(importlib.util.find_spec(name) for name in ("ray", "aiohttp", "grpc_reflection", "fastapi"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY_SERVE, reason="needs ray[serve]")
def test_replicas_serve_the_same_application(folders, local):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--port", str(port), "--replicas", "2", "--cpus", "0.5", "--latency-target", "30"]
    command = [sys.executable, "-m", "regard.serve.ray_application", str(folders["numbers"]), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert any("listening on" in line for line in process.stdout)
        body = json.dumps({"q": "one two three", "source": "en", "target": "fr"}).encode()
        address, headers = f"http://127.0.0.1:{port}/translate", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as response:
            result = json.load(response)["translatedText"]
        assert result == local["numbers"]("one two three")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def test_errors_are_sentences(tmp_path):
    command = [sys.executable, "-m", "regard.serve.ray_application", "model", "--tokens", str(tmp_path / "missing")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith(f"regard: {tmp_path / 'missing'}")
    assert "Traceback" not in run.stderr
