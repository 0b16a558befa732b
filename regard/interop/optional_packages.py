"""Import of optional packages."""

import importlib
from typing import Any

from regard.errors import RegardError


def require_package(name: str, extra: str) -> Any:
    """Import an optional package; if it is missing, the error names the extra of Regard that installs it.

    >>> require_package("no_such_package", "onnx")
    Traceback (most recent call last):
    regard.errors.RegardError: no_such_package is not installed. Install it with: pip install "regard[onnx]"
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise RegardError(f"{name} is not installed.", f'Install it with: pip install "regard[{extra}]"') from None
