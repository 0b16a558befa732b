"""A very small run: 200 sentences of the phrasebook, a model of some thousand weights, a dozen steps."""

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
from regard.folder import Bundle
from regard.models import TransformerConfig
from regard.training import (
    DataConfig,
    Dataset,
    Recipe,
    TokenizerConfig,
    TrainConfig,
    read_dataset,
    recipe_from,
    train,
    trainer,
)
from regard.training.trainer import STATE

SMALL = Recipe(
    data=DataConfig(phrasebook_size=200),
    tokenizer=TokenizerConfig(vocab_size=150),
    model=TransformerConfig(
        width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, dropout=0.2, max_len=40
    ),
    train=TrainConfig(
        steps=12, batch_tokens=256, warmup=3, validate_every=6, save_every=4, log_every=2, workers=1, device="cpu"
    ),
)
# Everything that has a memory or draws random numbers.
LIVELY = {"tokenizer": {"dropout": 0.2}, "train": {"accumulate": 2, "ema": 0.9, "r_drop": 1.0}}


def small(**sections: dict[str, Any]) -> Recipe:
    """The small recipe with changes: small(train={"steps": 3})."""
    return recipe_from(sections, SMALL)


@functools.cache
def small_dataset() -> Dataset:
    dataset = read_dataset("translate", SMALL.data)
    return dataclasses.replace(dataset, validation=dataset.validation[:6])


def said(recipe: Recipe, out: Path, **options: Any) -> str:
    """What the user is told of a run that is refused."""
    with pytest.raises(RegardError) as caught:
        train(recipe, out, quiet=True, **options)
    return str(caught.value)


def cut_off_and_go_on(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """A run that breaks off before its eighth update, and once more, whole."""
    set_learning_rate, calls = trainer.set_learning_rate, []

    def cut_off(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 8:  # after a validation, and between two saves
            raise ConnectionError
        set_learning_rate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "set_learning_rate", cut_off)
        with pytest.raises(ConnectionError):
            run()
    run()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that the run left behind in tensors: the best model, and the state with its moments and averages."""
    return {
        f"{name}:{key}": tensor
        for name in ("model.safetensors", STATE)
        for key, tensor in load_file(folder / name).items()
    }


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def run_again(runs: Mapping[str, Path], task: str, out: Path, **sections: dict[str, Any]) -> Bundle:
    """The same files and recipe once more, but for the changes."""
    recipe = json.loads((runs[task] / "training.json").read_text(encoding="utf-8"))["recipe"]
    return train(recipe_from(sections, recipe_from(recipe)), out, quiet=True)
