"""`torchrun -m regard train`: ranks that are killed are restarted, and the run ends as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.distributed_faults import RECIPE, digest, find_rank, steps_done
from regard.cli import main

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*arguments: str | Path) -> subprocess.Popen:
    return subprocess.Popen(
        [*TORCHRUN, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(torchrun: subprocess.Popen) -> str:
    """Wait for torchrun, and return what it and its ranks wrote to standard error."""
    try:
        return torchrun.communicate()[1]
    finally:
        torchrun.kill()


def kill_after(torchrun: subprocess.Popen, rank: int, out: Path, steps: int) -> None:
    while torchrun.poll() is None:
        if steps_done(out) >= steps and find_rank(torchrun.pid, rank):
            os.kill(find_rank(torchrun.pid, rank)[0], signal.SIGKILL)
            return
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} did not reach step {steps}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_ranks_are_restarted_and_the_run_ends_with_the_same_weights(tmp_path):
    """The undisturbed run has two workers on this machine: both ways to start processes give the same weights."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(steps=60), encoding="utf-8")
    train = ["train", str(recipe), "--quiet", "--train.ema", "0.9"]
    assert main([*train, "--out", str(tmp_path / "undisturbed"), "--train.workers", "2"]) == 0

    torchrun = start("--max-restarts", "4", "-m", "regard", *train, "--out", tmp_path / "killed")
    kill_after(torchrun, 1, tmp_path / "killed", 20)
    kill_after(torchrun, 0, tmp_path / "killed", 40)
    errors = finish(torchrun)
    assert torchrun.returncode == 0, errors
    assert digest(tmp_path / "killed") == digest(tmp_path / "undisturbed")


@pytest.mark.slow
def test_an_error_of_rank_0_is_printed_once_and_ends_all_ranks(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(steps=60) + 'time = "1h"\nschedule = "cosine"\n', encoding="utf-8")
    torchrun = start("-m", "regard", "train", recipe, "--out", tmp_path / "out", "--quiet")
    errors = finish(torchrun)
    assert torchrun.returncode != 0
    assert errors.count("regard: train.time needs the schedule wsd") == 1
    assert "exitcode  : 2 " in errors
