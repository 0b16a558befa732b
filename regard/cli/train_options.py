"""Options of `regard train`: every key of a recipe, and aliases of the common ones."""

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from regard.attention import SCORES
from regard.errors import RegardError, did_you_mean
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
        *("label_smoothing", "ema", "validate_every", "validate_by", "patience", "save_every"),
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


class Option(NamedTuple):
    """An option of the command line."""

    names: tuple[str, ...]
    """without dashes; the preferred one comes first"""
    key: str
    """dotted key of a recipe; for other options their name"""
    metavar: str = ""
    """placeholder of the value; ends in … for several values, in ] if it may be left out; empty for a flag"""
    help: str = ""
    default: str = ""
    """default in the help; empty: none"""


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
    "steps": Alias("train.steps", "number of training steps"),
    "time": Alias("train.time"),
    "lr": Alias("train.lr", "peak learning rate"),
    "batch-tokens": Alias("train.batch_tokens", "tokens per batch, counted on the longer side"),
    "seed": Alias("train.seed", "random seed"),
    "device": Alias("train.device", "training device"),
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
        documented, plain, recipe_values = field_docs(config), config(), table.get(section, {})
        chosen = chosen_keys(section, task, family)
        kinds = get_type_hints(config)
        for name in (field.name for field in dataclasses.fields(config) if field.name not in DERIVED):
            key, kind = f"{section}.{name}", kinds[name]
            default = FROM_DATA if name in chosen else _format_default(getattr(plain, name))
            if name in recipe_values:
                default = _format_default(recipe_values[name])
            elif key == "data.files":
                default = ""  # --data is required, although `Recipe` has a default
            alias = aliases.get(key)
            text = documented.get(name, "") or (ALIASES[alias].help if alias else "")
            names = (*([alias] if alias else []), key.replace("_", "-"))
            options[key] = Option(names, key, METAVARS.get(key) or _metavar(kind), text, default)
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


def parse_words(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Parse into positional arguments and option values by key: a string, a list of strings, or True for a flag.

    >>> parse_words(["--steps=5", "r.toml", "--data", "a.en", "a.fr", "--quiet"])
    (['r.toml'], {'train.steps': '5', 'data.files': ['a.en', 'a.fr'], 'quiet': True})
    >>> parse_words(["--train.deterministic", "--model.tied", "false"])
    ([], {'train.deterministic': 'true', 'model.tied': 'false'})
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*")
    for option in every_option().values():
        names = dict.fromkeys(f"--{name}" for name in (*option.names, option.key))
        if not option.metavar:
            parser.add_argument(*names, *(["-h"] if option.key == "help" else []), dest=option.key, action="store_true")
        elif option.metavar.endswith("…"):
            parser.add_argument(*names, dest=option.key, nargs="+", action="extend")
        elif option.metavar.endswith("]"):
            parser.add_argument(*names, dest=option.key, nargs="?", const="true")
        else:
            parser.add_argument(*names, dest=option.key)
    namespace, unknown = parser.parse_known_intermixed_args(list(argv))
    for word in unknown:
        name = word.partition("=")[0]
        known = [f"--{name}" for option in every_option().values() for name in option.names]
        hint = did_you_mean(name, known, "regard train --help-all lists every option.")
        raise RegardError(f"Unknown option {name}.", hint)
    values = vars(namespace)
    return values.pop("words", []), values


@functools.cache
def every_option() -> dict[str, Option]:
    """The options of all families, by key."""
    options = other_options("translate", "transformer")
    for family in FAMILIES:
        options |= key_options("translate", family)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        name, _, detail = message.removeprefix("argument ").partition(": ")
        raise RegardError(f"{name.partition('/')[0]}: {detail}.", "See: regard train --help")


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
            owners = [one for one, each in FAMILIES.items() if name in get_type_hints(each.config)]
            raise RegardError(
                f"{option_name(key)} is not an option of the family {family}.",
                f"Families with it: {', '.join(owners)}.",
            )
        table.setdefault(section, {})[name] = _value(option_name(key), words, kinds[section][name])
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
        rows.append(_row(option._replace(names=(name,))))
    return "\n".join([USAGE, "", *_wrap(ABOUT), "", *_columns(rows)])


def full_help(task: str, family: str, table: Table = NO_TABLE) -> str:
    """All options, by section of the recipe."""
    lines = [USAGE, "", *_wrap(ABOUT), "", *_wrap(TASK_NOTES), "", *_columns([RECIPE])]
    lines += _columns(_row(option) for option in other_options(task, family).values())
    keys = key_options(task, family, table).values()
    titles = {"model": f"[model] of the family {family}"}
    for section, _ in _sections(family):
        rows = [_row(option) for option in keys if option.key.startswith(f"{section}.")]
        lines += ["", titles.get(section, f"[{section}]"), *_columns(rows)]
    return "\n".join(lines)


def field_docs(config: type) -> dict[str, str]:
    """The docstrings of the fields of a dataclass.

    >>> field_docs(Alias)["default"]
    'default in the help, if the key has none'
    """
    try:
        source = inspect.getsource(config)
    except (OSError, TypeError):  # a registered config that was defined interactively
        return {}
    (body,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs


def _format_default(value: Any) -> str:
    """Format a default for the help; empty if there is none."""
    if value is None or value == "":
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(_format_default, value))
    return value if isinstance(value, str) else as_toml(value)


def as_toml(value: Any) -> str:
    """Format a value as TOML; None, which TOML does not have, becomes `none`.

    >>> as_toml(("a", "b")), as_toml(True), as_toml(2e-3)
    ('["a", "b"]', 'true', '0.002')
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "none" if value is None else repr(value)


def _sections(family: str) -> Iterator[tuple[str, Any]]:
    """The sections of a recipe with their dataclasses."""
    for name, kind in get_type_hints(Recipe).items():
        if name == "model":
            yield name, FAMILIES[family].config
        elif dataclasses.is_dataclass(kind):
            yield name, kind


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return "|".join(_metavar(part) for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])} …"
    return {int: "N", float: "X", bool: "[true|false]"}.get(kind, "TEXT")


def _value(name: str, words: Any, kind: Any) -> Any:
    """Convert the strings of an option to a value."""
    if get_origin(kind) is tuple:
        return tuple(_value(name, word, get_args(kind)[0]) for word in words)
    if get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
        return None if words.lower() == "none" else words
    if kind is bool:
        if words.lower() not in ("true", "false"):
            raise RegardError(f"{name} must be true or false (got {words!r}).")
        return words.lower() == "true"
    if kind in (int, float):
        try:
            return kind(words)
        except ValueError:
            expected = "an integer" if kind is int else "a number"
            raise RegardError(f"{name} must be {expected} (got {words!r}).") from None
    return words


def _row(option: Option) -> tuple[str, str]:
    names = ", ".join(f"--{name}" for name in option.names)
    text = option.help + (f" (default: {option.default})" if option.default else "")
    return f"{names} {option.metavar}".rstrip(), text.strip()


def _columns(rows: Iterable[tuple[str, str]], left: int = 24) -> Iterator[str]:
    """Lines with names on the left and help on the right; a long name has its own line."""
    for name, text in rows:
        lines = _wrap(text, left)
        if len(name) + 4 > left:
            yield f"  {name}"
        else:
            yield f"  {name:<{left - 2}}{lines.pop(0).strip() if lines else ''}".rstrip()
        yield from lines


def _wrap(text: str, indent: int = 0) -> list[str]:
    width = max(60, min(100, shutil.get_terminal_size().columns))
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    )
