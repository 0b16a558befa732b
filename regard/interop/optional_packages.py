"""Libraries that not every user of Regard needs."""

import importlib
from typing import Any

from regard.errors import RegardError


def need(name: str, extra: str) -> Any:
    """A library, or an error that says how to get it.

    >>> need("no_such_library", "onnx")
    Traceback (most recent call last):
    regard.errors.RegardError: no_such_library is not installed. Get it with: pip install "regard[onnx]"
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise RegardError(f"{name} is not installed.", f'Get it with: pip install "regard[{extra}]"') from None
