"""A small training run for tests (200 phrasebook pairs, a tiny model, 12 steps), and helpers to compare runs."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import RegardError
from regard.models import TransformerConfig
from regard.pipelines import Pipeline
from regard.training import (
    DataConfig,
    Dataset,
    Recipe,
    TokenizerConfig,
    TrainConfig,
    loop,
    read_dataset,
    recipe_from_dict,
    run_recipe,
    suggest_recipe,
)
from regard.training.checkpoint import METRICS, TENSORS, CheckpointStore
from regard.training.log import read_metrics
from regard.training.tasks import restrict_recipe

SMALL = Recipe(
    data=DataConfig(limit=200),
    tokenizer=TokenizerConfig(vocab_size=150),
    model=TransformerConfig(
        width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, dropout=0.2, max_len=40
    ),
    train=TrainConfig(
        steps=12, batch_tokens=256, warmup=3, validate_every=6, save_every=4, log_every=2, workers=1, device="cpu"
    ),
)
# Settings that add randomness or state: BPE-dropout, gradient accumulation, EMA and R-Drop.
STOCHASTIC = {"tokenizer": {"dropout": 0.2}, "train": {"accumulate": 2, "ema": 0.9, "r_drop": 1.0}}


def small_recipe(**sections: dict[str, Any]) -> Recipe:
    """The small recipe with changed keys: small_recipe(train={"steps": 3})."""
    return recipe_from_dict(sections, SMALL)


@functools.cache
def small_dataset() -> Dataset:
    dataset = read_dataset("translate", SMALL.data)
    return dataclasses.replace(dataset, validation=dataset.validation[:6])


def error_message(recipe: Recipe, out: Path, **options: Any) -> str:
    """The message of the RegardError that `train` raises."""
    with pytest.raises(RegardError) as caught:
        run_recipe(recipe, out, quiet=True, **options)
    return str(caught.value)


def interrupt_and_resume(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Call `run` twice: the first call fails before its eighth update, the second one resumes it."""
    set_learning_rate, calls = loop.set_learning_rate, []

    def fail(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 8:  # after a validation, and between two checkpoints
            raise ConnectionError
        set_learning_rate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", fail)
        with pytest.raises(ConnectionError):
            run()
    run()


def fail_after(updates: int) -> None:
    """Let every rank stop with an error after this many updates; only for processes that end with the run."""
    set_learning_rate, calls = loop.set_learning_rate, []

    def count_or_fail(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) > updates:
            raise RegardError("stopped")
        set_learning_rate(*arguments)

    loop.set_learning_rate = count_or_fail


def losses(out: Path) -> list[float]:
    """The logged training losses of a run."""
    return [line["loss"] for line in read_metrics(out / METRICS) if line["kind"] == "train"]


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that a run saved: the best model and the checkpoint (weights, EMA, optimizer state)."""
    return {
        f"{name}:{key}": tensor
        for name, path in (("model", folder / "model.safetensors"), ("state", last_checkpoint(folder)))
        for key, tensor in load_file(path).items()
    }


def last_checkpoint(folder: Path) -> Path:
    """The file of the newest checkpoint of a run."""
    return CheckpointStore(folder).paths()[0] / TENSORS


def bit_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both dictionaries hold the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def repeat_run(runs: Mapping[str, Path], task: str, out: Path, **sections: dict[str, Any]) -> Pipeline:
    """Train again with the files and the recipe of a finished run, and changed keys."""
    recipe = json.loads((runs[task] / "training.json").read_text(encoding="utf-8"))["recipe"]
    return run_recipe(recipe_from_dict(sections, recipe_from_dict(recipe)), out, quiet=True)


def as_toml(table: dict) -> str:
    """A recipe table as TOML: plain values first, then sections."""

    def value(x: object) -> str:
        if isinstance(x, bool):
            return str(x).lower()
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(value, x))}]"
        return f'"{x}"' if isinstance(x, str) else repr(x)

    lines = [f"{key} = {value(x)}" for key, x in table.items() if not isinstance(x, dict)]
    for section, keys in table.items():
        if isinstance(keys, dict):
            lines += [f"[{section}]", *(f"{key} = {value(x)}" for key, x in keys.items() if x is not None)]
    return "\n".join(lines)


def plan(
    task: str, data: DataConfig, *, fine_tune: bool = False, export_for: str | None = None
) -> tuple[Recipe, Dataset[Any]]:
    """The suggested recipe for data, and the dataset."""
    dataset = read_dataset(task, data, quiet=True)
    recipe = dataclasses.replace(suggest_recipe(task, dataset, fine_tune), data=data)
    return restrict_recipe(recipe, export_for) if export_for else recipe, dataset
