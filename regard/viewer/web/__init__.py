"""The page's own program: small files of JavaScript that import one another, joined into one ES module.

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
# What would end, or hide the end of, the script element that the text stands in.
_FORBIDDEN = ("</script", "<script", "<!--")


@cache
def module() -> str:
    """The whole module as one text: every file once, after those that it imports.

    >>> "export default" in module(), "import {" in module()
    (True, False)
    """
    return join({path.name.removesuffix(".js"): path.read_text("utf-8") for path in _sources()})


def join(sources: dict[str, str]) -> str:
    """Joins files, by their names, into one: those that are imported come first, imports and exports go.

    All names at the top of the files share one scope then, so each must be there once.

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
    text = "".join(_EXPORT.sub("", _IMPORT.sub("", sources[name])) for name in order)
    for forbidden in _FORBIDDEN:
        if forbidden in text.lower():
            raise RegardError(f"The module holds {forbidden}, which a page cannot hold.", "Write it in two parts.")
    return text


def _visit(name: str, sources: dict[str, str], order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise RegardError(f"{' imports '.join((*above, name))}: a circle.", "Take one of the imports away.")
    if name not in sources:
        raise RegardError(f"{above[-1]}.js imports {name}.js, which is not there.", "Correct the name.")
    if name not in order:
        for imported in _IMPORT.findall(sources[name]):
            _visit(imported, sources, order, (*above, name))
        order.append(name)


def _sources() -> list:
    return [path for path in files(__name__).iterdir() if path.name.endswith(".js")]
