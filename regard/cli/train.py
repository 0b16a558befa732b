"""`regard train`: from files to a model folder."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from regard.errors import RegardError
from regard.models import FAMILIES, ModelConfig, TransformerConfig
from regard.train import (
    DataConfig,
    Recipe,
    TokenizerConfig,
    TrainConfig,
    read_corpus,
    read_toml,
    recipe_from,
    suggest,
    train,
)


@dataclass(frozen=True)
class Arguments:
    """Trains a model from sentence pairs: regard train --data pairs.tsv --out model/

    What the recipe and the command line leave open is chosen from the data. --model.family (transformer, seq2seq)
    decides which other --model options there are. A run that was cut off goes on with the same command.
    """

    recipe: Annotated[str, tyro.conf.Positional] = ""
    """a recipe (.toml); options on the command line win over it"""
    out: str = "model"
    """the folder of the trained model"""
    start_from: Annotated[str, tyro.conf.arg(name="from")] = ""
    """a model folder to go on from with these data: its weights, sizes and tokenisers"""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    model: ModelConfig = dataclasses.field(default_factory=TransformerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)


def run(argv: list[str]) -> int:
    argv = ["--data.files" if word == "--data" else word for word in argv]
    argv, family = _take_family(argv)
    named = bool(argv) and not argv[0].startswith("-")
    table, origin = (read_toml(argv[0]), argv[0]) if named else ({}, "the command line")
    if family:
        table = table | {"model": table.get("model", {}) | {"family": family}}
    first = _parse(argv, recipe_from(table, origin=origin))
    corpus = read_corpus(first.data)
    chosen = _parse(argv, recipe_from(table, suggest(corpus), origin))
    recipe = Recipe(
        task=recipe_from(table, origin=origin).task,
        data=chosen.data,
        tokenizer=chosen.tokenizer,
        model=chosen.model,
        train=chosen.train,
    )
    translator = train(recipe, chosen.out, start_from=chosen.start_from or None, corpus=corpus)
    best = translator.training["validation"]
    print(
        f"Best at step {translator.training['step']}: perplexity {best['perplexity']:.3f}, BLEU {best['bleu']:.2f}, "
        f"exact match {best['exact_match']:.1f} % on the validation pairs; {chosen.out}/loss.png shows the way there.",
        file=sys.stderr,
    )
    print(f'The model is in {chosen.out}. Try: regard translate {chosen.out} "…"', file=sys.stderr)
    return 0


def _parse(argv: list[str], recipe: Recipe) -> Arguments:
    sections: dict[str, Any] = {name: getattr(recipe, name) for name in ("data", "tokenizer", "model", "train")}
    return tyro.cli(
        Arguments,
        prog="regard train",
        args=argv,
        default=Arguments(**sections),
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed),
    )


def _take_family(argv: list[str]) -> tuple[list[str], str]:
    """--model.family decides which other --model options there are, so it is read before them."""
    for i, word in enumerate(argv):
        if word == "--model.family":
            if i + 1 == len(argv):
                raise RegardError("--model.family wants a name.", f"Choose from: {', '.join(FAMILIES)}.")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
    return argv, ""
