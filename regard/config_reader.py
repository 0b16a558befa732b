"""Config files: reading TOML and JSON, and filling frozen dataclasses from them.

Recipes, config.json of a model folder and configs of other formats are read here; `regard.ranges` checks the values.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from regard.errors import RegardError, did_you_mean
from regard.files import read_file
from regard.ranges import check_value, default_hint, format_value, is_list

MAX_DEPTH = 50
"""maximum nesting of lists and tables in a file"""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
REPLACE_FILE = "Restore the file from a good copy."

Config = TypeVar("Config")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a recipe file."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegardError(f"{path}: no such recipe.", "Name a .toml file.") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}.", "Name a .toml file.") from None
    except ValueError as error:  # invalid TOML or UTF-8, a huge number, a path with a NUL
        raise RegardError(f"{path}: not a recipe in TOML: {error}.", "Fix that line.") from None
    except RecursionError:
        raise _too_deep(path) from None
    return _checked_depth(table, path)


def read_json(path: Path, *, unique_keys: bool = True) -> dict[str, Any]:
    """Read the object in a JSON file. A repeated key is an error, unless `unique_keys` is off.

    >>> read_json(Path("no-such.json"))
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.json: the file is missing. Is the folder complete?
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise RegardError(f"{path}: {format_value(repeated)} is repeated.", REPLACE_FILE)
        return table

    try:
        table = parse_json(read_file(path).decode(), object_pairs_hook=unique if unique_keys else None)
    except ValueError as error:
        raise RegardError(f"{path}: not JSON ({error}).", REPLACE_FILE) from None
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(table, dict):
        raise RegardError(f"{path}: not a JSON object.", REPLACE_FILE)
    return _checked_depth(table, path)


def parse_json(text: str, **options: Any) -> Any:
    r"""json.loads, except that half a surrogate pair, which cannot be encoded as UTF-8, is a ValueError.

    >>> parse_json('"\\ud83d\\ude00"') == "😀"
    True
    >>> parse_json('"\\ud83d"')
    Traceback (most recent call last):
    UnicodeEncodeError: 'utf-8' codec can't encode character '\ud83d' in position 1: surrogates not allowed
    """
    value = json.loads(text, **options)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def json_bytes(table: Mapping[str, Any]) -> bytes:
    r"""Encode a table as a JSON file.

    >>> json_bytes({"width": 8})
    b'{\n  "width": 8\n}\n'
    """
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def fill_config(
    config: Config,
    table: Mapping[str, Any],
    origin: str | Path,
    prefix: str = "",
    *,
    derived: Iterable[str] = (),
    hint: str = "",
    value_hint: str = "",
) -> Config:
    """A copy of a config with the values of a table, each checked against the type and range of its field.

    An unknown key is an error that names the closest known one; `derived` fields cannot be set. Errors name `origin`
    (the file) and the key with its `prefix`, such as "train."; `hint` replaces the default hint, `value_hint` only that
    about a value.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     steps: int = 100
    >>> fill_config(Config(), {"steps": 10}, "recipe.toml", "train.")
    Config(steps=10)
    >>> fill_config(Config(), {"step": 10}, "recipe.toml", "train.")
    Traceback (most recent call last):
    regard.errors.RegardError: recipe.toml: unknown key train.step. Did you mean train.steps?
    """
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in derived}  # type: ignore[arg-type]
    check_keys(table, fields, origin, prefix, hint)
    values = {}
    for key, value in table.items():
        field = fields[key]
        if is_list(field.type) and not isinstance(value, list | tuple):
            value = (value,)
        values[key] = check_value(
            field.type, value, f"{origin}: {prefix}{key}", value_hint or hint or default_hint(field)
        )
    try:
        return dataclasses.replace(config, **values)  # type: ignore[type-var]
    except RegardError as error:  # raised by the constructor of the config
        raise RegardError(f"{origin}: {error.message}", error.hint) from None


def check_keys(
    table: Mapping[str, Any], known: Iterable[str], origin: str | Path, prefix: str = "", hint: str = ""
) -> None:
    """Raise an error for an unknown key, naming the closest known one."""
    known = list(known)
    for key in table:
        if key not in known:
            nearest = did_you_mean(prefix + key, [prefix + name for name in known], cutoff=0.0)
            raise RegardError(f"{origin}: unknown key {_shown_key(prefix + key)}.", f"{nearest} {hint}".strip())


def _shown_key(key: str) -> str:
    return key if len(key) <= 60 and key.isprintable() else format_value(key)


def _checked_depth(table: dict[str, Any], path: str | Path) -> dict[str, Any]:
    if _nested_deeper(table, MAX_DEPTH):
        raise _too_deep(path)
    return table


def _nested_deeper(value: Any, limit: int) -> bool:
    if not isinstance(value, Mapping | list | tuple):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return limit < 1 or any(_nested_deeper(item, limit - 1) for item in inner)


def _too_deep(path: str | Path) -> RegardError:
    return RegardError(f"{path}: lists or tables are nested too deeply.", "Remove a level of nesting.")
