"""Compiled CPU kernels: numba is optional, and without it the same functions run as plain Python."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

# Sums may be reordered and fused; infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}
# Compiled code reads and writes what an index points to. Kernels compare the sizes of a call once per row or slot, and
# raise a ValueError with this message; the tests compile them with bounds checks for every element.
SIZES = "The sizes of the arrays of a compiled kernel do not match."


@cache
def numba_available() -> bool:
    """Whether kernels can be compiled: numba is installed and supports the installed numpy. Imports it: half a second.

    >>> numba_available() in (True, False)
    True
    """
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


class Compilation:
    """Kernels that are being compiled, which takes up to a minute when a processor runs them for the first time."""

    MESSAGE = "compiling kernels for this processor, once"

    def __init__(self) -> None:
        self.running = 0
        """number of kernels that are being compiled"""
        self.on_start: Callable[[], None] = lambda: None
        """called before the first kernel is compiled; not for kernels that are read from disk"""

    @cache  # noqa: B019
    def watch(self) -> None:
        """Count what numba compiles from now on."""
        from numba.core import event

        compilation = self

        class Listener(event.Listener):
            def on_start(self, _: Any) -> None:
                compilation.running += 1
                announce, compilation.on_start = compilation.on_start, lambda: None
                announce()

            def on_end(self, _: Any) -> None:
                compilation.running -= 1

        event.register("numba:compile", Listener())


compilation = Compilation()


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on its first call; compiled code is kept on disk where a folder for it is writable.

    Kernels run in one thread. Modules with kernels import numba: import them where they are needed only.

    >>> jit(lambda x: x + 1)(1)
    2
    """
    if not numba_available():
        return function
    import numba

    compilation.watch()
    options: dict[str, Any] = {"nogil": True, "fastmath": _FASTMATH, "error_model": "numpy"}
    if function.__name__ == "<lambda>":
        return numba.njit(**options)(function)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder
        return numba.njit(**options)(function)
