"""Train language models, classifiers and question answering models in sequence and score them.

    python benchmarks/texts.py --data data --out runs \
        "shakespeare shakespeare seed=1" "sst2 sst2 from=minilm" "piaf:0 answer-finetuned from=minilm"

Data sets: `shakespeare`, `wikitext2`, `sst2`, and `xquad:FOLD` and `piaf:FOLD` (fold 0 to 4: the questions about every
fifth text are for testing, those about the next fifth for validation). The other words of a run are as in multi30k.py;
`from=FOLDER` fine-tunes a model. `--data` is a folder that contains tinyshakespeare/input.txt.gz,
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
    """The last tenth of the characters is for validation, as in nanoGPT, and is also scored."""
    file = data / "tinyshakespeare" / "input.txt.gz"
    pipeline, seconds = train_model(run, {"files": [str(file)]}, out)
    loss = pipeline.evaluate(split_documents(read_documents([file]))[1])
    return seconds | {"loss": round(loss.loss, 4), "bits_per_byte": round(loss.bits_per_byte, 4)}


def wikitext2(run: Run, data: Path, out: Path) -> dict[str, Any]:
    files = {part: str(data / "wikitext2" / f"{part}.txt.gz") for part in ("train", "valid", "test")}
    pipeline, seconds = train_model(run, {"files": [files["train"]], "validation": [files["valid"]]}, out)
    losses = {part: pipeline.evaluate(read_documents([files[part]])) for part in ("valid", "test")}
    return seconds | {f"{part}_perplexity": round(loss.word_perplexity, 2) for part, loss in losses.items()}


def sst2(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """A tenth of train is the validation split; dev is scored."""
    pipeline, seconds = train_model(run, {"files": [str(data / "sst2" / "train.tsv.gz")]}, out)
    examples = read_labeled_texts([data / "sst2" / "dev.tsv.gz"])
    predictions = pipeline.classify([example.texts for example in examples], truncate=True)
    correct = sum(prediction.label == example.label for prediction, example in zip(predictions, examples))
    return seconds | {"accuracy": round(100 * correct / len(examples), 2), "of": len(examples)}


def questions(run: Run, data: Path, out: Path) -> dict[str, Any]:
    """One fold of a file in SQuAD format: every fifth text, with all its questions, is for testing."""
    name, fold = run.dataset.split(":")
    file = data / "qa" / {"xquad": "xquad.en.json.gz", "piaf": "piaf-v1.0.fr.json.gz"}[name]
    all_questions = read_squad(file)
    contexts = dict.fromkeys(question.context for question in all_questions)
    index = {context: i for i, context in enumerate(contexts)}
    parts: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    for question in all_questions:
        distance = (index[question.context] - int(fold)) % FOLDS
        parts[{0: "test", 1: "validation"}.get(distance, "train")].append(question)
    dataset = Dataset(parts["train"], parts["validation"], "questions")
    pipeline, seconds = train_model(run, {}, out, dataset)
    test = [dataclasses.replace(question, id=str(i)) for i, question in enumerate(parts["test"])]
    exact, f1 = squad_scores({question.id: text for question, text in zip(test, pipeline.answer(test))}, test)
    return seconds | {"exact_match": round(exact, 2), "f1": round(f1, 2), "of": len(test)}


def train_model(run: Run, files: dict[str, list[str]], out: Path, dataset: Any = None) -> tuple[Any, dict[str, Any]]:
    start = time.monotonic()
    pipeline = run_recipe(
        recipe_from_dict(run.recipe | {"data": files}), out, start_from=run.start_from, dataset=dataset
    )
    facts = pipeline.training
    return pipeline, {
        "seconds": round(time.monotonic() - start, 1),
        "step": facts["step"],
        "validation": {name: round(value, 4) for name, value in facts["validation"].items()},
    }


SETS = {"shakespeare": shakespeare, "wikitext2": wikitext2, "sst2": sst2, "xquad": questions, "piaf": questions}


def train_and_score(run: Run, data: Path, out: Path) -> dict[str, Any]:
    return SETS[run.dataset.split(":")[0]](run, data, out)


if __name__ == "__main__":
    main(__doc__, train_and_score)
