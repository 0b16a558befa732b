"""Fault table: a small training run is disturbed in every way that this script knows, and resumed.

    python benchmarks/faults.py --kills 200
    python benchmarks/faults.py --kills 4 --samples 1 --only kill full_disk signals

Every attempt is `regard train` in a process of its own, forked after the imports. Faults are real where possible:
SIGKILL, signals, a full tmpfs (as root), damaged files. Errors of single file operations are injected by an audit hook,
which sees every open, rename, mkdir and remove in the output folder; out-of-memory errors and NaN by a changed loss.
After the fault the same command runs without it. The files with weights (best model, last checkpoint with optimizer
state and moving average) must then be identical to those of an undisturbed run, or as the row says. Prints a Markdown
table: lost updates and messages. Exit status 1 means a difference. Linux only.
"""

import argparse
import contextlib
import ctypes
import errno
import gzip
import importlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kill_test import digests

import regard.cli
import regard.cli.train
from regard.data import read_pairs
from regard.training import loop
from regard.training.checkpoint import CheckpointStore, load_checkpoint
from regard.training.log import read_metrics
from regard.training.tasks.task import features_loss
from regard.training.tasks.translate import TranslateTask

# Training imports them late: here once for all forked processes.
for late in ("torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg"):
    importlib.import_module(late)

STEPS, SAVE_EVERY = 24, 4
RECIPE = f"""
task = "translate"
[tokenizer]
vocab_size = 150
dropout = 0.1
[model]
width = 16
heads = 2
feedforward = 32
encoder_layers = 1
decoder_layers = 1
dropout = {{dropout}}
max_len = 60
[train]
steps = {STEPS}
batch_tokens = 256
accumulate = 2
ema = 0.9
warmup = 3
validate_every = 8
save_every = {SAVE_EVERY}
log_every = 2
device = "cpu"
workers = 1
"""
TIMEOUT = 120.0
CLONE_NEWNS = 0x00020000  # of Linux: a new mount namespace
Prepare = Callable[[Path], None]


@dataclass
class Row:
    """A row of the table."""

    fault: str
    expected: str = "bit-equal"
    times: int = 0
    lost: int = 0
    """largest number of updates that were computed and not saved"""
    told: list[str] = field(default_factory=list)
    """the last message of each attempt"""
    failures: list[str] = field(default_factory=list)

    def add(self, attempt: "Attempt", saved: int) -> None:
        self.times += 1
        self.lost = max(self.lost, attempt.step - saved)
        self.told += attempt.messages[-1:]

    def __str__(self) -> str:
        distinct = {
            re.sub(r"\d+|model/\S+", "", line): line for line in self.told
        }  # the same but for numbers and files
        told = "<br>".join(sorted(distinct.values(), key=len)[:2]) or "nothing"
        result = self.failures[0] if self.failures else self.expected
        return f"| {self.fault} | {self.times} | {self.lost} | {result} | {told} |"


@dataclass
class Attempt:
    """A finished process: exit code (negative: signal), last step that it computed, and its messages."""

    code: int
    step: int
    messages: list[str]


class Bench:
    """Folder, data and recipe of the runs, and the digests of an undisturbed one."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.count = folder, random.Random(seed), 0
        self.counter = mmap.mmap(-1, 8)  # the step that a child process has reached
        pairs = "".join(f"{source}\t{target}\n" for source, target in read_pairs(["phrasebook"])[:200])
        self.data = folder / "pairs.tsv.gz"
        self.data.write_bytes(gzip.compress(pairs.encode(), mtime=0))
        (folder / "recipe.toml").write_text(RECIPE.format(dropout=0.1), encoding="utf-8")
        (folder / "plain.toml").write_text(RECIPE.format(dropout=0.0).replace("dropout = 0.1\n[model]", "[model]"))
        started = time.monotonic()
        self.undisturbed = self.finish(self.new_folder())
        self.seconds = time.monotonic() - started

    def new_folder(self) -> Path:
        self.count += 1
        return self.folder / f"run-{self.count}"

    def start(self, out: Path, prepare: Prepare | None = None, recipe: str = "recipe.toml") -> int:
        """Start `regard train` in a child process and return its process id."""
        self.counter[:] = struct.pack("q", saved_step(out))
        arguments = ["train", str(self.folder / recipe), "--data", str(self.data), "--out", str(out), "--quiet"]
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            log = os.open(self.folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.setpgid(0, 0)
            self._count_steps()
            if prepare:
                prepare(out)
            code = regard.cli.main(arguments)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _count_steps(self) -> None:
        update = loop.Trainer.update

        def counted(run: Any, *arguments: Any) -> None:
            update(run, *arguments)
            self.counter[:] = struct.pack("q", run.state.step)

        loop.Trainer.update = counted  # type: ignore[method-assign]

    def step(self) -> int:
        return struct.unpack("q", self.counter[:])[0]

    def wait(self, pid: int) -> Attempt:
        end = time.monotonic() + TIMEOUT
        done, status = os.waitpid(pid, os.WNOHANG)
        while not done:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
            done, status = os.waitpid(pid, os.WNOHANG)
        text = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")
        if "Traceback" in text:
            return Attempt(os.waitstatus_to_exitcode(status), self.step(), [f"TRACEBACK {text[-300:]!r}"])
        lines = [
            re.sub(rf"{self.folder}/(tmpfs/run|run-\d+)", "model", line).replace(f"{self.folder}/", "")
            for line in text.splitlines()
            if line.startswith("regard:")
        ]
        return Attempt(
            os.waitstatus_to_exitcode(status), self.step(), [line.removeprefix("regard: ") for line in lines]
        )

    def run(self, out: Path, prepare: Prepare | None = None, recipe: str = "recipe.toml") -> Attempt:
        return self.wait(self.start(out, prepare, recipe))

    def finish(self, out: Path, recipe: str = "recipe.toml") -> dict[str, str]:
        """Run without a fault to the end, and return the digests of the weights."""
        attempt = self.run(out, recipe=recipe)
        if attempt.code:
            return {"error": f"exit code {attempt.code}: {attempt.messages}"}
        leftovers = [str(path) for path in out.rglob("*.part")]
        return digests(out) | ({"leftovers": ", ".join(leftovers)} if leftovers else {})

    def check(self, row: Row, out: Path, attempt: Attempt, codes: tuple[int, ...]) -> None:
        """Record an attempt, resume the run and compare its weights."""
        row.add(attempt, saved_step(out))
        if attempt.code not in codes:
            row.failures.append(f"EXIT CODE {attempt.code}: {attempt.messages[-1:]}")
        found = self.finish(out)
        if found != self.undisturbed:
            row.failures.append(f"DIFFERENT: {found.get('error', found.get('leftovers', 'weights'))}")
        shutil.rmtree(out, ignore_errors=True)


def saved_step(out: Path) -> int:
    """The step of the newest complete checkpoint."""
    paths = CheckpointStore(out).paths()
    return int(paths[0].name.removeprefix("step-")) if paths else 0


def at_file_operation(number: int, act: Callable[[], None], persistent: bool = False) -> Prepare:
    """Call `act` at the file operation with this number that changes the output folder; later ones if `persistent`."""

    def prepare(out: Path) -> None:
        count, prefix, fsync = 0, str(out), os.fsync

        def operate() -> None:
            nonlocal count
            count += 1
            if count == number or (persistent and count > number):
                act()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if isinstance(path, str | Path) and str(path).startswith(prefix) and flags & (os.O_WRONLY | os.O_RDWR):
                    operate()
            elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(arguments[0]).startswith(prefix):
                operate()

        def counted_fsync(descriptor: int) -> None:
            operate()
            fsync(descriptor)

        os.fsync = counted_fsync
        sys.addaudithook(hook)

    return prepare


def count_file_operations(bench: Bench) -> int:
    """Number of file operations of an undisturbed run."""
    counter = mmap.mmap(-1, 8)

    def count() -> None:
        counter[:] = struct.pack("q", struct.unpack("q", counter[:])[0] + 1)

    out = bench.new_folder()
    bench.run(out, at_file_operation(1, count, persistent=True))
    shutil.rmtree(out)
    return struct.unpack("q", counter[:])[0]


def raise_error(number: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def changed_loss(change: Callable[[Any, int, Any], Any]) -> Prepare:
    """Replace the training loss: change(batch, number of the batch, loss parts)."""

    def prepare(_out: Path) -> None:
        numbers = iter(range(1, 10**9))

        def loss(_task: Any, model: Any, features: Any, batch: Any, config: Any) -> Any:
            parts = features_loss(model, features, batch, config)
            return change(batch, next(numbers), parts) if torch.is_grad_enabled() else parts

        TranslateTask.loss = loss  # type: ignore[method-assign]

    return prepare


# One function per kind of fault


def kill(bench: Bench, kills: int, operations: int) -> Iterator[Row]:
    """SIGKILL at random times, and at random file operations, which are inside a save or between two parts of it."""
    rows = [Row("SIGKILL at a random time"), Row("SIGKILL at a random file operation of a save")]
    for row, share in zip(rows, (kills // 2, kills - kills // 2)):
        out = bench.new_folder()
        while row.times < share:
            if row is rows[0]:
                pid = bench.start(out)
                end = time.monotonic() + bench.rng.uniform(0, bench.seconds)
                while time.monotonic() < end and (bench.folder / "stderr").exists():
                    time.sleep(0.001)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                attempt = bench.wait(pid)
            else:
                number = bench.rng.randint(1, operations)
                attempt = bench.run(out, at_file_operation(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            if attempt.code == 0:  # the run has ended: start another one
                if digests(out) != bench.undisturbed:
                    row.failures.append("DIFFERENT")
                shutil.rmtree(out)
                out = bench.new_folder()
            else:
                row.add(attempt, saved_step(out))
                if attempt.code != -signal.SIGKILL:
                    row.failures.append(f"EXIT CODE {attempt.code}: {attempt.messages[-1:]}")
        if bench.finish(out) != bench.undisturbed:
            row.failures.append("DIFFERENT")
        shutil.rmtree(out, ignore_errors=True)
        yield row


def full_disk(bench: Bench, samples: int) -> Iterator[Row]:
    """A tmpfs that is nearly full; then space is freed. Needs the right to mount."""
    row = Row("disk full (a tmpfs with too little space)")
    mount = bench.folder / "tmpfs"
    mount.mkdir()
    # In a mount namespace of its own, so that the tmpfs ends with this process.
    is_alone = ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    commands = [["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]]
    if not is_alone or any(subprocess.run(command, capture_output=True).returncode for command in commands):
        print("No tmpfs could be mounted; the row is left out.", file=sys.stderr)
        return
    try:
        for _ in range(samples):
            filler, out = mount / "filler", mount / "run"
            free = bench.rng.randint(0, 1000) * 1024
            filler.write_bytes(b"x" * (4 * 2**20 - free))
            attempt = bench.run(out)
            filler.unlink()
            bench.check(row, out, attempt, (0, 2))
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    yield row


def failing_operations(bench: Bench, samples: int, operations: int) -> Iterator[Row]:
    """Errors of the file system: once, and from some operation on."""
    for number, name in (
        (errno.ENOSPC, "no space (ENOSPC)"),
        (errno.EIO, "I/O error (EIO)"),
        (errno.EROFS, "read-only"),
    ):
        for persistent in (False, True):
            row = Row(f"{name} {'from a random file operation on' if persistent else 'at one random file operation'}")
            for _ in range(samples):
                at = bench.rng.randint(1, operations)
                out = bench.new_folder()
                attempt = bench.run(out, at_file_operation(at, raise_error(number), persistent))
                bench.check(row, out, attempt, (0, 2))
            yield row


def damaged_checkpoints(bench: Bench, samples: int) -> Iterator[Row]:
    for name in ("truncated checkpoint", "flipped bit in a checkpoint", "flipped bit in checksums.json"):
        row = Row(name)
        for _ in range(samples):
            out = bench.new_folder()
            stop_at(bench, out, signal.SIGTERM, bench.rng.randint(SAVE_EVERY + 1, STEPS - 2))
            checkpoint = CheckpointStore(out).paths()[0]
            reached = saved_step(out)
            path = checkpoint / ("checksums.json" if "checksums" in name else "state.safetensors")
            content = bytearray(path.read_bytes())
            if name.startswith("truncated"):
                del content[bench.rng.randrange(len(content)) :]
            else:
                content[bench.rng.randrange(len(content))] ^= 1 << bench.rng.randrange(8)
            path.write_bytes(content)
            attempt = bench.run(out)
            if attempt.code or digests(out) != bench.undisturbed:
                row.failures.append(f"DIFFERENT, or exit code {attempt.code}")
            intact = re.findall(r"resuming from step (\d+)", " ".join(attempt.messages))
            row.times, row.told = row.times + 1, row.told + attempt.messages[-1:]
            row.lost = max(row.lost, reached - int(intact[0]) if intact else 0)
            shutil.rmtree(out)
        yield row


def corrupt_data(bench: Bench, samples: int) -> Iterator[Row]:
    """The data are damaged between two runs; the run is refused until they are restored."""
    row, original = Row("corrupt data file"), bench.data.read_bytes()
    for _ in range(samples):
        out, content = bench.new_folder(), bytearray(original)
        stop_at(bench, out, signal.SIGTERM, bench.rng.randint(2, STEPS - 2))
        content[bench.rng.randrange(20, len(content))] ^= 1 << bench.rng.randrange(8)
        bench.data.write_bytes(content)
        try:
            attempt = bench.run(out)
        finally:
            bench.data.write_bytes(original)
        bench.check(row, out, attempt, (2,))
    yield row


def stop_at(bench: Bench, out: Path, number: int, step: int) -> Attempt:
    """Send a signal when the run has reached a step."""
    pid = bench.start(out)
    while bench.step() < step and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.0005)
    os.kill(pid, number)
    return bench.wait(pid)


def signals(bench: Bench, samples: int) -> Iterator[Row]:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)):
        row = Row(f"{number.name} (exit code {code})")
        for _ in range(samples):
            out = bench.new_folder()
            attempt = stop_at(bench, out, number, bench.rng.randint(1, STEPS - 3))
            bench.check(row, out, attempt, (code,))
        yield row


def clock_jump(bench: Bench, samples: int) -> Iterator[Row]:
    """The wall clock jumps by up to a year with every call, in both directions."""
    row = Row("jumps of the clock")
    for _ in range(samples):
        rng = random.Random(bench.rng.random())

        def prepare(_out: Path, rng: random.Random = rng) -> None:
            now = time.time
            time.time = lambda: now() + rng.uniform(-3e7, 3e7)

        out = bench.new_folder()
        bench.check(row, out, bench.run(out, prepare), (0,))
    yield row


def out_of_memory(bench: Bench, samples: int) -> Iterator[Row]:
    """Batches above a random size do not fit. Without dropout the result is the same to rounding."""
    row = Row("out of memory", expected="the run ends with the same losses to 1e-4")
    reference = bench.new_folder()
    bench.finish(reference, recipe="plain.toml")
    expected = losses(reference)
    for _ in range(samples):
        limit = bench.rng.randint(60, 200)

        def change(batch: Any, _number: int, parts: Any, limit: int = limit) -> Any:
            if len(batch.targets) > limit:
                raise torch.OutOfMemoryError("out of memory")
            return parts

        out = bench.new_folder()
        row.add(bench.run(out, changed_loss(change), "plain.toml"), STEPS)
        # Weights whose gradient is only rounding noise differ by more: Adam divides the noise by its size.
        worst = max(abs(one / other - 1) for one, other in zip(losses(out), expected, strict=True))
        if worst > 1e-4:
            row.failures.append(f"DIFFERENT by {worst:.1e}")
        shutil.rmtree(out)
    yield row


def losses(out: Path) -> list[float]:
    return [line["nll"] for line in read_metrics(out / "metrics.jsonl")]


def not_finite(bench: Bench, samples: int) -> Iterator[Row]:
    """Losses that are NaN: one, three in a row, and all from some batch on."""
    cases = {
        "NaN in one batch": (1, "the run ends; that update is skipped"),
        "NaN in three updates in a row": (6, "the run ends, from the checkpoint before them"),
        "NaN from some batch on": (10**6, "the run stops"),
    }
    for name, (count, expected) in cases.items():
        row = Row(name, expected=expected)
        for _ in range(samples):
            first = 2 * bench.rng.randint(5, STEPS - 6) + 1  # two batches per update

            def change(_batch: Any, number: int, parts: Any, first: int = first, count: int = count) -> Any:
                return parts._replace(loss=parts.loss * torch.nan) if first <= number < first + count else parts

            out = bench.new_folder()
            attempt = bench.run(out, changed_loss(change))
            row.add(attempt, saved_step(out))
            checkpoint = load_checkpoint(CheckpointStore(out).paths()[0])
            is_finite, state = (
                all(tensor.isfinite().all() for tensor in checkpoint.tensors.values()),
                checkpoint.metadata,
            )
            has_report = (out / "state" / "bad_batch.json").exists()
            ends = attempt.code == 0 and state["done"] and state["skipped"] in (1, 3)
            stops = attempt.code == 2 and has_report and json.loads((out / "state" / "bad_batch.json").read_text())
            if not is_finite or not (stops if count == 10**6 else ends):
                row.failures.append(f"EXIT CODE {attempt.code}, finite weights: {is_finite}, {state['skipped']}")
            shutil.rmtree(out)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of SIGKILLs (default 200)")
    parser.add_argument("--samples", type=int, default=10, help="random samples of every other fault (default 10)")
    parser.add_argument("--only", nargs="+", default=[], help="names of functions of this script: kill full_disk …")
    parser.add_argument("--seed", type=int, default=1, help="seed of times and places (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before the forks, which do not copy threads
    started, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="regard-faults-") as name:
        bench = Bench(Path(name).resolve(), options.seed)
        if "error" in bench.undisturbed:
            sys.exit(f"The undisturbed run failed: {bench.undisturbed['error']}")
        operations = count_file_operations(bench)
        kinds = [
            kill(bench, options.kills, operations),
            full_disk(bench, options.samples),
            failing_operations(bench, options.samples, operations),
            damaged_checkpoints(bench, options.samples),
            corrupt_data(bench, options.samples),
            signals(bench, options.samples),
            clock_jump(bench, options.samples),
            out_of_memory(bench, options.samples),
            not_finite(bench, options.samples),
        ]
        print("| fault | times | updates lost, at most | weights after the same command | message |")
        print("| --- | ---: | ---: | --- | --- |")
        for rows in kinds:
            for row in rows if not options.only or rows.__name__ in options.only else ():
                failed |= bool(row.failures)
                print(row, flush=True)
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
