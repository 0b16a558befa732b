"""Options of `regard train`: every key of a recipe, and aliases of the common ones."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from regard.attention import SCORES
from regard.cli.options import Option, columns, convert, format_default, metavar_of, row, wrap
from regard.errors import RegardError
from regard.interop.export_targets import EXPORT_TARGETS
from regard.models import FAMILIES
from regard.training.recipe import DERIVED, TASKS, Recipe, families_for

# Keys whose values are chosen from the data: by section; for [model], by family and by task.
CHOSEN: dict[str, set[str]] = {
    "tokenizer": {"kind", "target_kind", "vocab_size", "shared"},
    "transformer": {
        *("width", "heads", "feedforward", "encoder_layers", "decoder_layers", "dropout"),
        *("positions", "max_len"),
    },
    "gpt": {"width", "layers", "feedforward", "dropout", "activation", "max_len"},
    "bert": {"width", "layers", "feedforward", "dropout", "norm", "norm_eps", "positions", "max_len"},
    "vit": {
        *("width", "heads", "layers", "feedforward", "drop_path", "channels", "patch", "patches", "positions"),
        *("pooling", "mean", "std"),
    },
    "text2text": {"activation", "bias", "norm_kind", "norm_eps"},
    "segment": {"head", "segmenter"},
    "mask-images": {"head"},
    "train": {
        *("steps", "batch_tokens", "batch_images", "optimizer", "lr", "schedule", "warmup", "weight_decay"),
        *("label_smoothing", "r_drop", "ema", "validate_every", "validate_by", "patience", "save_every"),
    },
    "augment": {"flip", "crop", "zoom", "color", "random_ops", "cutout"},
}
# Placeholders of values in the help, where the type alone is not informative.
METAVARS = {
    "data.files": "FILE …",
    "data.validation": "FILE …",
    "data.columns": "COLUMN …",
    "data.languages": "LANGUAGE …",
    "data.label": "NAME",
    "data.cache": "FOLDER",
    "train.time": "TIME",
    "train.lr": "RATE",
    "train.source_vectors": "FILE",
    "train.target_vectors": "FILE",
}
FROM_DATA = "chosen from the data"
Table = Mapping[str, Any]
NO_TABLE: Table = {}


class Alias(NamedTuple):
    """A short name for a key."""

    key: str
    help: str = ""
    """empty: the help of the key"""
    default: str = ""
    """default in the help, if the key has none"""


ALIASES = {
    "data": Alias(
        "data.files",
        "two parallel files, or one TSV, CSV, JSONL or Parquet; plain or compressed; - for standard input; a folder of "
        "token shards (regard prepare); phrasebook for the built-in pairs; images: a folder, .csv, .npz or idx",
    ),
    "validation": Alias("data.validation", "validation data in the same format", "a split of the data"),
    "columns": Alias("data.columns"),
    "languages": Alias("data.languages"),
    "family": Alias("model.family"),
    "steps": Alias("train.steps"),
    "time": Alias("train.time"),
    "lr": Alias("train.lr"),
    "batch-tokens": Alias("train.batch_tokens", "tokens per batch, counted on the longer side"),
    "seed": Alias("train.seed"),
    "device": Alias("train.device"),
}
# Options of the short help, in order: aliases, and options that are not keys of a recipe.
SHORT = (
    *("data", "task", "out", "from", "validation", "columns", "languages"),
    *("steps", "time", "lr", "batch-tokens", "seed", "device", "family", "score", "for"),
    *("quiet", "dry-run", "help", "help-all"),
)
USAGE = "usage: regard train [RECIPE] --data FILE … [--out FOLDER] [OPTION …]"
ABOUT = (
    "Train a model from files. Options override the recipe; all other values are chosen from the data. The plan at the "
    "start of a run lists these choices with their reasons (--dry-run prints only the plan). To resume an interrupted "
    "run, repeat the command."
)
RECIPE = ("RECIPE", "recipe file (.toml), or the name of a packaged recipe (see regard recipes)")
TASK_NOTES = (
    "Tasks and their data: translate (sentence pairs), text2text (pairs of several tasks, each with a prefix), "
    "language (plain text, for generation), mask (plain text, for encoders), classify (texts and labels), answer "
    "(questions in SQuAD format), tag (words and tags in CoNLL format), classify-images (images and labels), segment "
    "(images and masks), mask-images (images)."
)


def key_options(task: str, family: str, table: Table = NO_TABLE) -> dict[str, Option]:
    """The options for all recipe keys of a task and a family; `table` is the recipe in use.

    >>> options = key_options("language", "gpt")
    >>> options["train.seed"].default, options["train.steps"].default
    ('1', 'chosen from the data')
    """
    aliases = {alias.key: name for name, alias in ALIASES.items()}
    options = {}
    for section, config in _sections(family):
        plain, recipe_values = config(), table.get(section, {})
        chosen = chosen_keys(section, task, family)
        kinds = get_type_hints(config)
        for name in (field.name for field in dataclasses.fields(config) if field.name not in DERIVED):
            key, kind = f"{section}.{name}", kinds[name]
            default = FROM_DATA if name in chosen else format_default(getattr(plain, name))
            if name in recipe_values:
                default = format_default(recipe_values[name])
            elif key == "data.files":
                default = ""  # --data is required, although `Recipe` has a default
            alias = aliases.get(key)
            names = (*([alias] if alias else []), key.replace("_", "-"))
            options[key] = Option(names, key, METAVARS.get(key) or metavar_of(kind), "", default, kind, config)
    return options


def chosen_keys(section: str, task: str, family: str) -> set[str]:
    """The keys of a section that are chosen from the data."""
    return CHOSEN.get(family, set()) | CHOSEN.get(task, set()) if section == "model" else CHOSEN.get(section, set())


def other_options(task: str, family: str) -> dict[str, Option]:
    """The options that are not keys of a section; `task` and `family` are those of the recipe in use."""
    scores = ", ".join(SCORES)
    options = (
        Option(("task",), "task", "TASK", ", ".join(TASKS), task),
        Option(("out",), "out", "FOLDER", "output model folder", "model"),
        Option(("from",), "from", "MODEL", "model folder to fine-tune; its weights, sizes and tokenizers are used"),
        Option(
            ("family", "model.family"),
            "model.family",
            "FAMILY",
            f"model family: {', '.join(FAMILIES)}; for {task}: {' or '.join(families_for(task))}",
            family,
        ),
        Option(("score",), "score", "SCORE", f"attention score: {scores}", "depends on the family"),
        Option(("for",), "for", "TARGET", f"export format that the model must support: {', '.join(EXPORT_TARGETS)}"),
        Option(("quiet",), "quiet", help="print only errors"),
        Option(("dry-run",), "dry-run", help="print the plan and the recipe without training"),
        Option(("help",), "help", help="show the common options"),
        Option(("help-all",), "help-all", help="show all options"),
    )
    return {option.key: option for option in options}


@functools.cache
def every_option() -> dict[str, Option]:
    """The options of all families, by key."""
    options = other_options("translate", "transformer")
    for family in FAMILIES:
        options |= key_options("translate", family)
    return options


def recipe_keys(values: Mapping[str, Any], family: str) -> dict[str, dict[str, Any]]:
    """The option values as tables of a recipe; `--score` sets all score keys of the family.

    >>> recipe_keys({"score": "dot", "train.steps": "5"}, "transformer")["model"]
    {'encoder_score': 'dot', 'decoder_score': 'dot', 'cross_score': 'dot'}
    """
    table: dict[str, dict[str, Any]] = {}
    if "score" in values:
        if values["score"] not in SCORES:
            raise RegardError(
                f"--score {values['score']} is not an attention score.", f"Choose from: {', '.join(SCORES)}."
            )
        fields = get_type_hints(FAMILIES[family].config)
        table["model"] = {name: values["score"] for name in fields if name == "score" or name.endswith("_score")}
    kinds = {section: get_type_hints(config) for section, config in _sections(family)}
    for key, words in values.items():
        section, _, name = key.partition(".")
        if section not in kinds or key == "model.family":
            continue
        if name not in kinds[section]:
            owners = [owner for owner, entry in FAMILIES.items() if name in get_type_hints(entry.config)]
            raise RegardError(
                f"{option_name(key)} is not an option of the family {family}.",
                f"Families with it: {', '.join(owners)}.",
            )
        kind = kinds[section][name]
        is_none = NoneType in get_args(kind) and words.lower() == "none"
        table.setdefault(section, {})[name] = None if is_none else convert(kind, words, option_name(key))
    return table


def option_name(key: str) -> str:
    """The option of a key in messages: its alias if it has one.

    >>> option_name("train.steps"), option_name("train.r_drop")
    ('--steps', '--train.r-drop')
    """
    return f"--{every_option()[key].names[0]}"


def short_help(task: str, family: str, table: Table = NO_TABLE) -> str:
    """The common options, on one screen."""
    keys, others = key_options(task, family, table), other_options(task, family)
    rows = [RECIPE]
    for name in SHORT:
        key = ALIASES[name].key if name in ALIASES else name
        option = others.get(key) or keys.get(key)
        if option is None:
            continue  # a key that the recipe does not have
        if name in ALIASES:
            alias = ALIASES[name]
            option = option._replace(help=alias.help or option.help, default=option.default or alias.default)
        rows.append(row(option._replace(names=(name,))))
    return "\n".join([USAGE, "", *wrap(ABOUT), "", *columns(rows)])


def full_help(task: str, family: str, table: Table = NO_TABLE) -> str:
    """All options, by section of the recipe."""
    lines = [USAGE, "", *wrap(ABOUT), "", *wrap(TASK_NOTES), "", *columns([RECIPE])]
    lines += columns(row(option) for option in other_options(task, family).values())
    keys = key_options(task, family, table).values()
    titles = {"model": f"[model] of the family {family}"}
    for section, _ in _sections(family):
        rows = [row(option) for option in keys if option.key.startswith(f"{section}.")]
        lines += ["", titles.get(section, f"[{section}]"), *columns(rows)]
    return "\n".join(lines)


def _sections(family: str) -> Iterator[tuple[str, Any]]:
    """The sections of a recipe with their dataclasses."""
    for name, kind in get_type_hints(Recipe).items():
        if name == "model":
            yield name, FAMILIES[family].config
        elif dataclasses.is_dataclass(kind):
            yield name, kind
