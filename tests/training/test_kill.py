"""A short version of benchmarks/kill_test.py."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard.data import read_pairs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_test.py"


def on_one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL") or sys.platform != "linux", reason="the script reads /proc")
def test_killed_run_ends_with_bit_identical_weights(tmp_path):
    data = tmp_path / "pairs.tsv"  # of which few are for validation, which takes longer than training
    data.write_text("".join(f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:300]))
    sizes = ["--kills", "2", "--workers", "1", "--steps", "40", "--width", "32", "--data", str(data)]
    done = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True, preexec_fn=on_one_core)
    assert done.returncode == 0, done.stderr
    kills, _inside_a_save, workers, left_behind, same = done.stdout.splitlines()[-1].split("|")[1:6]
    assert (int(kills), int(workers), int(left_behind), same.strip()) == (2, 1, 0, "yes")
