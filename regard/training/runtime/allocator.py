"""Keeps the C library from handing memory back to the system between the steps of a training run on a CPU."""

import ctypes
import sys

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tells glibc to serve large blocks from its own heap and to keep what is freed; says whether it could.

    Each step allocates and frees the same large tensors. By default each comes fresh from the kernel, zeroed page by
    page: 200,000 page faults a step for a small Transformer, a third of the time. Elsewhere than on glibc: no effect.

    >>> keep_freed_memory() in (True, False)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26))
    return all(mallopt(name, value) for name, value in settings)
