"""A newcomer's first hour: six data sets, the commands of the README and the docs with no other options, one table.

    python benchmarks/first_hour.py --data ../data --out runs/first-hour

Each row trains with what Regard chooses by itself, evaluates on data that were not trained on, and compares with a
trivial baseline. A row fails if the model is not better than its baseline, or is not the one of the best validation.
Inflection and the language without spaces are generated here; the rest are public data sets (`--data`).
"""

import argparse
import csv
import gzip
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.data.phrasebook import phrasebook_pairs

TATOEBA_PAIRS = 6_000


class Row(NamedTuple):
    """A data set: the options of `regard train` and `regard evaluate`, the key of the score, and the baseline."""

    name: str
    train: list[str]
    evaluate: list[str]
    score: str
    baseline: float
    higher_is_better: bool = True


def inflection(_: Path, folder: Path) -> Row:
    """Plurals of made-up words by six rules; the baseline adds the commonest ending."""
    draw = random.Random(0)
    words = sorted({"".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(4)) for _ in range(1700)})
    draw.shuffle(words)
    endings = {"a": "an", "e": "er", "i": "", "o": "oes", "u": "um"}
    pairs = [(word, (word[:-1] if word[-1] in "iu" else word) + endings[word[-1]]) for word in words]
    write_pairs(folder / "infl.tsv", pairs[:1500])
    write_pairs(folder / "infl-test.tsv", pairs[1500:])
    baseline = 100 * sum(target == source + "an" for source, target in pairs[1500:]) / len(pairs[1500:])
    return Row("inflection", ["--data", "infl.tsv"], ["--data", "infl-test.tsv"], "exact_match", baseline)


def without_spaces(_: Path, folder: Path) -> Row:
    """English to French of the phrasebook's grammar, its spaces removed; the baseline copies the source."""
    for name, split, count in (("spaceless.tsv", "train", 6000), ("spaceless-test.tsv", "test", 300)):
        pairs = [(one.source, one.target.replace(" ", "")) for one in phrasebook_pairs(split, count)]
        write_pairs(folder / name, pairs)
    baseline = CHRF().corpus_score([source for source, _ in pairs], [[target for _, target in pairs]]).score
    return Row("target without spaces", ["--data", "spaceless.tsv"], ["--data", "spaceless-test.tsv"], "chrf", baseline)


def tatoeba(data: Path, folder: Path) -> Row:
    """A part of Tatoeba's English and French; the baseline copies the source."""
    for part, count in (("train", TATOEBA_PAIRS), ("val", 500)):
        sides = [read_gz(data / f"tatoeba/en-fr/{part}.{side}.gz").splitlines() for side in ("en", "fr")]
        pairs = random.Random(0).sample(list(zip(*sides)), count)
        write_pairs(folder / f"tatoeba-{part}.tsv", pairs)
    baseline = BLEU().corpus_score([source for source, _ in pairs], [[target for _, target in pairs]]).score
    train, test = ["--data", "tatoeba-train.tsv"], ["--data", "tatoeba-val.tsv"]
    return Row(f"Tatoeba, {TATOEBA_PAIRS:,} pairs", train, test, "bleu", baseline)


def sst2(data: Path, folder: Path) -> Row:
    """Sentiment of sentences; the baseline always gives the commonest label."""
    for part in ("train", "dev"):
        (folder / f"sst2-{part}.tsv").write_text(read_gz(data / f"sst2/{part}.tsv.gz"), encoding="utf-8")
    labels = Counter(line.split("\t")[0] for line in (folder / "sst2-dev.tsv").read_text("utf-8").splitlines()[1:])
    baseline = 100 * max(labels.values()) / sum(labels.values())
    train = ["--task", "classify", "--data", "sst2-train.tsv"]
    return Row("SST-2", train, ["--data", "sst2-dev.tsv"], "accuracy", baseline)


def shakespeare(data: Path, folder: Path) -> Row:
    """Characters of Shakespeare, the last tenth held out; the baseline is a bigram model."""
    text = read_gz(data / "tinyshakespeare/input.txt.gz")
    cut = int(0.9 * len(text))
    (folder / "books.txt").write_text(text[:cut], encoding="utf-8")
    (folder / "books-test.txt").write_text(text[cut:], encoding="utf-8")
    pairs, firsts, held = Counter(pairwise(text[:cut])), Counter(text[: cut - 1]), Counter(pairwise(text[cut:]))
    size = len(firsts)
    baseline = -sum(n * math.log((pairs[p] + 1) / (firsts[p[0]] + size)) for p, n in held.items()) / sum(held.values())
    train = ["--task", "language", "--data", "books.txt"]
    return Row("Shakespeare, characters", train, ["--data", "books-test.txt"], "loss", baseline, higher_is_better=False)


def pets(data: Path, folder: Path) -> Row:
    """37 breeds of cats and dogs; the baseline always gives the commonest one."""
    for file in (data / "oxford-pets").iterdir():
        shutil.copyfile(file, folder / file.name)
    with open(folder / "index.csv", encoding="utf-8", newline="") as file:
        breeds = Counter(row["breed"] for row in csv.DictReader(file) if row["split"] == "test")
    baseline = 100 * max(breeds.values()) / sum(breeds.values())
    train = ["--task", "classify-images", "--data", "index.csv:trainval", "--data.label", "breed"]
    return Row("pets, 37 breeds", train, ["--data", "index.csv:test", "--label", "breed"], "accuracy", baseline)


ROWS: dict[str, Callable[[Path, Path], Row]] = {
    one.__name__: one for one in (inflection, without_spaces, tatoeba, sst2, shakespeare, pets)
}


def read_gz(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")


def regard(folder: Path, *arguments: str) -> None:
    """Runs the command in a folder; its output is shown."""
    print(f"$ regard {' '.join(arguments)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "regard", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def best_validation_is_kept(model: Path) -> bool:
    """Whether the model's step is that of the best validation in metrics.jsonl, by its own metric and then the loss."""
    training = json.loads((model / "training.json").read_text(encoding="utf-8"))
    lines = map(json.loads, (model / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    by = training["recipe"]["train"]["validate_by"]
    scores = {line["step"]: line for line in lines if line["kind"] == "validation"}
    metric = (lambda line: -line["nll"]) if by == "loss" else (lambda line: line[by])
    return training["step"] == max(scores, key=lambda step: (metric(scores[step]), -scores[step]["nll"], -step))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="all of them, or some")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), False
    table = ["| data | minutes | steps (best) | metric | score | trivial baseline |", "|---|---|---|---|---|---|"]
    for name in options.rows or ROWS:
        row = ROWS[name](options.data.resolve(), options.out)
        start = time.monotonic()
        regard(options.out, "train", *row.train, "--out", name)
        regard(options.out, "evaluate", name, *row.evaluate, "--json", f"{name}.json")
        minutes = (time.monotonic() - start) / 60
        result = json.loads((options.out / f"{name}.json").read_text(encoding="utf-8"))
        score, model = result[row.score], options.out / name
        training = json.loads((model / "training.json").read_text(encoding="utf-8"))
        better = score > row.baseline if row.higher_is_better else score < row.baseline
        kept = best_validation_is_kept(model)
        failed |= not (better and kept)
        steps = json.loads((model / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
        table.append(
            f"| {row.name} | {minutes:.1f} | {steps} ({training['step']}) | {row.score.replace('_', ' ')} "
            f"| {score:.2f} | {row.baseline:.2f} |{'' if better else ' NOT BETTER'}{'' if kept else ' NOT THE BEST'}"
        )
        print(table[-1], file=sys.stderr, flush=True)
    table.append(f"| all | {(time.monotonic() - began) / 60:.1f} | | | | |")
    print("\n".join(table))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
