"""Effect of the form of a model: the recipe that `regard train` suggests for a data set, in several forms.

    python benchmarks/forms.py --data ../data --out runs/forms --jobs 8 --seeds 1 2 --only multi30k tatoeba hun fre
    python benchmarks/forms.py --data ../data --out runs/forms --seeds 1 2 --only language classify mask --share 0.2

The images are pets.npz of benchmarks/images.py, in the folder of the data.
Every run uses the suggested recipe with the changes of the form, and is scored on validation data: translators with
beam 5 by BLEU (sentences) or exact match (pronunciations), other tasks by loss and metrics of the last validation.
"suggested" is the unchanged recipe, with early stopping; the other forms train for all steps and keep the last model.
`--share` shortens the runs to a share of the suggested steps, with the same schedule. Forms of one data set alternate.
Results are appended to results.jsonl. `--only multi30k/rotary` runs only names that contain one of these words.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Task and [data] of each data set.
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "multi30k": (
        "translate",
        {
            "files": ("multi30k/train.en.gz", "multi30k/train.de.gz"),
            "validation": ("multi30k/val.en.gz", "multi30k/val.de.gz"),
        },
    ),
    "tatoeba": (
        "translate",
        {
            "files": ("tatoeba/en-fr/train.en.gz", "tatoeba/en-fr/train.fr.gz"),
            "validation": ("tatoeba/en-fr/val.en.gz", "tatoeba/en-fr/val.fr.gz"),
        },
    ),
    "hun": ("translate", {"files": ("g2p/hun_train.tsv.gz",), "validation": ("g2p/hun_dev.tsv.gz",)}),
    "fre": ("translate", {"files": ("g2p/fre_train.tsv.gz",), "validation": ("g2p/fre_dev.tsv.gz",)}),
    "language": ("language", {"files": ("tinyshakespeare/input.txt.gz",)}),
    "mask": ("mask", {"files": ("tinyshakespeare/input.txt.gz",)}),
    "classify": ("classify", {"files": ("sst2/train.tsv.gz",), "validation": ("sst2/dev.tsv.gz",)}),
    "answer": ("answer", {"files": ("qa/piaf-v1.0.fr.json.gz",)}),
    "images": ("classify-images", {"files": ("pets.npz:train",), "label": "species"}),
}
LAST = {"patience": 0, "validate_by": "last"}
COSINE = LAST | {"schedule": "cosine"}
# The changes of [model] and [train], by task. Gated layers have two thirds of the hidden width: about as many weights.
PLAIN = {"segments": 2, "first_norm": True, "activation": "gelu", "head_transform": False, "feedforward": 1.0}
MODERN = {"segments": 0, "first_norm": False, "activation": "geglu_exact", "head_transform": True, "feedforward": 2 / 3}
PRE_NORM = {"norm": "pre", "positions": "rotary", "norm_eps": 1e-5}
ENCODERS: dict[str, tuple[dict, dict]] = {
    "pre-norm": (PRE_NORM | PLAIN, LAST),
    "ModernBERT": (PRE_NORM | MODERN, LAST),
    "BERT": ({"norm": "post", "positions": "learned", "norm_eps": 1e-12} | PLAIN, LAST),
}
FORMS: dict[str, dict[str, tuple[dict, dict]]] = {
    "translate": {
        "suggested": ({}, {}),
        "rotary": ({"positions": "rotary", "qk_norm": False}, COSINE),
        "rotary+qk": ({"positions": "rotary", "qk_norm": True}, COSINE),
        "sinusoidal": ({"positions": "sinusoidal", "qk_norm": False}, COSINE),
        "rotary wsd": ({"positions": "rotary", "qk_norm": False}, COSINE | {"schedule": "wsd"}),
    },
    "language": {
        "relu2": ({"activation": "relu2", "feedforward": 1.0}, LAST),
        "swiglu": ({"activation": "swiglu", "feedforward": 2 / 3}, LAST),
    },
    "mask": ENCODERS,
    "classify": ENCODERS,
    "answer": ENCODERS,
    "classify-images": {
        "stem": ({"patches": "stem", "positions": "rotary", "pooling": "mean"}, LAST),
        "ViT": ({"patches": "linear", "positions": "learned", "pooling": "class"}, LAST),
    },
}


def run_one(data: Path, out: Path, name: str, form: str, seed: int, share: float) -> dict:
    from regard.training import read_dataset, run_recipe, suggest_recipe
    from regard.training.log import read_metrics
    from regard.training.recipe import recipe_from_dict, recipe_to_dict

    task, files = DATA[name]
    files = {
        key: tuple(str(data / file) for file in value) if isinstance(value, tuple) else value
        for key, value in files.items()
    }
    dataset = read_dataset(task, recipe_from_dict({"task": task, "data": files}).data, quiet=True)
    table = recipe_to_dict(suggest_recipe(task, dataset)) | {"data": files}
    model, training = FORMS[task][form]
    if task in ("language", "mask", "classify", "answer"):
        model = model | {"feedforward": hidden_width(table["model"], model["feedforward"])}
    table["model"] |= model
    table["train"] |= training | {"seed": seed}
    if training:
        steps = max(1, round(share * table["train"]["steps"]))
        table["train"] |= {"steps": steps, "validate_every": steps, "warmup": steps // 10}
    start = time.monotonic()
    pipeline = run_recipe(recipe_from_dict(table), out, dataset=dataset, quiet=True)
    return {
        **{"data": name, "form": form, "seed": seed, "steps": table["train"]["steps"]},
        **{"seconds": round(time.monotonic() - start), "parameters": count_parameters(pipeline.model)},
        **{"best_step": pipeline.training["step"], "last_step": read_metrics(out / "metrics.jsonl")[-1]["step"]},
        **(translation_scores(pipeline, dataset) if task == "translate" else pipeline.training["validation"]),
    }


def hidden_width(model: dict[str, Any], share: float) -> int:
    """The hidden width of a feed-forward layer, from the suggested one, rounded up to a multiple of 8."""
    is_gated = model["activation"] in ("swiglu", "geglu", "geglu_exact")
    ungated = round(model["feedforward"] * (1.5 if is_gated else 1) / 64) * 64
    return -(-round(ungated * share) // 8) * 8


def count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def translation_scores(translator: Any, dataset: Any) -> dict[str, float]:
    from regard.decode import DecodeConfig
    from regard.evaluation import text_scores

    sources, references = zip(*dataset.validation)
    translations = translator.translate(sources, DecodeConfig(beam=5), truncate=True)
    scores = text_scores([best[0].text for best in translations], references)
    return {metric: round(getattr(scores, metric), 2) for metric in ("bleu", "exact_match", "chrf")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--share", type=float, default=1.0, help="share of the suggested steps (default 1)")
    parser.add_argument("--minutes", type=float, default=600, help="time limit after which no run starts (default 600)")
    parser.add_argument(
        "--run", nargs=3, metavar=("DATA", "FORM", "SEED"), help="run a single experiment in this process"
    )
    options = parser.parse_args()
    if options.run:
        name, form, seed = options.run
        print(json.dumps(run_one(options.data, options.out, name, form, int(seed), options.share)))
        return
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)

    def launch(job: tuple[str, str, int]) -> None:
        if time.monotonic() - start > 60 * options.minutes:
            return
        name, form, seed = job
        folder = options.out / f"{name}-{form.replace(' ', '-').replace('/', '-')}-{seed}"
        command = [sys.executable, __file__, "--data", options.data, "--out", folder, "--share", options.share]
        process = subprocess.run(list(map(str, [*command, "--run", name, form, seed])), capture_output=True, text=True)
        line = (
            process.stdout.strip().splitlines()[-1]
            if process.returncode == 0
            else json.dumps({"data": name, "form": form, "seed": seed, "error": process.stderr[-2000:]})
        )
        print(line, flush=True)
        with open(options.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    jobs = [(name, form, seed) for name, (task, _) in DATA.items() for seed in options.seeds for form in FORMS[task]]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(launch, [job for job in jobs if any(word in f"{job[0]}/{job[1]}" for word in options.only)]))


if __name__ == "__main__":
    main()
