"""Fuzz readers and the server: python -m tests.fuzz.fuzz SECONDS FOLDER [TARGET …]

Each target runs for SECONDS in a process of its own, one after the other. FOLDER/TARGET/inputs is its corpus;
FOLDER/TARGET/findings has one input and its traceback per distinct failure. A target ends early with a crash of the
process, a time-out or too much memory; the input is then FOLDER/TARGET/crash-…, timeout-… or oom-….

Atheris finds more, since it keeps inputs that reach new code: pip install atheris (it is not among the development
requirements). Without it, inputs are kept whose error messages are new.
"""

import contextlib
import faulthandler
import hashlib
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["regard"]) if atheris else contextlib.nullcontext():
    from tests.fuzz.mutation import mutate
    from tests.fuzz.targets import TARGETS, forbid_side_effects, limit_memory, prepare, run

TIMEOUT = 60
"""seconds of CPU time for one input: on a busy machine it may take longer"""
MAX_WAIT = 600
"""seconds for one input, waiting included"""
MAX_SIZE = 200_000


def main(seconds: str, out: str, *names: str) -> None:
    """Fuzz the targets, by default all; each in a forked process, since libFuzzer ends its process."""
    logging.disable(logging.WARNING)
    for name in names or TARGETS:
        folder = (Path(out) / name).absolute()
        started, child = time.monotonic(), os.fork()
        if child == 0:
            try:
                _fuzz(name, seconds, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
        if (folder / "running").exists():  # the process ended in it
            (folder / "running").rename(folder / f"crash-{int(time.time())}")
        for work in folder.glob("fuzz-*"):
            shutil.rmtree(work)
        findings = len(list((folder / "findings").glob("*.txt")))
        crashes = sum(path.name.startswith(("crash-", "timeout-", "oom-")) for path in folder.iterdir())
        code = os.waitstatus_to_exitcode(status)
        runs = re.findall(r"number_of_executed_units: (\d+)", (folder / "log").read_text(errors="replace"))
        print(
            f"{name}: {time.monotonic() - started:.0f} s ({usage.ru_utime + usage.ru_stime:.0f} s of CPU), "
            f"{runs[-1] if runs else 'unknown'} executions, {usage.ru_maxrss / 1024:.0f} MiB, exit {code}, "
            f"{findings} findings, {crashes} crashes",
            flush=True,
        )


def _fuzz(name: str, seconds: str, folder: Path) -> None:
    target, inputs, findings = TARGETS[name], folder / "inputs", folder / "findings"
    for path in (inputs, findings):
        path.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work = Path(tempfile.mkdtemp(prefix="fuzz-", dir=folder))
    for i, seed in enumerate(prepare(target, work)):
        (inputs / f"seed-{i}").write_bytes(seed)
    forbid_side_effects(folder)
    limit_memory()

    def call(data: bytes) -> str:
        try:
            return run(target, work, data)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            frame = ([frame for frame in frames if "/regard/" in frame.filename] or frames)[-1]
            label = re.sub(r"\W+", "-", f"{type(error).__name__} {Path(frame.filename).stem} {frame.name}")
            if not (findings / label).exists():
                (findings / label).write_bytes(data)
                (findings / f"{label}.txt").write_text("".join(traceback.format_exception(error)), errors="replace")
            return label

    if atheris is None:
        _mutate_randomly(call, inputs, folder / "running", float(seconds))
        return

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        mutated = mutate(data, draw) if draw.random() < 0.5 else None
        return atheris.Mutate(data, max_size) if mutated is None or len(mutated) > max_size else mutated

    options = [f"-max_total_time={seconds}", f"-timeout={TIMEOUT}", "-rss_limit_mb=4000", f"-max_len={MAX_SIZE}"]
    options += [f"-artifact_prefix={folder}/", "-print_final_stats=1", "-verbosity=0", str(inputs)]
    atheris.Setup([sys.argv[0], *options], lambda data: call(data) and None, custom_mutator=mutator)
    atheris.Fuzz()


def _mutate_randomly(call: Callable[[bytes], str], inputs: Path, running: Path, seconds: float) -> None:
    """Call a target with mutations of its corpus, to which inputs with new messages are added."""
    draw = random.Random(int(time.time()))
    corpus = [file.read_bytes() for file in sorted(inputs.iterdir())]
    messages: set[str] = set()
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = corpus[count] if count < len(corpus) and not messages else draw.choice(corpus)
        for _ in range(draw.choice((1, 1, 2, 4))):
            data = (mutate(data, draw) if draw.random() < 0.9 else None) or _mutate_bytes(data, draw)
        data = data[:MAX_SIZE]
        running.write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, TIMEOUT)  # ends the process
        faulthandler.dump_traceback_later(MAX_WAIT, exit=True)
        message = re.sub(r"[0-9]+|'.*'", "", call(data))[:200]
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        count += 1
        if message not in messages:
            messages.add(message)
            corpus.append(data)
            (inputs / f"input-{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)
    running.unlink()
    print(f"number_of_executed_units: {count}")


def _mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """The data with a part removed, repeated or replaced."""
    start, length = draw.randint(0, len(data)), int(2 ** draw.uniform(0, 8))
    part = data[start : start + length]
    new = draw.choice((b"", part * 2, draw.randbytes(length), bytes(len(part)), b"\xff", b'"', b"["))
    return data[:start] + new + data[start + length :]


if __name__ == "__main__":
    main(*sys.argv[1:])
