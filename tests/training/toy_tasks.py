"""Small training runs of every text task except translation: files of a few kilobytes and tiny models."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.data import Question
from regard.models import GPTConfig, TransformerConfig
from regard.models.bert import bert_tiny
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.training import DataConfig, Recipe, TokenizerConfig, TrainConfig, recipe_from_dict

ANIMALS = ["cat", "dog", "cow", "hen", "owl", "fox", "bee", "ant"]
VERBS = ["sees", "hears", "likes", "seeks"]
GPT = GPTConfig(width=16, heads=2, layers=1, feedforward=32, dropout=0.2, max_len=32)
BERT = bert_tiny(width=16, heads=2, layers=1, feedforward=32, dropout=0.2, max_len=32)
TRANSFORMER = TransformerConfig(
    width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, dropout=0.2, max_len=32
)
TRAIN = TrainConfig(
    steps=12, batch_tokens=256, warmup=3, validate_every=6, save_every=4, log_every=2, workers=1, device="cpu"
)
# The pipeline class of each task, and its validation metrics in addition to the loss.
KINDS: dict[str, tuple[type[Any], set[str]]] = {
    "language": (TextGenerator, set()),
    "mask": (TextEncoder, set()),
    "classify": (TextEncoder, {"accuracy"}),
    "answer": (TextEncoder, {"exact_match", "f1"}),
    "tag": (TextEncoder, {"f1", "accuracy"}),
    "text2text": (Translator, {"bleu", "chrf", "exact_match"}),
}


def sentences(count: int, seed: int = 0) -> list[str]:
    """Random sentences such as "the cat sees the dog"."""
    draw = random.Random(seed)
    return [f"the {draw.choice(ANIMALS)} {draw.choice(VERBS)} the {draw.choice(ANIMALS)}" for _ in range(count)]


def write_text(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def write_squad(path: Path, examples: list[tuple[str, str, str | None]]) -> str:
    """Write question, context and answer (its last occurrence, or None) of each example in the format of SQuAD."""
    paragraphs = []
    for index, (question, context, answer) in enumerate(examples):
        answers = [] if answer is None else [{"text": answer, "answer_start": context.rindex(answer)}]
        entry = {"id": str(index), "question": question, "is_impossible": answer is None, "answers": answers}
        paragraphs.append({"context": context, "qas": [entry]})
    table = {"version": "2.0", "data": [{"title": "toys", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


def _language(folder: Path) -> Recipe:
    files = (write_text(folder / "text.txt", sentences(60)),)
    return Recipe("language", DataConfig(files), TokenizerConfig("char"), GPT, TRAIN)


def _mask(folder: Path) -> Recipe:
    files = (write_text(folder / "lines.txt", sentences(100)),)
    return Recipe("mask", DataConfig(files), TokenizerConfig("bpe", vocab_size=60), BERT, TRAIN)


def _classify(folder: Path) -> Recipe:
    lines = [f"{text}\t{'birds' if 'hen' in text or 'owl' in text else 'others'}" for text in sentences(100)]
    files = (write_text(folder / "labeled.tsv", lines),)
    return Recipe("classify", DataConfig(files), TokenizerConfig("bpe", vocab_size=60), BERT, TRAIN)


def _answer(folder: Path) -> Recipe:
    examples: list[tuple[str, str, str | None]] = [("who", text, text.split()[-1]) for text in sentences(100)]
    files = (write_squad(folder / "squad.json", examples),)
    return Recipe("answer", DataConfig(files), TokenizerConfig("word"), BERT, TRAIN)


def _tag(folder: Path) -> Recipe:
    rows = [[f"{word}\t{'B-ANIMAL' if word in ANIMALS else 'O'}" for word in text.split()] for text in sentences(100)]
    files = (write_text(folder / "tagged.tsv", [line for row in rows for line in (*row, "")]),)
    return Recipe("tag", DataConfig(files), TokenizerConfig("bpe", vocab_size=60), BERT, TRAIN)


def _text2text(folder: Path) -> Recipe:
    same = [f"{text}\t{text}" for text in sentences(40, seed=1)]
    upper = [f"{text}\t{text.upper()}" for text in sentences(40, seed=2)]
    files = (write_text(folder / "same.tsv", same), write_text(folder / "loud.tsv", upper))
    data = DataConfig(files, prefixes=("same: ", "loud: "), weights=(1.0, 1.5))
    return Recipe("text2text", data, TokenizerConfig("bpe", vocab_size=80), TRANSFORMER, TRAIN)


_RECIPES: dict[str, Callable[[Path], Recipe]] = {
    "language": _language,
    "mask": _mask,
    "classify": _classify,
    "answer": _answer,
    "tag": _tag,
    "text2text": _text2text,
}


def toy(task: str, folder: Path, **sections: dict[str, Any]) -> Recipe:
    """Write the files of a task and return a small recipe for them: toy("mask", folder, train={"steps": 3})."""
    return recipe_from_dict(sections, _RECIPES[task](folder))


def outputs(task: str, pipeline: Any) -> Any:
    """Outputs of a pipeline, to compare with those of another one."""
    text = "the cat sees the dog"
    if task == "language":
        return [pipeline.score([text]), pipeline("the ")]
    if task == "mask":
        return [pipeline.fill("the <mask> sees the dog"), pipeline.embed([text]).tolist()]
    if task == "classify":
        return pipeline.classify([text])
    if task == "answer":
        return pipeline.answer([Question("1", "who", text)])
    if task == "tag":
        return pipeline.tag([text])
    return [pipeline("same: " + text), pipeline.score([("loud: " + text, text.upper())])]
