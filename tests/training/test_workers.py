"""Training with several worker processes, and the train command with Ctrl-C and standard input."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import kill_test
from regard.cli import main
from regard.errors import RegardError
from regard.training import distributed, loop, run_recipe
from regard.training.checkpoint import METRICS
from tests.training.helpers import bit_equal, last_checkpoint, saved_tensors, small_dataset, small_recipe

# The `regard` command on one core.
PROGRAM = "import os, sys; os.sched_getaffinity = lambda _: {0}; from regard.cli import main; sys.exit(main())"
SIZES = """
[data]
files = ["phrasebook"]
limit = 200
[tokenizer]
vocab_size = 150
[model]
width = 16
heads = 2
feedforward = 32
encoder_layers = 1
decoder_layers = 1
max_len = 40
[train]
batch_tokens = 256
warmup = 3
save_every = 1000
log_every = 1
device = "cpu"
"""


def run(recipe, out):
    return run_recipe(recipe, out, dataset=small_dataset(), quiet=True)


def test_two_workers_match_one_and_resume_exactly(tmp_path, monkeypatch):
    change = {"model": {"dropout": 0.0}, "train": {"steps": 6, "validate_every": 3, "save_every": 2, "clip": 0.0}}
    alone = {"train": change["train"] | {"batch_tokens": 128, "accumulate": 2, "optimizer": "sgd", "lr": 0.1}}
    both = {"train": alone["train"] | {"workers": 2}}
    run(small_recipe(**(change | alone)), tmp_path / "one")
    run(small_recipe(**(change | both)), tmp_path / "two")
    one, two = saved_tensors(tmp_path / "one"), saved_tensors(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)

    set_learning_rate, calls = loop.set_learning_rate, []

    def fail_at_step_3(*arguments):
        calls.append(None)
        if len(calls) == 4:
            raise ConnectionError
        set_learning_rate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", fail_at_step_3)
        with pytest.raises(ConnectionError):
            run(small_recipe(**(change | both)), tmp_path / "again")
    run(small_recipe(**(change | both)), tmp_path / "again")
    assert bit_equal(saved_tensors(tmp_path / "again"), two)


COUNTING = """
import os
from regard.training import fine_tuning, run
from regard.training.tasks import TASKS

def count(owner, name):
    original = getattr(owner, name)
    def counted(*arguments, **options):
        os.write({fd}, name.encode() + b"\\n")
        return original(*arguments, **options)
    setattr(owner, name, counted)

count(fine_tuning, "load")
count(run, "load")
count(TASKS["translate"], "read")
count(TASKS["translate"], "encode")
"""


def test_data_from_standard_input_and_origin_are_loaded_once_for_all_workers(tmp_path):
    """Both processes append their calls to one log file; the second one receives the encoded data from the first."""
    log = tmp_path / "calls.txt"
    counting = COUNTING.replace("os.write({fd}, ", f"os.write(os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND), ")
    run(small_recipe(train={"steps": 2}), tmp_path / "first")
    log.touch()
    program = counting + "\nfrom regard.cli import main; import sys; from regard.training import distributed\n"
    program += f"distributed._PROGRAM = {counting!r} + distributed._PROGRAM\nsys.exit(main())"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SIZES + "workers = 2\nsteps = 2\nvalidate_every = 2\n", encoding="utf-8")
    arguments = ["train", str(recipe), "--data", "-", "--from", str(tmp_path / "first"), "--out", str(tmp_path / "out")]
    lines = "".join(f"{source}\t{target}\n" for source, target in small_dataset().training)
    done = subprocess.run([sys.executable, "-c", program, *arguments], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert log.read_text(encoding="utf-8").split() == ["load", "read", "encode"]
    assert "on 2 workers" in done.stderr
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_dead_worker_is_an_error(tmp_path, monkeypatch):
    sum_over_workers = distributed.Workers.sum

    def kill_first(self, tensors):
        if self.processes:
            self.processes[0].kill()
            self.processes[0].wait()
        sum_over_workers(self, tensors)

    monkeypatch.setattr(distributed.Workers, "sum", kill_first)
    with pytest.raises(RegardError, match=r"A worker process died .* same command to resume"):
        run(small_recipe(train={"workers": 2}), tmp_path)
    assert last_checkpoint(tmp_path).exists()


def start_and_connect(size):
    with distributed.start_workers(size) as started:
        started.connect({})


STARTED = "import os, pickle, sys; pickle.load(sys.stdin.buffer); os.write(1, b'!'); "


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise SystemExit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        (STARTED + "os.kill(os.getpid(), 9)", "signal 9"),  # before joining the process group
        (STARTED + "import time; time.sleep(0.5); os._exit(4)", "status 4"),
    ],
)
def test_worker_that_ends_during_startup_is_an_error(monkeypatch, program, status):
    monkeypatch.setattr(distributed, "_PROGRAM", program)
    with pytest.raises(RegardError, match=rf"A worker process ended during startup \({status}\).*--train.workers 1"):
        start_and_connect(3)


def test_workers_connect_after_a_failed_startup():
    program = (
        "from regard.errors import RegardError; from regard.training import distributed\n"
        "original = distributed._PROGRAM\n"
        "def start_and_connect(program):\n"
        "    distributed._PROGRAM = program\n"
        "    with distributed.start_workers(2) as started: started.connect({})\n"
        f"try: start_and_connect({STARTED + 'os._exit(4)'!r})\n"
        "except RegardError: start_and_connect(original); print('connected')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "connected\n", done.stderr


def test_workers_that_cannot_connect_are_an_error(monkeypatch):
    def fail(*_):
        raise RuntimeError("[enforce fail] Unable to find address for: lo\nand more")

    monkeypatch.setattr(distributed, "_PROGRAM", STARTED + "import time; time.sleep(600)")
    monkeypatch.setattr(distributed, "_join", fail)
    with pytest.raises(RegardError, match=r"could not connect .*Unable to find address for: lo.* --train.workers 1"):
        start_and_connect(2)


def test_without_loopback_one_worker_is_used(monkeypatch, capsys):
    assert distributed.usable_workers(4) == 4
    monkeypatch.setattr(distributed, "has_loopback", lambda: False)
    assert distributed.usable_workers(4) == distributed.usable_workers(1) == 1
    assert capsys.readouterr().err == "regard: no loopback network interface; training with 1 worker.\n"
    with pytest.raises(RegardError, match="There is no loopback network interface, so 2 workers cannot connect"):
        start_and_connect(2)  # as in a resumed run, which keeps its number of workers


def test_has_loopback_tries_a_connection(monkeypatch):
    def unreachable(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert distributed.has_loopback()
    monkeypatch.setattr(distributed.socket, "create_connection", unreachable)
    assert not distributed.has_loopback()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert distributed.has_loopback()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("worker", ["import time; time.sleep(600)", STARTED + "import time; time.sleep(600)"])
def test_ctrl_c_during_startup_ends_all_workers(worker):
    """While rank 0 waits for their first reply, and while it waits for them to join the process group."""
    program = (
        f"from regard.training import distributed; distributed._PROGRAM = {worker!r}; print('ready', flush=True)\n"
        "with distributed.start_workers(3) as started: started.connect({})"
    )
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert rank_0.stdout.readline() == "ready\n"
    while len(processes := kill_test.child_processes(rank_0.pid)) < 2 and rank_0.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    rank_0.send_signal(signal.SIGINT)
    _, errors = rank_0.communicate()
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert len(processes) == 2
    assert kill_test.count_survivors(processes, timeout=120) == 0


def test_worker_without_rank_0_ends_silently():
    worker = subprocess.run([sys.executable, "-c", distributed._PROGRAM], input=b"", capture_output=True)
    assert worker.returncode == 1
    assert worker.stderr == b""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *map(str, arguments)]


def wait_for_metrics(out: Path, process: subprocess.Popen) -> None:
    while not (out / METRICS).exists() and process.poll() is None:
        time.sleep(0.01)


def test_ctrl_c_on_the_command_line_saves_and_resumes(tmp_path, capsys):
    """The run is saved, the exit code is 130, and the resumed run has the weights of an uninterrupted one."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SIZES + "workers = 1\nsteps = 150\nvalidate_every = 1000\nema = 0.9\n", encoding="utf-8")
    process = subprocess.Popen(
        command("train", recipe, "--out", tmp_path / "interrupted"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_metrics(tmp_path / "interrupted", process)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert process.returncode == 130, errors
    assert out == ""
    assert errors.splitlines()[-1].startswith("regard: Interrupted; everything up to step ")
    assert "Traceback" not in errors
    for name in ("interrupted", "uninterrupted"):
        assert main(["train", str(recipe), "--out", str(tmp_path / name)]) == 0
    assert "Try: regard translate" in capsys.readouterr().err
    assert bit_equal(saved_tensors(tmp_path / "interrupted"), saved_tensors(tmp_path / "uninterrupted"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_rank_0(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SIZES + "workers = 3\nsteps = 100000\n", encoding="utf-8")
    rank_0 = subprocess.Popen(command("train", recipe, "--out", tmp_path / "out"), stderr=subprocess.DEVNULL)
    wait_for_metrics(tmp_path / "out", rank_0)
    processes = kill_test.child_processes(rank_0.pid)
    rank_0.kill()
    rank_0.wait()
    assert len(processes) == 2
    assert kill_test.count_survivors(processes, timeout=120) == 0


def test_error_of_all_workers_is_printed_once(tmp_path):
    (tmp_path / "vectors.txt").write_text("the 1 2 3\n", encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SIZES + f'workers = 2\nsource_vectors = "{tmp_path}/vectors.txt"\n', encoding="utf-8")
    done = subprocess.run(
        command("train", recipe, "--tokenizer.kind", "word", "--out", tmp_path / "out"), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("the vectors have width 3") == 1
