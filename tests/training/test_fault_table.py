"""A sample of benchmarks/faults.py: real SIGKILLs, a full tmpfs (as root), and a signal, in forked processes."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the script forks, and mounts a tmpfs")
def test_sample_of_the_fault_table():
    options = ["--kills", "2", "--samples", "1", "--only", "kill", "full_disk", "clock_jump"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert [row[0].strip() for row in rows if "tmpfs" not in row[0]] == [
        "SIGKILL at a random time",
        "SIGKILL at a random file operation of a save",
        "jumps of the clock",
    ]
    assert {row[3].strip() for row in rows} == {"bit-equal"}
    assert all(int(row[2]) <= 12 for row in rows)  # three failed saves
