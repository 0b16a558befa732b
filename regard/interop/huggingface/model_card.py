"""Model card: README.md of an exported folder, made from training.json."""

import json
from collections.abc import Iterator, Mapping
from functools import singledispatch
from pathlib import PurePath
from typing import Any

from regard.pipelines import ImageModel, Pipeline, TextEncoder, TextGenerator, Translator

# Tasks in the names of the Hugging Face Hub, by the method of the pipeline that runs the head of an encoder.
_ENCODER_TASKS = {
    "fill": "fill-mask",
    "classify": "text-classification",
    "answer": "question-answering",
    "tag": "token-classification",
}
_IMAGE_TASKS = {"classify": "image-classification", "segment": "image-segmentation"}
# Settings of the recipe that are listed.
_TRAINING_KEYS = (
    *("steps", "batch_tokens", "batch_images", "optimizer", "lr", "schedule", "warmup", "label_smoothing"),
    *("weight_decay", "ema", "precision", "seed"),
)


def make_model_card(pipeline: Pipeline, class_name: str, name: str) -> str:
    """The model card of an exported model: YAML front matter, then data, training and scores, as far as known.

    Only the names of data files are given, not their folders. The license is left to the user.
    """
    training = pipeline.training
    parameters = sum(parameter.numel() for parameter in pipeline.model.parameters())
    lines = ["---", *_front_matter(pipeline), "---", "", f"# {name}", ""]
    lines.append(f"`{class_name}` with {parameters / 1e6:.1f} M parameters, exported with Regard.")
    sections = {
        "Usage": _usage(class_name, has_processor=not pipeline.tokenizers),
        "Data": _data(training),
        "Training": _table(_recipe(training), ("setting", "value")),
        "Scores on the validation split": _table(_scores(training), ("score", "value")),
    }
    for title, content in sections.items():
        if content:
            lines += ["", f"## {title}", "", *content]
    lines += ["", "## License", "", "Not stated. Choose a license that the data permits, and set `license` above.", ""]
    return "\n".join(lines)


def _front_matter(pipeline: Pipeline) -> Iterator[str]:
    yield "library_name: transformers"
    yield f"pipeline_tag: {_task(pipeline)}"
    # The Hub knows languages, not regions.
    codes = dict.fromkeys(code.replace("_", "-").partition("-")[0] for code in getattr(pipeline, "languages", ()))
    if codes:
        yield "language:"
        yield from (f"- {json.dumps(code, ensure_ascii=False)}" for code in codes)
    base = pipeline.training.get("start_from")
    if isinstance(base, str) and base:
        yield f"base_model: {json.dumps(PurePath(base).name, ensure_ascii=False)}"
    yield "tags:"
    yield "- regard"
    yield "# license: apache-2.0"


@singledispatch
def _task(pipeline: Any) -> str:
    """The task in the names of the Hub."""
    return "other"


@_task.register
def _translator_task(translator: Translator) -> str:
    return "translation"


@_task.register
def _generator_task(generator: TextGenerator) -> str:
    return "text-generation"


@_task.register
def _encoder_task(encoder: TextEncoder) -> str:
    return _ENCODER_TASKS.get(encoder.head.method, "feature-extraction")


@_task.register
def _image_task(model: ImageModel) -> str:
    return _IMAGE_TASKS.get(model.head.method, "image-feature-extraction")


def _usage(class_name: str, has_processor: bool) -> list[str]:
    reader = "AutoImageProcessor" if has_processor else "AutoTokenizer"
    return [
        "```python",
        f"from transformers import {reader}, {class_name}",
        "",
        f'model = {class_name}.from_pretrained("FOLDER")',
        f'{"processor" if has_processor else "tokenizer"} = {reader}.from_pretrained("FOLDER")',
        "```",
    ]


def _data(training: Mapping[str, Any]) -> list[str]:
    """The files of the data, and the sizes and fingerprints of its parts."""
    imported = training.get("imported")
    if isinstance(imported, dict):
        return [f"Imported from `{imported.get('folder')}` ({imported.get('class')}); see its model card."]
    files = _get(training, "recipe", "data", "files")
    lines = []
    if isinstance(files, list) and files:
        lines = ["Files: " + ", ".join(f"`{PurePath(str(file)).name}`" for file in files), ""]
    rows = []
    parts = training.get("data")
    for part, facts in parts.items() if isinstance(parts, dict) else ():
        if isinstance(facts, dict):
            facts = ", ".join(f"{key} {value}" for key, value in facts.items())
        rows.append((part, facts))
    return lines + _table(rows, ("part", "content"))


def _recipe(training: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for section, keys in (("", ("task",)), ("tokenizer", ("kind", "vocab_size", "shared")), ("train", _TRAINING_KEYS)):
        table = _get(training, "recipe", section) if section else _get(training, "recipe")
        if isinstance(table, dict):
            prefix = f"{section}." if section else ""
            rows += [(f"`{prefix}{key}`", table[key]) for key in keys if table.get(key) not in (None, "")]
    if rows and "step" in training:
        rows.append(("step of the saved weights", training["step"]))
    versions = training.get("versions")
    if isinstance(versions, dict):
        rows += [(f"{package} version", version) for package, version in versions.items()]
    return rows


def _scores(training: Mapping[str, Any]) -> list[tuple[str, Any]]:
    scores = training.get("validation")
    if not isinstance(scores, dict):
        return []
    return [(f"`{name}`", f"{value:.4g}" if isinstance(value, float) else value) for name, value in scores.items()]


def _get(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _table(rows: list[tuple[str, Any]], titles: tuple[str, str]) -> list[str]:
    if not rows:
        return []
    cells = [(str(name), str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows]
    return [f"| {titles[0]} | {titles[1]} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in cells)]
