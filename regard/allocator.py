"""Allocator settings of processes that compute on a CPU: glibc keeps freed memory instead of returning it."""

import ctypes
import sys

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Make glibc serve large blocks from its heap and keep freed memory. Return whether the settings were accepted.

    Each step allocates and frees the same large tensors. By default each is mapped anew and zeroed page by page:
    200,000 page faults per step for a small Transformer, a third of the time. No effect without glibc.

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
