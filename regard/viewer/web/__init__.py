"""The program of the page: JavaScript files that import one another, bundled into one ES module.

The module depends on nothing and fetches nothing. It follows anywidget's contract, `export default { render }`, so that
a notebook, a saved page and the live page run the same text.
"""

import re
from functools import cache
from importlib.resources import files

from regard.errors import RegardError

FIRST = "index"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
_NAME = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


@cache
def module() -> str:
    """The bundled module: every file once, after those that it imports.

    >>> "export default" in module(), "import {" in module()
    (True, False)
    """
    return join({path.name.removesuffix(".js"): path.read_text("utf-8") for path in _sources()})


def join(sources: dict[str, str]) -> str:
    """Bundle files, given by name: imported files come first, and the import and export keywords are removed.

    All top-level names then share one scope, so each may be defined once.

    >>> print(join({"index": 'import { a } from "./b.js";\\nexport default a;\\n', "b": "export const a = 1;\\n"}))
    const a = 1;
    export default a;
    <BLANKLINE>
    """
    order: list[str] = []
    _visit(FIRST, sources, order, ())
    owners: dict[str, str] = {}
    for name in order:
        for found in _NAME.findall(sources[name]):
            if found in owners:
                raise RegardError(f"{found} is defined in {owners[found]}.js and in {name}.js.", "Rename one.")
            owners[found] = name
    return "".join(_EXPORT.sub("", _IMPORT.sub("", sources[name])) for name in order)


def _visit(name: str, sources: dict[str, str], order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise RegardError(f"{' imports '.join((*above, name))}: a circular import.", "Remove one of them.")
    if name not in sources:
        raise RegardError(f"{above[-1]}.js imports {name}.js, which is missing.", "Correct the name.")
    if name not in order:
        for imported in _IMPORT.findall(sources[name]):
            _visit(imported, sources, order, (*above, name))
        order.append(name)


def _sources() -> list:
    return [path for path in files(__name__).iterdir() if path.name.endswith(".js")]
