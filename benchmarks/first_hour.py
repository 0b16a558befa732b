"""First hour of a new user: six data sets, the commands of the README and the docs without further options, one table.

    python benchmarks/first_hour.py --data ../data --out runs/first-hour

Each experiment trains with the suggested settings, evaluates on test data, and compares with a trivial baseline. It
fails if the model is not better than the baseline, or is not the one with the best validation score. Inflection and the
language without spaces are generated here; the rest are public data sets (`--data`).
"""

import argparse
import gzip
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import images
import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.data import read_pairs

TATOEBA_PAIRS = 6_000


class Experiment(NamedTuple):
    """A data set: the options of `regard train` and `regard evaluate`, the key of the score, and the baseline."""

    name: str
    train: list[str]
    evaluate: list[str]
    score: str
    baseline: float
    higher_is_better: bool = True


def inflection(_: Path, folder: Path) -> Experiment:
    """Plurals of invented words by six rules; the baseline adds the most frequent ending."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(4)) for _ in range(1700)})
    rng.shuffle(words)
    endings = {"a": "an", "e": "er", "i": "", "o": "oes", "u": "um"}
    pairs = [(word, (word[:-1] if word[-1] in "iu" else word) + endings[word[-1]]) for word in words]
    write_pairs(folder / "infl.tsv", pairs[:1500])
    write_pairs(folder / "infl-test.tsv", pairs[1500:])
    baseline = 100 * sum(target == source + "an" for source, target in pairs[1500:]) / len(pairs[1500:])
    return Experiment("inflection", ["--data", "infl.tsv"], ["--data", "infl-test.tsv"], "exact_match", baseline)


def without_spaces(_: Path, folder: Path) -> Experiment:
    """English to French of the phrasebook, with spaces removed from the target; the baseline copies the source."""
    for name, split, count in (("spaceless.tsv", "phrasebook", 6000), ("spaceless-test.tsv", "phrasebook:test", 300)):
        pairs = [(source, target.replace(" ", "")) for source, target in read_pairs([split])[:count]]
        write_pairs(folder / name, pairs)
    baseline = CHRF().corpus_score([source for source, _ in pairs], [[target for _, target in pairs]]).score
    train, test = ["--data", "spaceless.tsv"], ["--data", "spaceless-test.tsv"]
    return Experiment("target without spaces", train, test, "chrf", baseline)


def tatoeba(data: Path, folder: Path) -> Experiment:
    """A sample of Tatoeba English–French; the baseline copies the source."""
    for part, count in (("train", TATOEBA_PAIRS), ("val", 500)):
        sides = [read_gz(data / f"tatoeba/en-fr/{part}.{side}.gz").splitlines() for side in ("en", "fr")]
        pairs = random.Random(0).sample(list(zip(*sides)), count)
        write_pairs(folder / f"tatoeba-{part}.tsv", pairs)
    baseline = BLEU().corpus_score([source for source, _ in pairs], [[target for _, target in pairs]]).score
    train, test = ["--data", "tatoeba-train.tsv"], ["--data", "tatoeba-val.tsv"]
    return Experiment(f"Tatoeba, {TATOEBA_PAIRS:,} pairs", train, test, "bleu", baseline)


def sst2(data: Path, folder: Path) -> Experiment:
    """Sentiment of sentences; the baseline always predicts the most frequent label."""
    for part in ("train", "dev"):
        (folder / f"sst2-{part}.tsv").write_text(read_gz(data / f"sst2/{part}.tsv.gz"), encoding="utf-8")
    labels = Counter(line.split("\t")[0] for line in (folder / "sst2-dev.tsv").read_text("utf-8").splitlines()[1:])
    baseline = 100 * max(labels.values()) / sum(labels.values())
    train = ["--task", "classify", "--data", "sst2-train.tsv"]
    return Experiment("SST-2", train, ["--data", "sst2-dev.tsv"], "accuracy", baseline)


def shakespeare(data: Path, folder: Path) -> Experiment:
    """Characters of Shakespeare, the last tenth for testing; the baseline is a bigram model."""
    text = read_gz(data / "tinyshakespeare/input.txt.gz")
    split = int(0.9 * len(text))
    (folder / "books.txt").write_text(text[:split], encoding="utf-8")
    (folder / "books-test.txt").write_text(text[split:], encoding="utf-8")
    pairs, firsts = Counter(pairwise(text[:split])), Counter(text[: split - 1])
    test_pairs = Counter(pairwise(text[split:]))
    size = len(firsts)
    nll = -sum(n * math.log((pairs[p] + 1) / (firsts[p[0]] + size)) for p, n in test_pairs.items())
    baseline = nll / sum(test_pairs.values())
    train = ["--task", "language", "--data", "books.txt"]
    test = ["--data", "books-test.txt"]
    return Experiment("Shakespeare, characters", train, test, "loss", baseline, higher_is_better=False)


def pets(data: Path, folder: Path) -> Experiment:
    """37 breeds of cats and dogs; the baseline always predicts the most frequent one."""
    images.pets(data / "oxford-pets", folder)
    breeds = np.bincount(np.load(folder / "pets.npz")["test_breed"])
    baseline = 100 * float(breeds.max() / breeds.sum())
    train = ["--task", "classify-images", "--data", "pets.npz:train", "--data.label", "breed"]
    return Experiment("pets, 37 breeds", train, ["--data", "pets.npz:test", "--label", "breed"], "accuracy", baseline)


EXPERIMENTS: dict[str, Callable[[Path, Path], Experiment]] = {
    function.__name__: function for function in (inflection, without_spaces, tatoeba, sst2, shakespeare, pets)
}


def read_gz(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")


def run_regard(folder: Path, *arguments: str) -> None:
    """Run the command in a folder, without its standard output."""
    print(f"$ regard {' '.join(arguments)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "regard", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def is_best_validation(model: Path) -> bool:
    """Whether the step of the model has the best validation score in metrics.jsonl (ties: the lowest loss)."""
    training = json.loads((model / "training.json").read_text(encoding="utf-8"))
    lines = map(json.loads, (model / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    metric_name = training["recipe"]["train"]["validate_by"]
    scores = {line["step"]: line for line in lines if line["kind"] == "validation"}
    metric = (lambda line: -line["nll"]) if metric_name == "loss" else (lambda line: line[metric_name])
    return training["step"] == max(scores, key=lambda step: (metric(scores[step]), -scores[step]["nll"], -step))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", choices=[*EXPERIMENTS, []], help="experiments to run (default: all)")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    total_start, failed = time.monotonic(), False
    table = ["| data | minutes | steps (best) | metric | score | trivial baseline |", "|---|---|---|---|---|---|"]
    for name in options.experiments or EXPERIMENTS:
        experiment = EXPERIMENTS[name](options.data.resolve(), options.out)
        start = time.monotonic()
        run_regard(options.out, "train", *experiment.train, "--out", name)
        run_regard(options.out, "evaluate", name, *experiment.evaluate, "--json", f"{name}.json")
        minutes = (time.monotonic() - start) / 60
        result = json.loads((options.out / f"{name}.json").read_text(encoding="utf-8"))
        score, model = result[experiment.score], options.out / name
        training = json.loads((model / "training.json").read_text(encoding="utf-8"))
        is_better = score > experiment.baseline if experiment.higher_is_better else score < experiment.baseline
        is_best = is_best_validation(model)
        failed |= not (is_better and is_best)
        steps = json.loads((model / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
        metric = experiment.score.replace("_", " ")
        warning = "" if is_better else " NOT BETTER"
        warning += "" if is_best else " NOT THE BEST"
        table.append(
            f"| {experiment.name} | {minutes:.1f} | {steps} ({training['step']}) | {metric} "
            f"| {score:.2f} | {experiment.baseline:.2f} |{warning}"
        )
        print(table[-1], file=sys.stderr, flush=True)
    table.append(f"| all | {(time.monotonic() - total_start) / 60:.1f} | | | | |")
    print("\n".join(table))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
