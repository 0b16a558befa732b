"""Packages whose public names are imported when they are first used: a command imports only what it runs."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package. Its stub (`__init__.pyi`) lists the names and their modules.

    Type checkers read the same stub, so that each name is listed once. Packages in the stub need no import of their
    own, but are not public names.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    public = sorted(name for name, module in modules.items() if module != package and not name.startswith("__"))

    def get_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name]), name)

    def list_names() -> list[str]:
        return sorted({*public, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get_name, list_names, public
