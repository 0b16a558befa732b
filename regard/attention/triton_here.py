"""Kernels in Triton: whether they can run here, and what their launches share.

They run with a GPU and, so that they are tested without one, in its interpreter.
"""

import importlib.util
import os

from jaxtyping import Float
from torch import Tensor

# Plain constants, which a compiler of the caller reads without running anything. CPU and Mac users have no Triton.
FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = FOUND and os.environ.get("TRITON_INTERPRET") == "1"


def can_run(x: Tensor) -> bool:
    """Whether a kernel could take tensors that lie where `x` does."""
    return FOUND and (INTERPRETED or x.is_cuda)


def contiguous_rows(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """The numbers of each row side by side, as a kernel reads them; a copy only where they are not.

    >>> contiguous_rows(torch.zeros(2, 3).T).stride()
    (2, 1)
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def power_of_two(number: int, least: int = 1) -> int:
    """The least power of two that is no less than either: a tile has such sides.

    >>> power_of_two(33), power_of_two(3, least=16)
    (64, 16)
    """
    return max(least, 1 << (number - 1).bit_length())
