"""Column sums from the partial sums of a kernel's programs, in one launch (CUDA, Triton).

Plain twin: `partial_sums.sum(1)`. torch needs a reduction (10 µs on an H200) and a cast for each of them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.triton_support import next_power_of_two

# Columns per program.
COLUMNS = 16


def column_sums(partial_sums: Float[Tensor, "kinds P E"], dtype: torch.dtype) -> list[Float[Tensor, "E"]]:
    """Sum the partial sums of P programs; `kinds`, 1 or 2, is the number of vectors returned."""
    from regard.kernels.triton import column_sums_triton

    kinds, programs, E = partial_sums.shape
    sums = [partial_sums.new_empty(E, dtype=dtype) for _ in range(kinds)]
    column_sums_triton.column_sums[(-(-E // COLUMNS), kinds)](
        *(partial_sums, sums[0], sums[-1], programs),
        E=E,
        BLOCK_P=next_power_of_two(programs),
        BLOCK_E=COLUMNS,
        num_warps=8,
    )
    return sums
