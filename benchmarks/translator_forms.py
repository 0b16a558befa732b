"""Effect of QK-norm, rotary positions and the schedule: the suggested translation recipe in several forms.

    python benchmarks/translator_forms.py --data ../data --out runs/forms --jobs 8 --seeds 1 2

Every run uses the recipe that `regard train` suggests for the data, with the changes of the form, and is scored on the
validation data with beam 5: BLEU for sentences, exact match for pronunciations. "suggested" is the unchanged recipe,
with early stopping; the other forms train for all steps and keep the last model. Results are appended to results.jsonl.
`--only multi30k/rotary` runs only names that contain it.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DATA = {
    "multi30k": (("multi30k/train.en.gz", "multi30k/train.de.gz"), ("multi30k/val.en.gz", "multi30k/val.de.gz")),
    "tatoeba": (
        ("tatoeba/en-fr/train.en.gz", "tatoeba/en-fr/train.fr.gz"),
        ("tatoeba/en-fr/val.en.gz", "tatoeba/en-fr/val.fr.gz"),
    ),
    "hun": (("g2p/hun_train.tsv.gz",), ("g2p/hun_dev.tsv.gz",)),
    "fre": (("g2p/fre_train.tsv.gz",), ("g2p/fre_dev.tsv.gz",)),
}
COSINE = {"schedule": "cosine", "patience": 0, "validate_by": "last"}
# Changes of [model], and of [train].
FORMS: dict[str, tuple[dict, dict]] = {
    "suggested": ({}, {}),
    "rotary": ({"positions": "rotary", "qk_norm": False}, COSINE),
    "rotary+qk": ({"positions": "rotary", "qk_norm": True}, COSINE),
    "sinusoidal": ({"positions": "sinusoidal", "qk_norm": False}, COSINE),
    "rotary wsd": ({"positions": "rotary", "qk_norm": False}, COSINE | {"schedule": "wsd"}),
}


def run_one(data: Path, out: Path, name: str, form: str, seed: int) -> dict:
    from regard.decode import DecodeConfig
    from regard.evaluation import text_scores
    from regard.training import DataConfig, read_dataset, run_recipe, suggest_recipe
    from regard.training.recipe import recipe_from_dict, recipe_to_dict
    from regard.training.run.run_log import read_metrics

    files, validation = (tuple(str(data / file) for file in part) for part in DATA[name])
    config = DataConfig(files=files, validation=validation)
    dataset = read_dataset("translate", config)
    table = recipe_to_dict(suggest_recipe("translate", dataset)) | {"data": {"files": files, "validation": validation}}
    model, training = FORMS[form]
    table["model"] |= model
    table["train"] |= training | {"seed": seed}
    if training:
        table["train"]["validate_every"] = table["train"]["steps"]
    start = time.monotonic()
    translator = run_recipe(recipe_from_dict(table), out, dataset=dataset, quiet=True)
    seconds = time.monotonic() - start
    translations = translator.translate(
        [source for source, _ in dataset.validation], DecodeConfig(beam=5), truncate=True
    )
    scores = text_scores([best[0].text for best in translations], [target for _, target in dataset.validation])
    return {
        **{"data": name, "form": form, "seed": seed, "steps": table["train"]["steps"], "seconds": round(seconds)},
        **{"best_step": translator.training["step"], "last_step": read_metrics(out / "metrics.jsonl")[-1]["step"]},
        **{"bleu": round(scores.bleu, 2), "exact_match": round(scores.exact_match, 2), "chrf": round(scores.chrf, 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=600, help="time limit after which no run starts (default 600)")
    parser.add_argument(
        "--run", nargs=3, metavar=("DATA", "FORM", "SEED"), help="run a single experiment in this process"
    )
    options = parser.parse_args()
    if options.run:
        name, form, seed = options.run
        print(json.dumps(run_one(options.data, options.out, name, form, int(seed))))
        return
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)

    def launch(job: tuple[str, str, int]) -> None:
        if time.monotonic() - start > 60 * options.minutes:
            return
        name, form, seed = job
        folder = options.out / f"{name}-{form.replace(' ', '-').replace('/', '-')}-{seed}"
        command = [sys.executable, __file__, "--data", options.data, "--out", folder, "--run", name, form, str(seed)]
        process = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        line = (
            process.stdout.strip().splitlines()[-1]
            if process.returncode == 0
            else json.dumps({"data": name, "form": form, "seed": seed, "error": process.stderr[-2000:]})
        )
        print(line, flush=True)
        with open(options.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    jobs = [(name, form, seed) for seed in options.seeds for form in FORMS for name in DATA]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(launch, [job for job in jobs if options.only in f"{job[0]}/{job[1]}"]))


if __name__ == "__main__":
    main()
