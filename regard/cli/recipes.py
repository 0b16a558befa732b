"""`regard recipes`: list or print the packaged recipes."""

from dataclasses import dataclass
from typing import Annotated

from regard.cli.common import parse
from regard.cli.options import Arg
from regard.recipes import find_recipe, recipe_names, recipe_summary


@dataclass(frozen=True)
class Options:
    """List the packaged recipes, or print one: regard recipes NAME > recipe.toml

    To train with a recipe: regard train NAME --data FILE …
    """

    name: Annotated[str, Arg("NAME", default="list all", is_positional=True)] = ""
    """recipe to print"""


def run(argv: list[str]) -> int:
    options = parse(Options, "recipes", argv)
    if options.name:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
        return 0
    names = recipe_names()
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {recipe_summary(name)}")
    return 0
