"""`regard train`: train a model from files."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join, quote
from typing import Any

from regard.cli.config import recipe_toml
from regard.cli.options import parse_words
from regard.cli.train_options import every_option, full_help, option_name, recipe_keys, short_help
from regard.errors import RegardError
from regard.evaluation.text_metrics import format_metrics
from regard.interop.export_targets import EXPORT_TARGETS
from regard.models import family_name
from regard.recipes import find_recipe, recipe_names
from regard.training import TASKS, Recipe, read_toml, recipe_from_dict
from regard.training.distributed import run_torchrun_rank, torchrun_rank
from regard.training.plan import metric_name
from regard.training.run import add_shards_task, complete_recipe
from regard.training.run import run as run_setup
from regard.training.shards.dataset import is_shard_folder

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Arguments:
    """Parsed, unchecked command line arguments of `regard train`."""

    recipe: str = ""
    """path of a recipe, or name of a packaged one"""
    out: str = "model"
    start_from: str = ""
    """model folder to fine-tune"""
    export_for: Any = None
    """export format that the model must support"""
    quiet: bool = False
    dry_run: bool = False
    help: str = ""
    """which help to show: short or full"""
    options: dict[str, Any] = field(default_factory=dict)
    """values of all other options as strings, by key"""


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the arguments; the recipe, or a folder of token shards, may be at any position.

    >>> parse_arguments(["--data", "pairs.tsv", "--out", "m", "r.toml"]).recipe
    'r.toml'
    """
    words, options = parse_words(argv, every_option().values(), "regard train --help-all lists every option.")
    for key in ("data.files", "data.validation"):
        # `--data pairs.tsv recipe.toml`: data files are never named like a recipe.
        words += filter(_is_recipe, options.get(key, ()))
        if key in options:
            options[key] = [word for word in options[key] if not _is_recipe(word)]
            if not options[key]:
                raise RegardError(f"{option_name(key)}: expected at least one file.", "Pass the data files after it.")
    for key, value in options.items():
        # `--train.deterministic recipe.toml`: a switch, and the recipe.
        if every_option()[key].metavar.endswith("]") and _is_recipe(value):
            words, options[key] = [*words, value], "true"
    if shards := [word for word in words if is_shard_folder(word)]:
        words = [word for word in words if word not in shards]
        options["data.files"] = [*options.get("data.files", ()), *shards]
    files = [word for word in words if not _is_recipe(word)]
    if len(words) > 1:
        if len(files) == len(words):
            raise RegardError(f"{words[0]} is not a recipe.", f"Did you mean --data {join(words)}?")
        if files:
            raise RegardError(f"Unexpected argument {files[0]}.", f"Did you mean --data {join(files)}?")
        raise RegardError(f"Expected one recipe, got two: {words[0]} and {words[1]}.", "Pass one.")
    for name in ("out", "from"):
        if options.get(name) == "":
            raise RegardError(f"--{name} is empty.", "Pass a folder.")
    return Arguments(
        recipe="".join(words),
        out=options.pop("out", "model"),
        start_from=options.pop("from", ""),
        export_for=_target(options.pop("for", None)),
        quiet=options.pop("quiet", False),
        dry_run=options.pop("dry-run", False),
        help="full" if options.pop("help-all", False) else "short" if options.pop("help", False) else "",
        options=options,
    )


def run(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    options = arguments.options
    path = find_recipe(arguments.recipe) if arguments.recipe else None
    table = read_toml(path) if path else {}
    # Task and family determine the other keys.
    if "task" in options:
        table["task"] = options["task"]
    if "model.family" in options and isinstance(table.setdefault("model", {}), dict):
        table["model"]["family"] = options["model.family"]
    table = add_shards_task(table, options.get("data.files"))
    origin = arguments.recipe or COMMAND_LINE
    plain = recipe_from_dict(table, origin=origin)
    family = family_name(plain.model)
    if arguments.help:
        print((full_help if arguments.help == "full" else short_help)(plain.task, family, table))
        return 0
    if torchrun_rank():  # another rank reads the data, prints and writes
        if not arguments.dry_run:
            run_torchrun_rank()
        return 0
    overrides = recipe_keys(options, family)
    setup = complete_recipe(
        recipe_from_dict(overrides, plain, COMMAND_LINE),
        table,
        overrides,
        arguments.out,
        start_from=arguments.start_from or None,
        export_for=arguments.export_for,
        quiet=arguments.quiet,
        dry_run=arguments.dry_run,
        key_name=_option_hint,
    )
    pipeline = run_setup(setup, arguments.out, quiet=arguments.quiet, dry_run=arguments.dry_run)
    if arguments.dry_run:
        print(recipe_toml(setup.recipe))
    elif not arguments.quiet:
        _print_result(pipeline, setup.recipe, arguments.out)
    return 0


def _print_result(pipeline: Any, recipe: Recipe, out: str) -> None:
    training, targets = pipeline.training, getattr(pipeline, "target_languages", ())
    usage = TASKS[recipe.task].usage_hint.format(out=quote(out)) + (f" --to {targets[0]}" if len(targets) > 1 else "")
    best = ", ".join(format_metrics(training["validation"]))
    print(
        f"Saved the model of step {training['step']}, the {_selection(recipe)}: {best}.\n"
        f"Model folder: {out}. Loss curves: {out}/loss.png. Try: {usage}",
        file=sys.stderr,
    )


def _selection(recipe: Recipe) -> str:
    criterion = recipe.train.validate_by
    return (
        "last" if criterion == "last" else f"last whose {metric_name(recipe.train)} equals the best within its margin"
    )


def _target(name: str | None) -> str | None:
    if name is not None and name not in EXPORT_TARGETS:
        raise RegardError(f"--for {name} is not an export format.", f"Choose from: {', '.join(EXPORT_TARGETS)}.")
    return name


def _is_recipe(word: str) -> bool:
    return word.endswith(".toml") or (word in recipe_names() and not Path(word).exists())


def _option_hint(key: str) -> str:
    return {"data.files": "--data FILE", "for": "--for"}.get(key) or option_name(key)
