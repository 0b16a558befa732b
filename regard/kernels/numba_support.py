"""Compiled CPU kernels: numba is optional, and without it the same functions run as plain Python."""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

# Sums may be reordered and fused; infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}


@cache
def numba_available() -> bool:
    """Whether kernels can be compiled; imports nothing.

    >>> numba_available() in (True, False)
    True
    """
    return importlib.util.find_spec("numba") is not None


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on its first call; compiled code is kept on disk.

    Kernels run in one thread. Modules with kernels import numba: import them where they are needed only.

    >>> jit(lambda x: x + 1)(1)
    2
    """
    if not numba_available():
        return function
    import numba

    is_stored = function.__name__ != "<lambda>"
    return numba.njit(nogil=True, cache=is_stored, fastmath=_FASTMATH, error_model="numpy")(function)
