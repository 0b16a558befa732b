"""Whether kernels in Triton can run here: with a GPU and, so that they are tested without one, in its interpreter."""

import importlib.util
import os

from torch import Tensor

# Plain constants, which a compiler of the caller reads without running anything. CPU and Mac users have no Triton.
FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = FOUND and os.environ.get("TRITON_INTERPRET") == "1"


def can_run(x: Tensor) -> bool:
    """Whether a kernel could take tensors that lie where `x` does."""
    return FOUND and (INTERPRETED or x.is_cuda)
