"""Source of the page: JavaScript and CSS files, bundled into one ES module.

The module has no dependencies and fetches nothing. It implements anywidget's contract, `export default { render }`, so
that a notebook, a saved page and the live page run the same code. Files import one another by relative paths, as in any
ES module, so that editors and `tsc` understand them; `import PAGE_STYLE from "./page.css"` inlines a style sheet as a
string.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, normpath
from posixpath import join as join_path

from regard.errors import RegardError

ENTRY, WORKER_ENTRY = "index.js", "engine/worker.js"
_IMPORT = re.compile(r'^import (\{[^}]*\}|\w+) from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
# White space and comments before the code of a line.
_COMMENT_OR_INDENT = re.compile(r"^(?:\s|/\*(?:(?!\*/)[\s\S])*\*/[ \t]*\n|//.*\n)+", re.MULTILINE)
_TOP_LEVEL_NAME = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


@cache
def module(with_engine: bool = False) -> str:
    """Return the bundled module: every file once, after the files that it imports, without comments and indentation.

    With the engine, the same text also is the script of the worker that runs a model inside a page.

    >>> "export default" in module(), "import {" in module(), "onmessage" in module(with_engine=True)
    (True, False, True)
    """
    entries = (ENTRY, WORKER_ENTRY) if with_engine else (ENTRY,)
    return _COMMENT_OR_INDENT.sub("", bundle(read_sources(), *entries))


def read_sources() -> dict[str, str]:
    """Return the text of every JavaScript and CSS file of the page, by path relative to this folder."""
    return dict(_walk(files(__name__), ""))


def bundle(sources: dict[str, str], *entries: str) -> str:
    """Bundle `sources` (path to text), starting at `entries` (index.js): imported files first.

    Import and export keywords are left out. All top-level names then share one scope, so each may be defined only once.

    >>> index = 'import { a } from "./b.js";\\nexport default a;\\n'
    >>> print(bundle({"index.js": index, "b.js": "export const a = 1;\\n"}))
    const a = 1;
    export default a;
    <BLANKLINE>
    """
    order: list[str] = []
    for entry in entries or (ENTRY,):
        _visit(entry, sources, order, ())
    owners: dict[str, str] = {}
    parts = []
    for path in order:
        code = (
            _style_constant(path, _COMMENT_OR_INDENT.sub("", sources[path])) if path.endswith(".css") else sources[path]
        )
        for name in _TOP_LEVEL_NAME.findall(code):
            if name in owners:
                raise RegardError(f"{name} is defined in {owners[name]} and in {path}.", "Rename one of them.")
            owners[name] = path
        parts.append(_EXPORT.sub("", _IMPORT.sub("", code)))
    return "".join(parts)


def imported_paths(path: str, source: str) -> list[str]:
    """Return the paths of the files that a file imports."""
    found = []
    for names, target in _IMPORT.findall(source):
        imported = normpath(join_path(dirname(path), target))
        if imported.endswith(".css") and names != _style_name(imported):
            raise RegardError(f"{path} imports {imported} as {names}.", f"Import it as {_style_name(imported)}.")
        found.append(imported)
    return found


def _visit(path: str, sources: dict[str, str], order: list[str], importers: tuple[str, ...]) -> None:
    if path in importers:
        raise RegardError(f"Circular import: {' imports '.join((*importers, path))}.", "Remove one of these imports.")
    if path not in sources:
        raise RegardError(f"{importers[-1]} imports {path}, which is missing.", "Fix the path of the import.")
    if path not in order:
        for imported in imported_paths(path, sources[path]) if path.endswith(".js") else []:
            _visit(imported, sources, order, (*importers, path))
        order.append(path)


def _style_name(path: str) -> str:
    """Return the name of the constant that holds a style sheet: `PAGE_STYLE` for page.css."""
    return path.rpartition("/")[2].removesuffix(".css").upper() + "_STYLE"


def _style_constant(path: str, text: str) -> str:
    return f"const {_style_name(path)} = {json.dumps(text, ensure_ascii=False)};\n"


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith((".js", ".css")):
            yield prefix + entry.name, entry.read_text("utf-8")
