"""`regard plan`: memory, speed, time and cost of training on a cluster."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from regard.cli.common import NO_HINT, parse
from regard.config_reader import read_toml
from regard.models import family_name
from regard.recipes import find_recipe
from regard.training import Recipe, recipe_from_dict
from regard.training.planning import plan
from regard.training.planning.step_estimates import Sharding

Size = Annotated[int, tyro.conf.arg(help_behavior_hint="(default: of the recipe)")]


@dataclass(frozen=True)
class Options:
    """Plan a training run on a cluster: regard plan RECIPE --gpus 64 --tokens 10e9 --price 3

    Print memory per GPU, time per step, tokens per second, days and cost. They are computed, from speeds measured on
    one H200; nothing is trained. To measure a recipe on this machine instead: regard train RECIPE --dry-run
    """

    recipe: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="(default: a Transformer)")
    ] = ""
    """recipe, or the name of a packaged one"""
    family: Annotated[str, tyro.conf.arg(metavar="FAMILY", help_behavior_hint="(default: of the recipe)")] = ""
    """model family: transformer, gpt or bert"""
    width: Size = 0
    """width of the model"""
    layers: Size = 0
    """number of layers; of a Transformer, in the encoder and in the decoder"""
    heads: Size = 0
    """number of attention heads"""
    feedforward: Size = 0
    """width of the feed-forward layers"""
    vocab: Size = 0
    """size of the vocabulary"""
    batch_tokens: Size = 0
    """tokens per GPU and step; of pairs, source and target together"""
    tokens: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: of --data or RECIPE)")] = (
        None
    )
    """training tokens in total; of pairs, source and target together"""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE", help_behavior_hint=NO_HINT)] = ()
    """plain text files, whose tokens are estimated: one per 4 bytes"""
    epochs: float = 1.0
    """passes over --data"""
    gpus: int = 1
    """number of GPUs"""
    gpu: Annotated[str, tyro.conf.arg(metavar="GPU")] = "h200"
    """kind of GPU: h200 (measured), h100 or a100 (from their data sheets)"""
    gpus_per_node: int = 8
    """GPUs per node"""
    link: float = 50.0
    """bandwidth between nodes, GB/s per GPU"""
    sharding: Sharding = "ddp"
    """what each GPU stores: everything (ddp), or a part of parameters, gradients and optimizer state (fsdp)"""
    price: Annotated[float, tyro.conf.arg(help_behavior_hint=NO_HINT)] = 0.0
    """price per GPU and hour"""


def run(argv: list[str]) -> int:
    options = parse(Options, "plan", argv)
    print(
        plan(
            _recipe(options),
            tokens=options.tokens,
            data=options.data,
            epochs=options.epochs,
            vocab=options.vocab,
            batch_tokens=options.batch_tokens,
            gpus=options.gpus,
            gpu=options.gpu,
            gpus_per_node=options.gpus_per_node,
            link=options.link,
            sharding=options.sharding,
            price=options.price,
        )
    )
    return 0


def _recipe(options: Options) -> Recipe:
    """The recipe, with the sizes of the command line."""
    table: dict[str, Any] = read_toml(find_recipe(options.recipe)) if options.recipe else {}
    if options.family:
        table = {**table, "model": {**table.get("model", {}), "family": options.family}}
        table.setdefault("task", {"gpt": "language", "bert": "mask"}.get(options.family, "translate"))
    recipe = recipe_from_dict(table, origin=options.recipe or "the command line")
    layers = ("encoder_layers", "decoder_layers") if family_name(recipe.model) == "transformer" else ("layers",)
    sizes = {"width": options.width, "heads": options.heads, "feedforward": options.feedforward}
    sizes |= dict.fromkeys(layers, options.layers)
    return recipe.override(model={name: size for name, size in sizes.items() if size})
