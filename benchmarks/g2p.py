"""Grapheme to phoneme (SIGMORPHON 2021, task 1): word error rate with the packaged recipe `pronunciations`.

    python benchmarks/g2p.py --data g2p --out runs/g2p fre dut

Each language is trained as by `regard train pronunciations --data LANG_train.tsv.gz --validation LANG_dev.tsv.gz`, with
sizes and steps chosen from the data, and tested with a beam of 5. The error rate counts words with any wrong phoneme;
the interval is a 95% Wilson interval.
"""

import argparse
import math
import time
from pathlib import Path

from regard.data import read_pairs
from regard.decode import DecodeConfig
from regard.recipes import find_recipe
from regard.training import DataConfig, read_dataset, read_toml, run_recipe, suggest_recipe
from regard.training.recipe import recipe_from_dict, recipe_to_dict


def wilson(errors: int, total: int) -> tuple[float, float]:
    """95% Wilson interval of a proportion, in percent."""
    z, p = 1.96, errors / total
    center, half = p + z * z / (2 * total), z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return tuple(100 * (center + sign * half) / (1 + z * z / total) for sign in (-1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("languages", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    for language in options.languages:
        files = {name: str(options.data / f"{language}_{name}.tsv.gz") for name in ("train", "dev", "test")}
        data = DataConfig(files=(files["train"],), validation=(files["dev"],))
        dataset = read_dataset("translate", data)
        recipe = recipe_from_dict(read_toml(find_recipe("pronunciations")), suggest_recipe("translate", dataset))
        table = recipe_to_dict(recipe) | {"data": {"files": data.files, "validation": data.validation}}
        table["train"] |= {"workers": options.workers, "device": "cpu"}
        start = time.monotonic()
        translator = run_recipe(recipe_from_dict(table), options.out / language, dataset=dataset)
        minutes = (time.monotonic() - start) / 60
        test = read_pairs([files["test"]])
        translations = translator.translate([word for word, _ in test], DecodeConfig(beam=5))
        errors = sum(best[0].text != gold for best, (_, gold) in zip(translations, test))
        low, high = wilson(errors, len(test))
        rate, pairs = 100 * errors / len(test), len(dataset.training)
        print(f"| {language} | {rate:.2f} | {low:.1f} to {high:.1f} | {pairs} | {minutes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
