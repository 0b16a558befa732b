"""Fuzz readers with atheris: python -m tests.fuzz.fuzz SECONDS FOLDER [TARGET …]

Each target runs for SECONDS in a process of its own, one after the other. FOLDER/TARGET/inputs is its corpus;
FOLDER/TARGET/findings has one input and its traceback per distinct failure. A target ends early with a crash of the
process, a time-out or too much memory; libFuzzer then writes the input to FOLDER/TARGET/crash-…, timeout-… or oom-….
Atheris is not among the development requirements: pip install atheris.
"""

import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["regard"]):
    from tests.fuzz.mutation import mutate
    from tests.fuzz.targets import TARGETS, forbid_side_effects, limit_memory, prepare, run


def main(seconds: str, out: str, *names: str) -> None:
    """Fuzz the targets, by default all; each in a forked process, since libFuzzer ends its process."""
    logging.disable(logging.WARNING)
    for name in names or TARGETS:
        folder = (Path(out) / name).absolute()
        started, child = time.monotonic(), os.fork()
        if child == 0:
            _fuzz(name, seconds, folder)
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
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

    def call(data: bytes) -> None:
        try:
            run(target, work, data)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            frame = ([frame for frame in frames if "/regard/" in frame.filename] or frames)[-1]
            label = re.sub(r"\W+", "-", f"{type(error).__name__} {Path(frame.filename).stem} {frame.name}")
            if not (findings / label).exists():
                (findings / label).write_bytes(data)
                (findings / f"{label}.txt").write_text("".join(traceback.format_exception(error)), errors="replace")

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        mutated = mutate(data, draw) if draw.random() < 0.5 else None
        return atheris.Mutate(data, max_size) if mutated is None or len(mutated) > max_size else mutated

    options = [f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=4000", "-max_len=20000", "-verbosity=0"]
    options += [f"-artifact_prefix={folder}/", "-print_final_stats=1", str(inputs)]
    atheris.Setup([sys.argv[0], *options], call, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
