"""Multi30k: trains runs side by side on one machine, and scores each on test2016 and test2017 (beam 5).

    python benchmarks/multi30k.py --data multi30k/tok --out runs --at-once 6 \
        "en-de recipes/multi30k-transformer.toml seed=1" "en-fr recipes/multi30k-transformer.toml seed=1 steps=4000"

A run is a language pair, a recipe, and changes to it (`key=value`, the key being of [train], or `section.key`).
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path


def one_run(run: str, data: Path, out: Path) -> dict:
    """Trains and scores one run; what it says goes to a log in its folder."""
    from regard.data import read_lines
    from regard.decode import DecodeConfig
    from regard.train import read_toml, recipe_from, text_scores, train

    languages, recipe_file, *changes = run.split()
    source, target = languages.split("-")
    table = read_toml(recipe_file)
    for change in changes:
        key, value = change.split("=")
        section, _, name = key.rpartition(".")
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {value}")["value"]
        table.setdefault(section or "train", {})[name] = value
    table["data"] = {
        "files": [str(data / f"train.{language}.gz") for language in (source, target)],
        "validation": [str(data / f"val.{language}.gz") for language in (source, target)],
    }
    began = time.monotonic()
    translator = train(recipe_from(table), out)
    result = {"run": run, "seconds": round(time.monotonic() - began), "step": translator.training["step"]}
    for test in ("test2016", "test2017"):
        lines, references = (read_lines(data / f"{test}.{language}.gz") for language in (source, target))
        answers = translator.translate(lines, DecodeConfig(beam=5), truncate=True)
        scores = text_scores([best[0].text for best in answers], references)
        result[test] = round(scores.tokenized_bleu, 2)
        result[f"{test}_sacrebleu"] = round(scores.bleu, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="the folder with train.en.gz, val.de.gz, …")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=1, help="how many runs share the machine at a time")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        print(json.dumps(one_run(options.runs[0], options.data, options.out)))
        return
    waiting, running = list(enumerate(options.runs)), []
    options.out.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < options.at_once:
            number, run = waiting.pop(0)
            folder = options.out / f"run{number}"
            command = [sys.executable, __file__, "--single", "--data", options.data, "--out", folder, run]
            log, result = options.out / f"run{number}.log", options.out / f"run{number}.json"
            with log.open("w") as errors, result.open("w") as output:
                running.append((number, run, subprocess.Popen(command, stdout=output, stderr=errors)))
        for entry in list(running):
            number, run, process = entry
            if process.poll() is not None:
                running.remove(entry)
                outcome = (options.out / f"run{number}.json").read_text().strip()
                log = (options.out / f"run{number}.log").read_text()
                print(outcome or f"run {number} ({run}) failed:\n{log[-600:]}", flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
