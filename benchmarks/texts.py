"""Language models, classifiers and answerers of questions, trained one after another and scored.

    python benchmarks/texts.py --data data --out runs \
        "shakespeare shakespeare seed=1" "sst2 sst2 from=minilm" "piaf:0 answer-finetuned from=minilm"

What can be trained: `shakespeare`, `wikitext2`, `sst2`, and `xquad:FOLD` and `piaf:FOLD` (fold 0 to 4: the questions
about every fifth text are held out, and those about the next fifth validate). The rest of a run's words are as in
multi30k.py, and `from=FOLDER` is a model to begin with. `--data` is a folder that holds tinyshakespeare/input.txt.gz,
wikitext2/{train,valid,test}.txt.gz, sst2/{train,dev}.tsv.gz, qa/xquad.en.json.gz, qa/piaf-v1.0.fr.json.gz.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

from training_runs import Run, main

from regard.data import read_documents, read_labeled_texts, read_squad, split_documents
from regard.evaluation.text_metrics import squad_scores
from regard.training import recipe_from_dict, run_recipe
from regard.training.datasets import Dataset

FOLDS = 5


def shakespeare(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """The last tenth of the characters validates, as nanoGPT cuts it; it is also what is scored."""
    file = data / "tinyshakespeare" / "input.txt.gz"
    bundle, seconds = trained(run, {"files": [str(file)]}, out)
    loss = bundle.evaluate(split_documents(read_documents([file]))[1])
    return seconds | {"loss": round(loss.loss, 4), "bits_per_byte": round(loss.bits_per_byte, 4)}


def wikitext2(run: Run, data: Path, out: Path) -> dict[str, Any]:
    files = {part: str(data / "wikitext2" / f"{part}.txt.gz") for part in ("train", "valid", "test")}
    bundle, seconds = trained(run, {"files": [files["train"]], "validation": [files["valid"]]}, out)
    found = {part: bundle.evaluate(read_documents([files[part]])) for part in ("valid", "test")}
    return seconds | {f"{part}_perplexity": round(loss.word_perplexity, 2) for part, loss in found.items()}


def sst2(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """A tenth of the sentences of train validates (Regard sets it aside); dev, which nobody trains on, is scored."""
    bundle, seconds = trained(run, {"files": [str(data / "sst2" / "train.tsv.gz")]}, out)
    examples = read_labeled_texts([data / "sst2" / "dev.tsv.gz"])
    found = bundle.classify([one.texts for one in examples], truncate=True)
    right = sum(answer.label == one.label for answer, one in zip(found, examples))
    return seconds | {"accuracy": round(100 * right / len(examples), 2), "of": len(examples)}


def questions(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """A fold of a file in SQuAD's layout: every fifth text, with all questions about it, is held out."""
    name, fold = run.what.split(":")
    file = data / "qa" / {"xquad": "xquad.en.json.gz", "piaf": "piaf-v1.0.fr.json.gz"}[name]
    everything = read_squad(file)
    number = {context: i for i, context in enumerate(dict.fromkeys(one.context for one in everything))}
    parts: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    for one in everything:
        place = (number[one.context] - int(fold)) % FOLDS
        parts[{0: "test", 1: "validation"}.get(place, "train")].append(one)
    dataset = Dataset(parts["train"], parts["validation"], "questions")
    bundle, seconds = trained(run, {}, out, dataset)
    test = [dataclasses.replace(one, id=str(i)) for i, one in enumerate(parts["test"])]
    exact, f1 = squad_scores({one.id: text for one, text in zip(test, bundle.answer(test))}, test)
    return seconds | {"exact_match": round(exact, 2), "f1": round(f1, 2), "of": len(test)}


def trained(run: Run, files: dict[str, list[str]], out: Path, dataset: Any = None) -> tuple[Any, dict[str, Any]]:
    began = time.monotonic()
    bundle = run_recipe(recipe_from_dict(run.recipe | {"data": files}), out, start_from=run.start_from, dataset=dataset)
    facts = bundle.training
    return bundle, {
        "seconds": round(time.monotonic() - began, 1),
        "step": facts["step"],
        "validation": {name: round(value, 4) for name, value in facts["validation"].items()},
    }


SETS = {"shakespeare": shakespeare, "wikitext2": wikitext2, "sst2": sst2, "xquad": questions, "piaf": questions}


def one_run(run: Run, data: Path, out: Path) -> dict[str, Any]:
    return SETS[run.what.split(":")[0]](run, data, out)


if __name__ == "__main__":
    main(__doc__, one_run)
