"""What the default recipe reaches on small data: train as `regard train --data FILE` does, judge, compare settings.

    python benchmarks/small_data.py run default --suite two-cores
    python benchmarks/small_data.py run fixed --suite two-cores --set train.schedule=cosine train.patience=0
    python benchmarks/small_data.py compare default fixed

A run is a task, a setting (a name, and the keys that it overrides) and a seed. Each is a single-threaded process, two
at a time, and appends one line of JSON with all outputs to a file (`--results`). Runs in the file are not repeated, so
an interrupted command continues. `compare` pools the tasks and seeds that two settings share, by class of tasks, with a
paired bootstrap over the examples. A setting is adopted for a class only if its interval excludes 0.

Choices are made on development parts. `--part test` reads the test parts, once, at the end; those of g2p, multi30k and
tatoeba were read before 2026-11-19.

A task is KIND/NAME/COUNT: g2p, g2p-small (words and phonemes), inflection (lemma and features to form), tatoeba and
multi30k from the folders of these names in `--data`; dates and numbers are generated. COUNT training pairs are drawn at
random, the same for every seed.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

Pairs = list[tuple[str, str]]
SMALL_LANGUAGES = ["ara", "ben", "gle", "hin", "ind", "lit", "mkd", "pol", "rus", "spa", "swe", "tgl", "tha", "ukr"]
TWO_CORES = {
    **{f"g2p-small/{language}/800": (1, 2) for language in ("gle", "hin", "lit", "tha")},
    "inflection/tur/100": (1, 2),
    "inflection/tur/1000": (1, 2),
    "tatoeba/en-de/5000": (1,),
}
FULL_TASKS = [
    *(f"g2p-small/{language}/800" for language in SMALL_LANGUAGES),
    *(f"g2p/{language}/800" for language in ("ice", "ita")),
    *(f"g2p/{language}/{count}" for language in ("dut", "kor") for count in (100, 300, 3000)),
    *(f"g2p/{language}/8000" for language in ("dut", "fre", "hun", "kor")),
    *(
        f"inflection/{language}/{count}"
        for language in ("dan", "swa", "tur")
        for count in (100, 300, 1000, 3000, 10_000)
    ),
    *(f"tatoeba/en-de/{count}" for count in (1000, 5000, 20_000, 165_000)),
    *(f"multi30k/{pair}/29000" for pair in ("en-de", "en-fr")),
    *(f"{kind}/en/{count}" for kind in ("dates", "numbers") for count in (300, 3000)),
]
SUITES = {"two-cores": TWO_CORES, "full": dict.fromkeys(FULL_TASKS, (1, 2, 3))}
DEVELOPMENT_PAIRS = 2000
"""of Tatoeba, pairs drawn from the training part, with all pairs of the same source"""


class Split(NamedTuple):
    """Training pairs, and the pairs on which a model is judged."""

    training: Pairs
    judged: Pairs


def read_task(data: Path, task: str, part: str) -> Split:
    """The pairs of a task; `part` is dev or test."""
    kind, name, count = task.split("/")
    rng = random.Random(task)
    if kind in ("dates", "numbers"):
        pairs = list(dict.fromkeys(_dates(rng) if kind == "dates" else _numbers(rng)))
        judged = {"dev": pairs[:1000], "test": pairs[1000:2000]}[part]
        return Split(pairs[2000 : 2000 + int(count)], judged)
    if kind in ("tatoeba", "multi30k"):
        languages = name.split("-")
        folder = data / "tatoeba" / name if kind == "tatoeba" else data / "multi30k"
        names = {"test": "val" if kind == "tatoeba" else "test2016", "dev": "val", "train": "train"}
        training, judged = (
            list(zip(*(_lines(folder / f"{names[split]}.{language}.gz") for language in languages)))
            for split in ("train", part)
        )
        if kind == "tatoeba":
            held_out = set(random.Random(name).sample(sorted({source for source, _ in training}), DEVELOPMENT_PAIRS))
            if part == "dev":
                judged = list({source: (source, target) for source, target in training if source in held_out}.values())
            training = [pair for pair in training if pair[0] not in held_out]
    else:
        training, judged = (
            [tuple(line.split("\t")[:2]) for line in _lines(data / kind / f"{name}_{split}.tsv.gz")]
            for split in ("train", part)
        )
    if len(training) > int(count):
        rows = sorted(rng.sample(range(len(training)), int(count)))
        training = [training[row] for row in rows]
    return Split(training, judged)


def _lines(path: Path) -> list[str]:
    from regard.data import read_lines

    return [line for line in read_lines(path) if line.strip()] if path.name.endswith(".tsv.gz") else read_lines(path)


MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
UNITS += ["seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def _dates(rng: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(10_000):
        year, month, day = rng.randint(1900, 2099), rng.randint(1, 12), rng.randint(1, 28)
        forms = (f"{day} {MONTHS[month - 1]} {year}", f"{MONTHS[month - 1]} {day}, {year}", f"{day}.{month}.{year}")
        yield rng.choice(forms), f"{year}-{month:02}-{day:02}"


def _numbers(rng: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(10_000):
        number = rng.randint(0, 10 ** rng.randint(2, 6))
        yield str(number), _in_words(number)


def _in_words(number: int) -> str:
    """A number below a million in words.

    >>> _in_words(12_345)
    'twelve thousand three hundred forty-five'
    """
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return TENS[tens - 2] + (f"-{UNITS[units]}" if units else "")
    size, word = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    return f"{_in_words(count)} {word}" + (f" {_in_words(rest)}" if rest else "")


class Run(NamedTuple):
    """A setting on a task with a seed."""

    setting: str
    task: str
    seed: int
    part: str
    overrides: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self[:4]


def train_and_judge(run: Run, data: Path) -> dict[str, Any]:
    """Train with what the data suggest and the overrides, and translate the judged part with the default search."""
    import regard

    split = read_task(data, run.task, run.part)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        file.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in split.training))
        options = {"train": {"seed": run.seed, "workers": 1}}
        for key, value in run.overrides.items():
            section, _, name = key.rpartition(".")
            options.setdefault(section or "train", {})[name] = value
        start, cpu_start = time.monotonic(), _cpu_seconds()
        translator = regard.train(str(file), out=Path(folder) / "model", quiet=True, **options)
        training = {"seconds": round(time.monotonic() - start, 1), "cpu_seconds": round(_cpu_seconds() - cpu_start, 1)}
        training["step"] = translator.training["step"]
        training["validation"] = translator.training["validation"]
        outputs = [best[0].text for best in translator.translate([source for source, _ in split.judged], truncate=True)]
    return run._asdict() | training | {"outputs": outputs}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def judge(result: dict[str, Any], judged: Pairs) -> Any:
    """The metric of a run, as sums over examples: BLEU for sentences, exact match (in percent) for the others."""
    from regard.evaluation.text_metrics import text_sums

    sums, _ = text_sums(result["outputs"], [target for _, target in judged])
    return sums["bleu" if result["task"].startswith(("tatoeba", "multi30k")) else "exact_match"]


def run_all(runs: Iterable[Run], data: Path, results: Path, jobs: int) -> None:
    """Train what the results lack, `jobs` processes at a time."""
    finished = {
        (result["setting"], result["task"], result["seed"], result["part"]): result["overrides"]
        for result in read_results(results)
    }
    waiting = []
    for run in runs:
        if run.key not in finished:
            waiting.append(run)
        elif finished[run.key] != run.overrides:
            sys.exit(f"{results} {run.setting} has other overrides: {finished[run.key]}. Choose another name.")
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(train_and_judge, run, data) for run in waiting]):
            result = future.result()
            with results.open("a") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
            print(_describe(result, data), flush=True)


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _describe(result: dict[str, Any], data: Path) -> str:
    metric = judge(result, read_task(data, result["task"], result["part"]).judged)
    score = f"{metric.value:.1f} ± {metric.margin:.1f}"
    cost = f"{result['cpu_seconds']:.0f} CPU s, {result['seconds']:.0f} s, step {result['step']}"
    return f"{result['setting']}  {result['task']}  seed {result['seed']}  {result['part']}  {score}  {cost}"


class Row(NamedTuple):
    """Two settings on a task or a class of tasks, as means over seeds and tasks; `difference` is resampled."""

    scores: tuple[float, float]
    difference: Any
    seconds: tuple[float, float]

    def show(self, name: str) -> str:
        from regard.evaluation.bootstrap import interval

        (first, second), (low, high) = self.scores, interval(self.difference)
        seconds = ", ".join(f"{value:.0f}" for value in self.seconds)
        return (
            f"| {name} | {first:.1f} | {second:.1f} | {second - first:+.1f} | {low:+.1f} to {high:+.1f} | {seconds} |"
        )


def compare(results: list[dict[str, Any]], data: Path, settings: list[str], part: str) -> None:
    """Print the two settings on each shared task over its shared seeds, and on each class of tasks."""
    runs = {(result["setting"], result["task"], result["seed"]): result for result in results if result["part"] == part}
    first, second = ({key[1:] for key in runs if key[0] == setting} for setting in settings)
    print(f"| task | {settings[0]} | {settings[1]} | difference | 95% interval | CPU s |\n| --- |{' ---: |' * 5}")
    classes: dict[str, list[Row]] = {}
    for task in sorted({task for task, _ in first & second}):
        seeds, judged = [seed for name, seed in first & second if name == task], read_task(data, task, part).judged
        chosen = [[runs[setting, task, seed] for seed in seeds] for setting in settings]
        metrics = [[judge(run, judged) for run in row] for row in chosen]
        resampled = [fmean_arrays([metric.resampled for metric in row]) for row in metrics]
        scores = tuple(fmean(metric.value for metric in row) for row in metrics)
        row = Row(
            scores, resampled[1] - resampled[0], tuple(fmean(run["cpu_seconds"] for run in row) for row in chosen)
        )
        print(row.show(f"{task}, {len(seeds)} seeds"))
        kind, _, count = task.split("/")
        classes.setdefault(f"{kind}/{count}", []).append(row)
    for name, rows in classes.items():
        # Tasks are independent: their resamples are combined in different orders.
        shuffled = [
            random.Random(index).sample(list(row.difference), len(row.difference)) for index, row in enumerate(rows)
        ]
        scores, seconds = (
            tuple(map(fmean, zip(*columns))) for columns in zip(*((row.scores, row.seconds) for row in rows))
        )
        print(Row(scores, fmean_arrays(shuffled), seconds).show(f"**{name}**, {len(rows)} tasks"))


def fmean_arrays(arrays: list[Any]) -> Any:
    import numpy as np

    return np.mean(np.array(arrays), axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("../small_data.jsonl"))
    parser.add_argument("--part", choices=("dev", "test"), default="dev")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("setting", help="name of the setting in the results")
    run.add_argument("--suite", choices=SUITES, default="two-cores")
    run.add_argument("--only", default="", help="start of the names of the tasks")
    run.add_argument("--seeds", type=int, nargs="*", help="instead of those of the suite")
    run.add_argument("--jobs", type=int, default=2, help="processes at a time")
    run.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the recipe, as TOML")
    comparison = commands.add_parser("compare")
    comparison.add_argument("settings", nargs=2)
    options = parser.parse_args()
    if options.command == "compare":
        compare(read_results(options.results), options.data, options.settings, options.part)
        return
    overrides = {}
    for assignment in options.set:
        key, _, value = assignment.partition("=")
        try:
            overrides[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            overrides[key] = value
    suite = SUITES[options.suite]
    runs = [
        Run(options.setting, task, seed, options.part, overrides)
        for task, seeds in suite.items()
        if task.startswith(options.only)
        for seed in (options.seeds or seeds)
    ]
    run_all(runs, options.data.resolve(), options.results, options.jobs)


if __name__ == "__main__":
    main()
