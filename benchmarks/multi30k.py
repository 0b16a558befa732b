"""Multi30k: train models in sequence and score each on test2016 and test2017 (beam 5).

    python benchmarks/multi30k.py --data multi30k/tok --out runs \
        "en-de multi30k-transformer seed=1" "en-fr multi30k-transformer seed=1 steps=4000"

A run is a language pair, a recipe, and overrides (`key=value` with a key of [train], or `section.key=value`).
"""

import time
from pathlib import Path
from typing import Any

from training_runs import Run, main

from regard.data import read_lines
from regard.decode import DecodeConfig
from regard.evaluation import text_scores
from regard.training import recipe_from_dict, run_recipe


def train_and_score(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """Train and score one run."""
    source, target = run.dataset.split("-")
    files = {
        name: [str(data / f"{part}.{language}.gz") for language in (source, target)]
        for name, part in (("files", "train"), ("validation", "val"))
    }
    start = time.monotonic()
    translator = run_recipe(recipe_from_dict(run.recipe | {"data": files}), out, start_from=run.start_from)
    result: dict[str, Any] = {"seconds": round(time.monotonic() - start), "step": translator.training["step"]}
    for test in ("test2016", "test2017"):
        lines, references = (read_lines(data / f"{test}.{language}.gz") for language in (source, target))
        translations = translator.translate(lines, DecodeConfig(beam=5), truncate=True)
        scores = text_scores([best[0].text for best in translations], references)
        result[test] = round(scores.tokenized_bleu, 2)
        result[f"{test}_sacrebleu"] = round(scores.bleu, 2)
    return result


if __name__ == "__main__":
    main(__doc__, train_and_score)
