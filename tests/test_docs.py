"""Runs the documentation: its Python blocks and recipes, and checks the commands and options that it shows.

The Python blocks of a page share one namespace, and all pages one temporary folder. A statement that ends in `# → TEXT`
must print TEXT, or have it as the repr of its value. A block after `<!-- not run: reason -->` is skipped. The
commands run in test_doc_commands.py.
"""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from regard.attention import SCORES
from regard.cli import main
from regard.cli.options import parse_options
from regard.data import AugmentConfig
from regard.decode import DecodeConfig
from regard.layers import POSITIONS
from regard.models import FAMILIES
from regard.models.bert import TEXT_HEADS
from regard.training import TASKS, DataConfig, Recipe, TokenizerConfig, TrainConfig, recipe_from_dict
from regard.training.recipe import DERIVED

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
if importlib.util.find_spec("fastapi") is None:  # an error in .ci/run: see conftest.py
    PAGES.remove(ROOT / "docs" / "serving.md")
BLOCK = re.compile(r"(?P<skip><!-- not run: .+? -->\s*)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
OPTION = re.compile(r"--[a-z][\w.-]*")
RESULT = "# → "


class Block(NamedTuple):
    kind: str
    text: str
    line: int
    skip: bool


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The blocks of these kinds, with the line number of each."""
    text = page.read_text(encoding="utf-8")
    found = (
        Block(match["kind"], match["text"], text.count("\n", 0, match.start("text")), bool(match["skip"]))
        for match in BLOCK.finditer(text)
    )
    return [block for block in found if block.kind in kinds]


def run_block(page: Path, block: Block, names: dict[str, Any]) -> None:
    # Empty lines before it, so that tracebacks show the line number of the page.
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
        _, has_result, expected = lines[statement.end_lineno - 1].partition(RESULT)
        if has_result:
            assert printed.getvalue().strip() == expected.strip(), f"{page}, line {statement.end_lineno}"


def commands(text: str) -> list[list[str]]:
    """The arguments of each `regard` call in a shell block."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>()")
        reader.whitespace_split = True
        words = list(reader)
        borders = [i for i, word in enumerate(words) if set(word) <= set("|&;<>()")]
        for start, end in zip([-1, *borders], [*borders, len(words)]):
            if words[start + 1 : start + 2] == ["regard"]:
                found.append(words[start + 2 : end])
    return found


@pytest.fixture
def restored_registries() -> Iterator[None]:
    """Remove what a page registers."""
    registries: list[dict[str, Any]] = [FAMILIES, SCORES, TASKS, POSITIONS, TEXT_HEADS]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before):
        registry.clear()
        registry.update(entries)


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all pages, as of a reader who tries one after another."""
    return tmp_path_factory.mktemp("reader")


@pytest.mark.usefixtures("restored_registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(page: Path, one_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(one_folder)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        if not block.skip:
            run_block(page, block, names)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_extras_are_installed_from_the_clone(page: Path) -> None:
    """Regard is on no package index."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""pip install [^`\n]*["' ]regard\[.*""", text)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r'pip install -e "\.\[([a-z0-9]+)\]"', text)) <= set(extras)


class Parsed(BaseException):
    """Ends a command whose arguments are valid."""


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end when their arguments have been parsed."""

    def parse_only(*arguments: Any) -> None:
        parse_options(*arguments)
        raise Parsed

    def end(*_: Any, **__: Any) -> None:
        raise Parsed

    monkeypatch.setattr("regard.cli.common.parse_options", parse_only)
    monkeypatch.setattr("regard.cli.doctor.parse_options", parse_only)
    monkeypatch.setattr("regard.cli.train.complete_recipe", end)
    monkeypatch.setattr("regard.cli.train.is_shard_folder", lambda word: word.endswith("-shards"))


@pytest.mark.usefixtures("only_parsed")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, options and their values; recipe.toml is the recipe above the command."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "console", "sh", "toml"):
        if block.kind == "toml":
            Path("recipe.toml").write_text(block.text, encoding="utf-8")
            continue
        for words in commands(block.text):
            with contextlib.suppress(Parsed):
                assert main(words) == 0, f"{page}, line {block.line}: {words}: {capsys.readouterr().err}"


def test_outputs_have_different_names() -> None:
    """In one folder, a second command with the same output would be refused, or resume the run of the first one."""
    outputs: dict[str, set[str]] = {}
    for page in PAGES:
        for block in blocks(page, "console", "sh"):
            for name, *words in commands(block.text):
                out = words[words.index("--out") + 1] if "--out" in words else ""
                if name in ("train", "demo", "prepare", "import", "export") and out:
                    outputs.setdefault(out, set()).add(" ".join([name, *words]))
        for block in blocks(page, "python"):
            for out in re.findall(r'\bout="([^"]+)"', block.text):
                outputs.setdefault(out, set()).add(f"Python in {page.name}")
    assert {out: users for out, users in outputs.items() if len(users) > 1} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_are_valid(page: Path) -> None:
    for block in blocks(page, "toml"):
        assert isinstance(recipe_from_dict(tomllib.loads(block.text), origin=f"{page}, line {block.line}"), Recipe)


def tables(page: Path) -> list[dict[str, Any]]:
    """The tables of keys, as dictionaries from key to default."""
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


def test_the_help_and_the_tables_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and defaults of `regard train --help-all` are those of the tables, but for what is chosen from the data."""
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["train", "--help-all"]) == 0
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    chosen = re.search(r"^`regard train` chooses:\n\n((?:- .+\n(?:  .+\n)*)+)", page, re.M)
    assert chosen is not None, "the list of what is chosen from the data"
    for section, table in zip(("data", "tokenizer", "train"), tables(ROOT / "docs" / "training.md")):
        block = re.search(rf"^\[{section}\]\n(.+?)(?:\n\n|\Z)", output.getvalue(), re.M | re.S)
        assert block is not None
        options = re.split(r"^  (?=--)", block[1], flags=re.M)[1:]
        found = {}
        for text in (" ".join(option.split()) for option in options):
            key = re.findall(rf"--{section}\.([\w-]+)", text)[0].replace("-", "_")
            default = re.search(r"\(default: ([^()]*)\)$", text)
            found[key] = default[1] if default else ""
        listed = re.search(rf"^- `\[{section}\]`: ((?:.+\n)(?:  .+\n)*)", chosen[1], re.M)
        by_data = set(re.findall(r"`(\w+)`", listed[1])) if listed else set()
        assert {key for key, default in found.items() if default == "chosen from the data"} == by_data
        wanted = {key: _as_in_help(value) for key, value in table.items()}
        wanted |= dict.fromkeys(by_data, "chosen from the data")
        if section == "data":
            wanted["files"] = ""  # a Recipe has a default, the command line requires --data
        assert found == wanted


def _as_in_help(value: Any) -> str:
    if value is None or isinstance(value, tuple):
        return " ".join(value or ())
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_table_of_options_matches_the_help() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = re.search(r"^\| option \| short for \| meaning \|\n.+\n((?:\|.+\n)+)", page, re.M)
    assert table is not None
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["train", "--help"]) == 0
    listed = re.findall(r"^  (--[\w-]+)", output.getvalue(), re.M)
    assert re.findall(r"^\| `(--[\w-]+)", table[1], re.M) == [name for name in listed if "help" not in name]


def test_number_and_names_of_families_agree() -> None:
    count = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")[len(FAMILIES)]
    models, index = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("models.md", "README.md"))
    assert f"the {count} families" in models
    assert f"the {count} families" in index
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["train", "--help"]) == 0
    assert ", ".join(FAMILIES) in " ".join(output.getvalue().split())


def anchors(page: Path) -> set[str]:
    """The anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "benchmarks").glob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_are_valid(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_wrong_result_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\nx + 1  # → 3\n```\n", encoding="utf-8")
    (block,) = blocks(page, "python")
    with pytest.raises(AssertionError, match="line 3"):
        run_block(page, block, {})


def test_commands_are_found() -> None:
    text = '$ cat a | regard translate model --beam 2 > b   # comment --no\nregard score model \\\n  --data "a b"\n'
    assert commands(text) == [["translate", "model", "--beam", "2"], ["score", "model", "--data", "a b"]]


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = [path for path in re.findall(r"`([a-z0-9_]+/[\w/.]*)", text) if path != "regard/"]
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / "regard" / path).exists()] == []
    for path, name in re.findall(r"`([\w/]+\.py): (\w+)", text):
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / "regard" / path).read_text(encoding="utf-8"), re.M), (
            path,
            name,
        )
