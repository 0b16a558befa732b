"""The documentation is run: its Python, its recipes, and the options of the commands that it shows.

The Python blocks of a page share one namespace and one temporary folder. A statement that ends in `# → TEXT` must print
TEXT, or have it as the repr of its value. A block after `<!-- not run: reason -->` is skipped.
"""

import ast
import contextlib
import functools
import io
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from regard.cli import COMMANDS, main
from regard.data import AugmentConfig
from regard.decode import DecodeConfig
from regard.models import FAMILIES
from regard.train import DataConfig, Recipe, TokenizerConfig, TrainConfig, recipe_from
from regard.train.recipe import DERIVED

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- not run: .+? -->\s*)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
OPTION = re.compile(r"--[a-z][\w.-]*")
RESULT = "# → "


class Block(NamedTuple):
    kind: str
    text: str
    line: int
    skip: bool


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The blocks of these kinds, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    found = (
        Block(match["kind"], match["text"], text.count("\n", 0, match.start("text")), bool(match["skip"]))
        for match in BLOCK.finditer(text)
    )
    return [block for block in found if block.kind in kinds]


def run_block(page: Path, block: Block, names: dict[str, Any]) -> None:
    # Empty lines before it, so that a traceback names the page's own line.
    code = "\n" * block.line + block.text
    lines = code.splitlines()
    for statement in ast.parse(code, str(page)).body:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), str(page), "eval"), names)
                printed.write(repr(value) if value is not None else "")
            else:
                exec(compile(ast.Module([statement], []), str(page), "exec"), names)
        _, told, wanted = lines[statement.end_lineno - 1].partition(RESULT)
        if told:
            assert printed.getvalue().strip() == wanted.strip(), f"{page}, line {statement.end_lineno}"


@functools.cache
def accepted(*command: str) -> frozenset[str]:
    """Every --option that the help of a command names."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main([*command, "--help"]) == 0
    family = {"--model.family", "--task"} if command[0] == "train" else set()  # read before there is a help to print
    return frozenset(OPTION.findall(told.getvalue())) | family


def commands(text: str) -> list[list[str]]:
    """The words after `regard` of each call in a block for the shell."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        reader.whitespace_split = True
        words = list(reader)
        borders = [i for i, word in enumerate(words) if set(word) <= set("|&;<>")]
        for start, end in zip([-1, *borders], [*borders, len(words)]):
            if words[start + 1 : start + 2] == ["regard"]:
                found.append(words[start + 2 : end])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        if not block.skip:
            run_block(page, block, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    for block in blocks(page, "console", "sh"):
        for name, *words in commands(block.text):
            assert name in COMMANDS, f"{page}, line {block.line}: regard {name}"
            # Which options of the model there are depends on its family, and so on the recipe.
            chosen = [word for word in words[:1] if name == "train" and Path(word).is_file()]
            for option in ("--model.family", "--task"):
                if option in words:
                    place = words.index(option)
                    chosen += words[place : place + 2]
            unknown = {word for word in words if word.startswith("--")} - accepted(name, *chosen)
            assert not unknown, f"{page}, line {block.line}: regard {name} has no {', '.join(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_are_recipes(page: Path) -> None:
    for block in blocks(page, "toml"):
        assert isinstance(recipe_from(tomllib.loads(block.text), origin=f"{page}, line {block.line}"), Recipe)


def tables(page: Path) -> list[dict[str, Any]]:
    """The tables of keys, each as keys and defaults."""
    found = re.findall(r"^\| key \| default \| meaning \|\n.+\n((?:\|.+\n)+)", page.read_text(encoding="utf-8"), re.M)
    return [dict(_key_and_default(row) for row in table.splitlines()) for table in found]


def _key_and_default(row: str) -> tuple[str, Any]:
    key, default = (cell.strip(" `") for cell in row.split("|")[1:3])
    value = None if default == "none" else tomllib.loads(f"value = {default}")["value"]
    return key, tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("page", "configs"),
    [
        ("training.md", [DataConfig, TokenizerConfig, TrainConfig]),
        ("models.md", [family.config for family in FAMILIES.values()]),
        ("translating.md", [DecodeConfig]),
        ("images.md", [AugmentConfig]),
    ],
)
def test_tables_have_every_key_and_default(page: str, configs: list[type]) -> None:
    wanted = [{key: value for key, value in vars(config()).items() if key not in DERIVED} for config in configs]
    assert tables(ROOT / "docs" / page) == wanted


def anchors(page: Path) -> set[str]:
    """The names by which headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        there = page.parent / name if name else page
        assert there.exists(), name
        assert not anchor or anchor in anchors(there), f"{name}#{anchor}"


def test_a_wrong_result_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\nx + 1  # → 3\n```\n", encoding="utf-8")
    (block,) = blocks(page, "python")
    with pytest.raises(AssertionError, match="line 3"):
        run_block(page, block, {})


def test_commands_are_found() -> None:
    text = '$ cat a | regard translate model --beam 2 > b   # comment --no\nregard score model \\\n  --data "a b"\n'
    assert commands(text) == [["translate", "model", "--beam", "2"], ["score", "model", "--data", "a b"]]
