"""The server on a Ray cluster of one machine. It needs ray[serve], whose many packages the tests do not install."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

HAS_RAY_SERVE = all(importlib.util.find_spec(name) for name in ("ray", "aiohttp", "watchfiles", "fastapi"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY_SERVE, reason='needs ray[serve]: pip install "regard[ray]"')
def test_replicas_serve_the_same_application(folders, local):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--port", str(port), "--replicas", "2", "--cpus", "0.5", "--latency-target", "30"]
    command = [sys.executable, "-m", "regard.serve.ray_application", str(folders["numbers"]), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        body = json.dumps({"q": "one two three", "source": "en", "target": "fr"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/translate", body, {"content-type": "application/json"}
        )
        deadline = time.monotonic() + 200
        result = None
        while result is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):  # not ready: refused, timed out, or an error status
                with urllib.request.urlopen(request, timeout=30) as response:
                    result = json.load(response)["translatedText"]
                break
            time.sleep(1)
        assert result == local["numbers"]("one two three")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
