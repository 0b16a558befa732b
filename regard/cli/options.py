"""Options of the commands: the fields of a dataclass, parsed with argparse and described by their docstrings.

Nothing here imports torch, so that help and errors in arguments come at once.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import RegardError, did_you_mean
from regard.ranges import check_value

T = TypeVar("T")


class Arg(NamedTuple):
    """What the type and the docstring of a field do not say about its option: `Annotated[kind, Arg(…)]`."""

    metavar: str = ""
    """placeholder of the value in the help"""
    help: str = ""
    """help of an option that several commands share"""
    default: str = ""
    """default in the help, where the value says too little"""
    names: tuple[str, ...] = ()
    """names without dashes, if they are not the name of the field"""
    is_positional: bool = False
    is_repeated: bool = False
    """one value each time that the option is given"""
    section: Any = None
    """instance of a dataclass whose fields are options too; the value is a dictionary of those that are given"""


class Option(NamedTuple):
    """An option or a positional argument."""

    names: tuple[str, ...]
    """without dashes; the preferred one comes first"""
    key: str
    """name of the field, after that of its section: beam, decode.beam, train.steps"""
    metavar: str = ""
    """placeholder of the value; ends in … for several values, in ] if it may be left out; empty for a switch"""
    help: str = ""
    default: str = ""
    """default in the help; empty: none"""
    kind: Any = str
    config: Any = None
    """dataclass of the field, whose docstring is the help if there is no other"""
    value: Any = None
    """default; MISSING if the option is required"""
    arg: Arg = Arg()

    @property
    def label(self) -> str:
        return self.metavar.removesuffix(" …") if self.arg.is_positional else f"--{self.names[0]}"

    def describe(self) -> str:
        text = self.help or field_docs(self.config).get(self.key.rpartition(".")[2], "")
        return f"{text} (default: {self.default})".strip() if self.default else text

    def read(self, words: Any) -> Any:
        """The value of the words of the command line; numbers and choices are checked."""
        kind = plain_type(self.kind)
        if kind is bool:
            return not self.value
        value = convert(self.kind, words, self.label)
        if kind not in (str, Path) and kind not in (tuple[str, ...], tuple[Path, ...]):
            # An error names the field of a nested dataclass as the dataclass itself does.
            _, dot, name = self.key.rpartition(".")
            check_value(self.kind, value, name if dot else self.label, f"The default is {self.value!r}." if dot else "")
        return value


def parse_options(config: type[T], command: str, argv: Sequence[str]) -> T:
    """Parse the arguments of a command into its dataclass; `--help` prints the help and exits.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     model: Annotated[Path, Arg(is_positional=True)]
    ...     beam: int = 5
    ...     scores: bool = False
    >>> parse_options(Options, "translate", ["demo", "--scores"])
    Options(model=PosixPath('demo'), beam=5, scores=True)
    """
    options, advice = list(read_options(config)), f"See: regard {command} --help"
    if {"-h", "--help"} & set(argv):
        print(format_help(command, inspect.getdoc(config) or "", options))
        raise SystemExit(0)
    words, given = parse_words(argv, options, advice)
    for option in options:
        if option.arg.is_positional and words:
            given[option.key], words = (words, []) if option.metavar.endswith("…") else (words[0], words[1:])
    if words:
        raise RegardError(f"Unexpected argument {words[0]!r}.", advice)
    values: dict[str, Any] = {}
    for option in options:
        section, _, name = option.key.rpartition(".")
        if option.key in given:
            table = values.setdefault(section, {}) if section else values
            table[name] = option.read(given[option.key])
        elif option.value is MISSING:
            raise RegardError(f"{option.label} is missing.", advice)
    return config(**values)


def read_options(config: Any, defaults: Any = None, section: str = "") -> Iterator[Option]:
    """The options for the fields of a dataclass; `defaults` is an instance of it, if it is a section of another one."""
    kinds = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        kind = kinds[field.name]
        plain, arg = plain_type(kind), next((part for part in get_args(kind)[1:] if isinstance(part, Arg)), Arg())
        if arg.section is not None:
            yield from read_options(type(arg.section), arg.section, f"{field.name}.")
            continue
        value = field.default if defaults is None else getattr(defaults, field.name)
        names = arg.names or (field.name.replace("_", "-"),)
        metavar, default = arg.metavar or metavar_of(kind), arg.default or format_default(value)
        if plain is bool:
            names, metavar, default = (f"no-{names[0]}",) if value is True else names, "", ""
        elif arg.is_repeated:
            metavar = arg.metavar
        elif plain in (tuple[str, ...], tuple[Path, ...]):
            metavar = f"{metavar.removesuffix(' …')} …"
        elif get_origin(plain) is tuple:
            metavar = "N,N"  # numbers in one word
        yield Option(names, section + field.name, metavar, arg.help, default, kind, config, value, arg)


def parse_words(argv: Sequence[str], options: Iterable[Option], advice: str) -> tuple[list[str], dict[str, Any]]:
    """Parse into positional arguments and option values by key: a string, a list of strings, or True for a switch.

    >>> options = [Option(("steps", "train.steps"), "train.steps", "N"), Option(("data",), "data.files", "FILE …")]
    >>> parse_words(["--steps=5", "r.toml", "--data", "a.en", "a.fr"], options, "")
    (['r.toml'], {'train.steps': '5', 'data.files': ['a.en', 'a.fr']})
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.advice = advice
    parser.add_argument("words", nargs="*")
    known = []
    for option in options:
        if option.arg.is_positional:
            continue
        names = [f"--{name}" for name in option.names]
        known += names
        kind: dict[str, Any] = {"action": "append" if option.arg.is_repeated else "store"}
        if not option.metavar:
            kind = {"action": "store_true"}
        elif option.metavar.endswith("…"):
            kind = {"action": "extend", "nargs": "+"}
        elif option.metavar.endswith("]"):
            kind = {"nargs": "?", "const": "true"}
        parser.add_argument(*names, dest=option.key, **kind)
    end = argv.index("--") if "--" in argv else len(argv)
    namespace, unknown = parser.parse_known_intermixed_args([*map(_spell, argv[:end]), *argv[end:]])
    if unknown:
        name = unknown[0].partition("=")[0]
        raise RegardError(f"Unknown option {name}.", did_you_mean(name, known, advice))
    values = vars(namespace)
    return values.pop("words", []), values


class _Parser(argparse.ArgumentParser):
    advice = ""

    def error(self, message: str) -> NoReturn:
        name, _, detail = message.removeprefix("argument ").partition(": ")
        raise RegardError(f"{name.partition('/')[0]}: {detail}.", self.advice)


def _spell(word: str) -> str:
    """A word of the command line, with the usual spelling of options: --batch_tokens=5 is --batch-tokens=5."""
    if word == "-h":
        return "--help"
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def convert(kind: Any, words: Any, name: str, separators: str = ",-") -> Any:
    """Convert the words of an option to a value; several numbers may be in one word.

    >>> convert(tuple[tuple[int, ...], ...], "7,15-16", "--suppress-sequences"), convert(float | None, "2", "--lr")
    (((7,), (15, 16)), 2.0)
    """
    kind = plain_type(kind)
    if get_origin(kind) is tuple:
        items = words if isinstance(words, list) or not words else words.split(separators[0])
        return tuple(convert(get_args(kind)[0], item, name, separators[1:]) for item in items)
    if kind is bool:
        if words.lower() not in ("true", "false"):
            raise RegardError(f"{name} must be true or false (got {words!r}).")
        return words.lower() == "true"
    try:
        return kind(words) if kind in (int, float, Path) else words
    except ValueError:
        raise RegardError(f"{name} must be {'an integer' if kind is int else 'a number'} (got {words!r}).") from None


def plain_type(kind: Any) -> Any:
    """A type without its annotations and without None.

    >>> plain_type(Annotated[int, "steps"] | None)
    <class 'int'>
    """
    if get_origin(kind) is Annotated:
        return plain_type(get_args(kind)[0])
    parts = [part for part in get_args(kind) if part is not NoneType] if get_origin(kind) in (Union, UnionType) else []
    return plain_type(parts[0]) if len(parts) == 1 else kind


def metavar_of(kind: Any) -> str:
    """The placeholder of values of a type.

    >>> metavar_of(Literal["bpe", "char"] | None), metavar_of(tuple[int, ...])
    ('bpe|char', 'N …')
    """
    kind = plain_type(kind)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is tuple:
        return f"{metavar_of(get_args(kind)[0])} …"
    return {int: "N", float: "X", bool: "[true|false]", Path: "FILE"}.get(kind, "TEXT")


def format_default(value: Any) -> str:
    """Format a default for the help; empty if there is none.

    >>> format_default(("en", "fr")), format_default(True), format_default(2e-3), format_default(None)
    ('en fr', 'true', '0.002', '')
    """
    if value is None or value is MISSING:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(format_default, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """The docstrings of the fields of a dataclass.

    >>> field_docs(Arg)["metavar"]
    'placeholder of the value in the help'
    """
    try:
        source = inspect.getsource(config)
    except (OSError, TypeError):  # a registered config that was defined interactively
        return {}
    (body,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in zip(body.body, body.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def format_help(command: str, about: str, options: Sequence[Option]) -> str:
    """The help of a command: usage, description, and one entry per option."""
    positional = [option for option in options if option.arg.is_positional]
    others = [option for option in options if not option.arg.is_positional]
    required = [row(option)[0] for option in others if option.value is MISSING]
    usage = [option.metavar if option.value is MISSING else f"[{option.metavar}]" for option in positional] + required
    lines = [f"usage: {' '.join(['regard', command, *usage])} [OPTION …]", ""]
    for paragraph in about.split("\n\n"):
        lines += [*wrap(" ".join(paragraph.split())), ""]
    lines += columns((option.metavar, option.describe()) for option in positional)
    lines += columns([*(row(option) for option in others if "." not in option.key), ("--help", "show this help")])
    if nested := [option for option in others if "." in option.key]:
        title = (inspect.getdoc(nested[0].config) or "").partition("\n")[0]
        lines += ["", title, *columns(map(row, nested))]
    return "\n".join(lines)


def row(option: Option) -> tuple[str, str]:
    names = ", ".join(f"--{name}" for name in option.names)
    return f"{names} {option.metavar}".rstrip(), option.describe()


def columns(rows: Iterable[tuple[str, str]], left: int = 24) -> Iterator[str]:
    """Lines with names on the left and help on the right; a long name has its own line."""
    for name, text in rows:
        lines = wrap(text, left)
        if len(name) + 4 > left:
            yield f"  {name}"
        else:
            yield f"  {name:<{left - 2}}{lines.pop(0).strip() if lines else ''}".rstrip()
        yield from lines


def wrap(text: str, indent: int = 0) -> list[str]:
    """The lines of a text, at most as wide as the terminal."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    )
