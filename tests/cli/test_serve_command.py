"""`regard serve` as a process: signals, logs and options."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")


def test_sigterm_finishes_what_was_accepted(transformer_folder, transformer):
    command = [sys.executable, "-m", "regard", "serve", f"numbers={transformer_folder}", "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Nothing here ends by the clock, however busy the machine is: the timeout of the test itself is 300 seconds.
    options = {"device": "cpu", "latency-target": "600", "timeout": "600", "workers": "1"}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if '"listening"' in line:
                break
        url = json.loads(line)["url"]
        assert url.startswith("http://127.0.0.1:")
        body = {
            "texts": ["one two three"] * 8,
            "options": {"beam": 8, "min_len": 150, "max_len": 200},
            "split": "never",
        }

        def send(_: int) -> int:
            request = urllib.request.Request(f"{url}/api/translate", json.dumps(body).encode())
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request) as response:
                return len(json.load(response)["translations"])

        def accepted() -> int:
            with urllib.request.urlopen(f"{url}/metrics") as response:
                metrics = response.read().decode()
            line = next(one for one in metrics.splitlines() if one.startswith("regard_model_accepted_total{"))
            return int(line.split()[-1])

        before = accepted()  # those of the warm-up
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(send, i) for i in range(6)]
            while accepted() < before + 6:
                pass
            process.send_signal(signal.SIGTERM)
            assert [future.result() for future in futures] == [8] * 6
        log = process.stderr.read()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    entries = [json.loads(line) for line in log.splitlines()]
    assert "shutting down" in [entry["event"] for entry in entries]
    assert "one two" not in log
    requests = [entry for entry in entries if entry["event"] == "request" and entry["path"] == "/api/translate"]
    assert {entry["status"] for entry in requests} == {200}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health")


def test_errors(run_error, transformer_folder, tmp_path, monkeypatch):
    monkeypatch.delenv("REGARD_SERVE_TOKENS", raising=False)
    message = run_error("serve", transformer_folder, "--host", "0.0.0.0")
    assert "other machines could use the server without a token" in message
    assert "model folder not found" in run_error("serve", tmp_path / "none")
    short = tmp_path / "tokens"
    short.write_text("short\n")
    assert "at least 16 are required" in run_error("serve", transformer_folder, "--tokens", short)
    assert "the same name" in run_error("serve", transformer_folder, transformer_folder)
    assert "max_beam must be at least 1" in run_error("serve", transformer_folder, "--max-beam", "0")
    assert "--latency-target must be above 0" in run_error("serve", transformer_folder, "--latency-target", "0")
