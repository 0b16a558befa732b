"""Command line of benchmarks that train several models in sequence; prints a line of JSON per run."""

import argparse
import contextlib
import json
import time
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """`DATASET RECIPE key=value…`: `key` of [train], or `section.key`; `from` is a model folder to fine-tune."""

    dataset: str
    recipe: dict[str, Any]
    start_from: str | None


def read_run(words: str) -> Run:
    """Parse the words of a run.

    >>> read_run("en-de multi30k-rnn seed=3").recipe["train"]["seed"]
    3
    """
    from regard.recipes import find_recipe
    from regard.training import read_toml

    dataset, name, *changes = words.split()
    table, start_from = read_toml(find_recipe(name)), None
    for change in changes:
        key, value = change.split("=")
        if key == "from":
            start_from = value
            continue
        section, _, name = key.rpartition(".")
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {value}")["value"]
        table.setdefault(section or "train", {})[name] = value
    return Run(dataset, table, start_from)


def main(description: str | None, train_and_score: Callable[[Run, Path, Path], dict[str, Any]]) -> None:
    """Run the benchmark; `train_and_score(run, data, out)` trains and scores one run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # In one process, so that runs share compiled code.
    for index, words in enumerate(options.runs):
        start = time.monotonic()
        try:
            result = train_and_score(read_run(words), options.data, options.out / f"run{index}")
        except Exception:  # continue with the other runs
            print(f"run {index} ({words}) failed:\n{traceback.format_exc()[-600:]}", flush=True)
        else:
            result["total_seconds"] = round(time.monotonic() - start, 1)
            print(json.dumps({"run": words} | result), flush=True)
