"""Packaged recipes: TOML files in this folder."""

from pathlib import Path
from shlex import quote

from regard.errors import RegardError, did_you_mean

_FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the packaged recipes, sorted.

    >>> "multi30k-transformer" in recipe_names()
    True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def recipe_summary(name: str) -> str:
    """Summary of a packaged recipe: its first line, without "# ".

    >>> recipe_summary("shakespeare")
    'Tiny Shakespeare, characters: GPT of 6 layers, width 384, context of 512.'
    """
    return find_recipe(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def find_recipe(name: str) -> Path:
    """Find the file of a recipe, given by path (.toml) or by the name of a packaged recipe.

    >>> find_recipe("sst2").name
    'sst2.toml'
    """
    path = Path(name)
    nearest = did_you_mean(path.stem, recipe_names(), "`regard recipes` lists the packaged ones.")
    if path.suffix == ".toml":
        if not path.exists():
            raise RegardError(f"{name}: no such recipe.", nearest)
        return path
    if name in recipe_names():
        return _FOLDER / f"{name}.toml"
    if path.suffix or path.exists():
        raise RegardError(f"{name} is not a recipe.", f"Did you mean --data {quote(name)}?")
    raise RegardError(f"There is no recipe named {name!r}.", nearest)
