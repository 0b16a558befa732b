"""`regard train`: from files to a model folder."""

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from regard.data import AugmentConfig
from regard.errors import RegardError
from regard.interop.targets import Target
from regard.models import FAMILIES, ModelConfig, TransformerConfig
from regard.train import DataConfig, Recipe, TokenizerConfig, TrainConfig, read_toml, recipe_from, train
from regard.train.recipe import DERIVED, PHRASEBOOK, SECTIONS, with_cache
from regard.train.tasks import TASKS, check_recipe, read_data, restrict_recipe


@dataclass(frozen=True)
class Arguments:
    """Trains a model: regard train --data pairs.tsv --out model/

    --task is what it learns: translate (sentence pairs), text2text (several such tasks, told apart by prefixes),
    language (plain text; to write more of it), mask (plain text; to encode it), classify (texts and labels), answer
    (questions in the layout of SQuAD), classify-images (pictures and labels), segment (pictures and masks), mask-images
    (pictures alone; to begin with). --model.family (transformer, seq2seq, gpt, bert, vit) decides which other --model
    options there are. What the recipe and the command line leave open is chosen from the data. A run that was cut off
    goes on with the same command.
    """

    recipe: Annotated[str, tyro.conf.Positional] = ""
    """a recipe (.toml); options on the command line win over it"""
    out: str = "model"
    """the folder of the trained model"""
    start_from: Annotated[str, tyro.conf.arg(name="from")] = ""
    """a model folder to go on from with these data: its weights, sizes and tokenisers"""
    export_for: Annotated[Target | None, tyro.conf.arg(name="for")] = None
    """export target: restricts the model to a form that exports there"""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    model: ModelConfig = dataclasses.field(default_factory=TransformerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)


def run(argv: list[str]) -> int:
    argv = ["--data.files" if word == "--data" else word for word in argv]
    argv, family = _take(argv, "--model.family", FAMILIES)
    argv, task = _take(argv, "--task", TASKS)
    named = bool(argv) and not argv[0].startswith("-")
    table, origin = (read_toml(argv[0]), argv[0]) if named else ({}, "the command line")
    if family:
        table = table | {"model": table.get("model", {}) | {"family": family}}
    if task:
        table = table | {"task": task}
    plain = recipe_from(table, origin=origin)
    first = _parse(argv, plain)
    if plain.task != "translate" and first.data.files == (PHRASEBOOK,):
        raise RegardError(f"There is nothing to train a model to {plain.task} with.", "Name files: --data FILE …")
    if first.export_for and first.start_from:
        raise RegardError(
            f"--for {first.export_for} cannot change the form of {first.start_from} (--from).", "Leave out --for."
        )
    corpus = read_data(plain.task, with_cache(first.data, first.out))
    suggested = TASKS[plain.task].suggest(corpus, bool(first.start_from))
    if first.export_for:
        suggested = restrict_recipe(suggested, first.export_for)
    chosen = _parse(argv, recipe_from(table, suggested, origin))
    recipe = Recipe(plain.task, **{section: getattr(chosen, section) for section in SECTIONS})
    if chosen.export_for:
        check_recipe(recipe, chosen.export_for)
    bundle = train(recipe, chosen.out, start_from=chosen.start_from or None, corpus=corpus)
    best = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in bundle.training["validation"].items())
    print(
        f"Best at step {bundle.training['step']} on what was set aside: {best}; {chosen.out}/loss.png shows the way "
        f"there.\nThe model is in {chosen.out}. Try: {TASKS[plain.task].try_it.format(out=chosen.out)}",
        file=sys.stderr,
    )
    return 0


def _parse(argv: list[str], recipe: Recipe) -> Arguments:
    sections: dict[str, Any] = {section: getattr(recipe, section) for section in SECTIONS}
    kind = type(recipe.model)
    shown = _without_derived(kind)
    sections["model"] = _as(shown, recipe.model)
    found = tyro.cli(
        Arguments,
        prog="regard train",
        args=argv,
        default=Arguments(**sections),
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed),
    )
    return dataclasses.replace(found, model=_as(kind, found.model))


def _without_derived(kind: type) -> type:
    """The config of a model whose fields that follow from the data are no options."""
    derived = [one for one in dataclasses.fields(kind) if one.name in DERIVED]
    fixed = [
        (one.name, Annotated[one.type, tyro.conf.Fixed], dataclasses.field(default=one.default)) for one in derived
    ]
    return dataclasses.make_dataclass(
        kind.__name__, fixed, bases=(kind,), frozen=True, namespace={"__doc__": kind.__doc__}
    )


def _as(kind: type, config: Any) -> Any:
    return kind(**{one.name: getattr(config, one.name) for one in dataclasses.fields(kind)})


def _take(argv: list[str], option: str, known: Iterable[str]) -> tuple[list[str], str]:
    """These decide which other options there are, so they are read before them."""
    for i, word in enumerate(argv):
        if word == option:
            if i + 1 == len(argv):
                raise RegardError(f"{option} wants a name.", f"Choose from: {', '.join(known)}.")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
    return argv, ""
