"""Optional packages: their import, and the command that installs them."""

import importlib
import importlib.metadata
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from packaging.requirements import Requirement

from regard.errors import RegardError


def declared_requirements() -> list[Requirement]:
    """The requirements that Regard declares, those of its extras included; none if its metadata is not installed."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires("regard") or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def install_command(requirements: Iterable[Requirement]) -> str:
    """The command that installs packages into the environment of this process.

    >>> install_command([Requirement("ray[serve]>=2.40; extra == 'ray'")]).partition(" -m ")[2]
    'pip install "ray[serve]>=2.40"'
    """
    parts = [
        f'"{one.name}{"[" + ",".join(sorted(one.extras)) + "]" if one.extras else ""}{one.specifier}"'
        for one in requirements
    ]
    return " ".join((shlex.quote(sys.executable or "python"), "-m pip install", *parts))


def require_package(name: str, extra: str) -> Any:
    """Import an optional package; if it is missing, the error has the command that installs those of its extra.

    >>> require_package("no_such_package", "gguf")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    regard.errors.RegardError: no_such_package is not installed. Install it with: ... -m pip install "gguf...
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        needed = [
            requirement
            for requirement in declared_requirements()
            if requirement.marker and f'extra == "{extra}"' in str(requirement.marker)
        ]
        command = install_command(needed or [Requirement(name.partition(".")[0])])
        raise RegardError(f"{name} is not installed.", f"Install it with: {command}") from None
