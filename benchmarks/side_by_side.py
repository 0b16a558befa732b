"""Runs of training side by side on one machine: each a process of its own with a log, its result a line of JSON."""

import argparse
import contextlib
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """`WHAT RECIPE key=value…`: the key is of [train], or `section.key`; `from` is a model folder to begin with."""

    what: str
    recipe: dict[str, Any]
    start_from: str | None


def read_run(words: str) -> Run:
    """What a run's words say.

    >>> read_run("en-de recipes/multi30k-rnn.toml seed=3").recipe["train"]["seed"]
    3
    """
    from regard.train import read_toml

    what, recipe_file, *changes = words.split()
    table, start_from = read_toml(recipe_file), None
    for change in changes:
        key, value = change.split("=")
        if key == "from":
            start_from = value
            continue
        section, _, name = key.rpartition(".")
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {value}")["value"]
        table.setdefault(section or "train", {})[name] = value
    return Run(what, table, start_from)


def main(description: str | None, one_run: Callable[[Run, Path, Path], dict[str, Any]]) -> None:
    """The command line of a benchmark; `one_run(run, data, out)` trains and scores one run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=1, help="how many runs share the machine at a time")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        began = time.monotonic()
        result = one_run(read_run(options.runs[0]), options.data, options.out)
        print(json.dumps({"run": options.runs[0]} | result | {"whole_seconds": round(time.monotonic() - began, 1)}))
        return
    waiting, running = list(enumerate(options.runs)), []
    options.out.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < options.at_once:
            number, run = waiting.pop(0)
            folder = options.out / f"run{number}"
            command = [sys.executable, sys.argv[0], "--single", "--data", options.data, "--out", folder, run]
            log, result = options.out / f"run{number}.log", options.out / f"run{number}.json"
            with log.open("w") as errors, result.open("w") as output:
                running.append((number, run, subprocess.Popen(command, stdout=output, stderr=errors)))
        for entry in list(running):
            number, run, process = entry
            if process.poll() is not None:
                running.remove(entry)
                outcome = (options.out / f"run{number}.json").read_text().strip()
                said = (options.out / f"run{number}.log").read_text()
                print(outcome or f"run {number} ({run}) failed:\n{said[-600:]}", flush=True)
        time.sleep(0.5)
