"""The options of `regard train`: every key of a recipe, and short names for those people use."""

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
from regard.interop.export_targets import TARGETS
from regard.models import FAMILIES
from regard.training.recipe import DERIVED, Recipe
from regard.training.registry import TASKS, families_for

# What the suggestion for the data sets, by section; of [model], by the family that it suggests, and by task.
CHOSEN: dict[str, set[str]] = {
    "tokenizer": {"kind", "target_kind", "vocab_size", "shared"},
    "transformer": {
        *("width", "heads", "feedforward", "encoder_layers", "decoder_layers", "dropout"),
        *("positions", "max_len"),
    },
    "gpt": {"width", "layers", "feedforward", "dropout", "max_len"},
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
    "augment": {"flip", "crop", "zoom", "colour", "random_ops", "cutout"},
}
# What takes the place of a value in the help, where the type alone would say too little.
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
    """without dashes; the one that people use comes first"""
    key: str
    """dotted key of a recipe; or the option's own name, where it is none"""
    metavar: str = ""
    """what takes the place of the value; ends in … where there may be several; empty: a flag"""
    help: str = ""
    default: str = ""
    """as the help shows it; empty: none is shown"""


class Alias(NamedTuple):
    """A short name for a key."""

    key: str
    help: str = ""
    """empty: that of the key"""
    default: str = ""
    """where the key has none"""


ALIASES = {
    "data": Alias(
        "data.files",
        "two parallel files, or one TSV, CSV or JSONL; plain or compressed; - for standard input; phrasebook for the "
        "built-in pairs; images: a folder, .csv, .npz or idx",
    ),
    "validation": Alias("data.validation", "validation data in the same form", "a part of the data"),
    "columns": Alias("data.columns"),
    "languages": Alias("data.languages"),
    "family": Alias("model.family"),
    "steps": Alias("train.steps", "updates of the weights"),
    "time": Alias("train.time"),
    "lr": Alias("train.lr", "highest learning rate"),
    "batch-tokens": Alias("train.batch_tokens", "tokens per batch, of the longer side"),
    "seed": Alias("train.seed", "seed of everything random"),
    "device": Alias("train.device", "device to train on"),
}
# In the order of the help: options that are no key of a recipe, and aliases.
SHORT = (
    *("data", "task", "out", "from", "validation", "columns", "languages"),
    *("steps", "time", "lr", "batch-tokens", "seed", "device", "family", "score", "for"),
    *("quiet", "dry-run", "help", "help-all"),
)
USAGE = "usage: regard train [RECIPE] --data FILE … [--out FOLDER] [OPTION …]"
ABOUT = (
    "Train a model from files. Options override the recipe; what neither states is chosen from the data: "
    "the plan at the start of a run lists each choice that differs from a default, with its reason (--dry-run: "
    "only that). An interrupted run resumes with the same command."
)
RECIPE = ("RECIPE", "recipe file (.toml), or the name of a packaged one (regard recipes lists them)")
TASK_NOTES = (
    "Tasks and their data: translate (sentence pairs), text2text (pairs of several tasks, each with a prefix), "
    "language (plain text, to generate), mask (plain text, to encode), classify (texts and labels), answer (questions "
    "in the format of SQuAD), classify-images (images and labels), segment (images and masks), mask-images (images)."
)


def key_options(task: str, family: str, table: Table = NO_TABLE) -> dict[str, Option]:
    """Every key of a recipe for this task and a model of this family, as an option; `table`: the recipe in use.

    >>> options = key_options("language", "gpt")
    >>> options["train.seed"].default, options["train.steps"].default
    ('1', 'chosen from the data')
    """
    aliases = {alias.key: name for name, alias in ALIASES.items()}
    found = {}
    for section, config in _sections(family):
        documented, plain, stated = field_docs(config), config(), table.get(section, {})
        chosen = chosen_keys(section, task, family)
        kinds = get_type_hints(config)
        for name in (field.name for field in dataclasses.fields(config) if field.name not in DERIVED):
            key, kind = f"{section}.{name}", kinds[name]
            default = FROM_DATA if name in chosen else _shown(getattr(plain, name))
            if name in stated:
                default = _shown(stated[name])
            elif key == "data.files":
                default = ""  # --data must be given, though a Recipe in Python has a default
            alias = aliases.get(key)
            text = documented.get(name, "") or (ALIASES[alias].help if alias else "")
            names = (*([alias] if alias else []), key.replace("_", "-"))
            found[key] = Option(names, key, METAVARS.get(key) or _metavar(kind), text, default)
    return found


def chosen_keys(section: str, task: str, family: str) -> set[str]:
    """The keys of a section that the suggestion sets."""
    return CHOSEN.get(family, set()) | CHOSEN.get(task, set()) if section == "model" else CHOSEN.get(section, set())


def other_options(task: str, family: str) -> dict[str, Option]:
    """The options beside the keys of the sections; task and family as the recipe in use has them."""
    scores = ", ".join(SCORES)
    listed = (
        Option(("task",), "task", "TASK", ", ".join(TASKS), task),
        Option(("out",), "out", "FOLDER", "model folder to write", "model"),
        Option(("from",), "from", "MODEL", "model folder to fine-tune: its weights, sizes and tokenizers are used"),
        Option(
            ("family", "model.family"),
            "model.family",
            "FAMILY",
            f"{', '.join(FAMILIES)}; to {task}: {' or '.join(families_for(task))}",
            family,
        ),
        Option(("score",), "score", "SCORE", f"attention score: {scores}", "that of the family"),
        Option(
            ("for",), "for", "TARGET", f"export target; the model takes a form that exports there: {', '.join(TARGETS)}"
        ),
        Option(("quiet",), "quiet", help="print errors only"),
        Option(("dry-run",), "dry-run", help="print the plan and the recipe, and stop"),
        Option(("help",), "help", help="show the options that people use"),
        Option(("help-all",), "help-all", help="show every option"),
    )
    return {option.key: option for option in listed}


def parse_words(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Positional arguments, and what each option was given, by key: a word, a list of words, or True for a flag.

    >>> parse_words(["--steps=5", "r.toml", "--data", "a.en", "a.fr", "--quiet"])
    (['r.toml'], {'train.steps': '5', 'data.files': ['a.en', 'a.fr'], 'quiet': True})
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*")
    for option in every_option().values():
        names = dict.fromkeys(f"--{name}" for name in (*option.names, option.key))
        if not option.metavar:
            parser.add_argument(*names, *(["-h"] if option.key == "help" else []), dest=option.key, action="store_true")
        elif option.metavar.endswith("…"):
            parser.add_argument(*names, dest=option.key, nargs="+", action="extend")
        else:
            parser.add_argument(*names, dest=option.key)
    found, unknown = parser.parse_known_intermixed_args(list(argv))
    for word in unknown:
        name = word.partition("=")[0]
        known = [f"--{name}" for option in every_option().values() for name in option.names]
        hint = did_you_mean(name, known, "regard train --help-all lists every option.")
        raise RegardError(f"Unknown option {name}.", hint)
    values = vars(found)
    return values.pop("words", []), values


@functools.cache
def every_option() -> dict[str, Option]:
    """The options of all families, by key."""
    found = other_options("translate", "transformer")
    for family in FAMILIES:
        found |= key_options("translate", family)
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        name, _, what = message.removeprefix("argument ").partition(": ")
        raise RegardError(f"{name.partition('/')[0]}: {what}.", "See: regard train --help")


def recipe_keys(values: Mapping[str, Any], family: str) -> dict[str, dict[str, Any]]:
    """What options say, as the tables of a recipe; `--score` is spelled as the family spells it.

    >>> recipe_keys({"score": "dot", "train.steps": "5"}, "transformer")["model"]
    {'encoder_score': 'dot', 'decoder_score': 'dot', 'cross_score': 'dot'}
    """
    table: dict[str, dict[str, Any]] = {}
    if "score" in values:
        if values["score"] not in SCORES:
            raise RegardError(f"--score {values['score']} is not a score.", f"Choose from: {', '.join(SCORES)}.")
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
                f"{option_name(key)} is no option of the family {family}.", f"It is one of: {', '.join(owners)}."
            )
        table.setdefault(section, {})[name] = _value(option_name(key), words, kinds[section][name])
    return table


def option_name(key: str) -> str:
    """How a key is called in messages: by its alias, where it has one.

    >>> option_name("train.steps"), option_name("train.r_drop")
    ('--steps', '--train.r-drop')
    """
    return f"--{every_option()[key].names[0]}"


def short_help(task: str, family: str, table: Table = NO_TABLE) -> str:
    """The options that people use, on one screen."""
    keys, others = key_options(task, family, table), other_options(task, family)
    rows = [RECIPE]
    for name in SHORT:
        key = ALIASES[name].key if name in ALIASES else name
        option = others.get(key) or keys.get(key)
        if option is None:
            continue  # a key that this version of the recipe does not have
        if name in ALIASES:
            alias = ALIASES[name]
            option = option._replace(help=alias.help or option.help, default=option.default or alias.default)
        rows.append(_row(option._replace(names=(name,))))
    return "\n".join([USAGE, "", *_wrapped(ABOUT), "", *_columns(rows)])


def full_help(task: str, family: str, table: Table = NO_TABLE) -> str:
    """Every option, by section of the recipe."""
    lines = [USAGE, "", *_wrapped(ABOUT), "", *_wrapped(TASK_NOTES), "", *_columns([RECIPE])]
    lines += _columns(_row(option) for option in other_options(task, family).values())
    keys = key_options(task, family, table).values()
    titles = {"model": f"[model] of the family {family}"}
    for section, _ in _sections(family):
        rows = [_row(option) for option in keys if option.key.startswith(f"{section}.")]
        lines += ["", titles.get(section, f"[{section}]"), *_columns(rows)]
    return "\n".join(lines)


def field_docs(config: type) -> dict[str, str]:
    """The documentation of a dataclass's fields: the strings below them.

    >>> field_docs(Alias)["default"]
    'where the key has none'
    """
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _shown(value: Any) -> str:
    """A default as the help shows it; empty where there is none."""
    if value is None or value == "":
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    return value if isinstance(value, str) else as_toml(value)


def as_toml(value: Any) -> str:
    """A value as TOML writes it; None, which TOML lacks, as `none`.

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
    """Each section of a recipe with its dataclass."""
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
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")


def _value(name: str, words: Any, kind: Any) -> Any:
    """The value that the words of an option stand for."""
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
            what = "a whole number" if kind is int else "a number"
            raise RegardError(f"{name} must be {what} (got {words!r}).") from None
    return words


def _row(option: Option) -> tuple[str, str]:
    names = ", ".join(f"--{name}" for name in option.names)
    text = option.help + (f" (default: {option.default})" if option.default else "")
    return f"{names} {option.metavar}".rstrip(), text.strip()


def _columns(rows: Iterable[tuple[str, str]], left: int = 24) -> Iterator[str]:
    """Names on the left, their help on the right; a long name has a line to itself."""
    for name, text in rows:
        lines = _wrapped(text, left)
        if len(name) + 4 > left:
            yield f"  {name}"
        else:
            yield f"  {name:<{left - 2}}{lines.pop(0).strip() if lines else ''}".rstrip()
        yield from lines


def _wrapped(text: str, indent: int = 0) -> list[str]:
    width = max(60, min(100, shutil.get_terminal_size().columns))
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    )
