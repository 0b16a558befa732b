"""`regard config`: the recipe and the configuration of a model folder, as TOML."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from regard.cli.common import Model, parse
from regard.cli.options import Arg
from regard.config_reader import REPLACE_FILE, read_json
from regard.errors import RegardError
from regard.models import family_name
from regard.pipelines import ModelFolder
from regard.ranges import format_value
from regard.training.recipe import DERIVED, Recipe, recipe_to_dict


@dataclass(frozen=True)
class Options:
    """Show the configuration of a model: regard config show MODEL > recipe.toml

    Print the recipe that the model was trained with, as input of `regard train`. An imported model has no recipe, only
    a [model] table. Values derived from the data, such as vocabulary sizes, are printed as comments.
    """

    action: Annotated[Literal["show"], Arg("show", is_positional=True)]
    """show: print the configuration"""
    model: Model


def run(argv: list[str]) -> int:
    options = parse(Options, "config", argv)
    config = ModelFolder.open(options.model).config
    values = dataclasses.asdict(config)
    chosen = {name: value for name, value in values.items() if name not in DERIVED}
    print(toml_text(_read_recipe(options.model) or {"model": {"family": family_name(config)} | chosen}))
    print("\n# Derived from the data:")
    for name in (name for name in values if name not in chosen):
        print(f"# {name} = {as_toml(values[name])}")
    return 0


def _read_recipe(model: Path) -> dict[str, Any]:
    """The recipe that a model was trained with; empty if there is none."""
    path = model / "training.json"
    recipe = read_json(path).get("recipe", {}) if path.exists() else {}
    if not isinstance(recipe, dict):
        raise RegardError(f"{path}: recipe must be an object (got {format_value(recipe)}).", REPLACE_FILE)
    return recipe


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


def recipe_toml(recipe: Recipe) -> str:
    """A recipe as TOML that `regard train` reads.

    >>> recipe_toml(Recipe()).splitlines()[0]
    'task = "translate"'
    """
    return toml_text(recipe_to_dict(recipe))


def toml_text(table: Mapping[str, Any]) -> str:
    """The tables of a recipe as TOML. A `target_kind` of None is written as the `kind` that it stands for.

    >>> print(toml_text({"task": "mask", "train": {"steps": 5}}))
    task = "mask"
    <BLANKLINE>
    [train]
    steps = 5
    """
    lines = [f"{key} = {as_toml(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for name, section in table.items():
        if isinstance(section, Mapping):
            values = {key: section.get("kind") if value is None else value for key, value in section.items()}
            lines += ["", f"[{name}]", *(f"{key} = {as_toml(value)}" for key, value in values.items())]
    return "\n".join(lines).strip()
