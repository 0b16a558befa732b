"""A server is ready once the first request of every kind has nothing left to import, compile or derive."""

import json
import subprocess
import sys


def test_the_first_request_has_nothing_left_to_prepare(folders):
    names = ("numbers", "talk", "moods", "animals")
    command = [sys.executable, "-m", "tests.serve.warm_requests", "1", *(str(folders[name]) for name in names)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == 20
    assert {one["request"]: one["new"] for one in results if one["new"]} == {}
