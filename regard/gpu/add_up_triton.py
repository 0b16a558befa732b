"""What runs on the GPU for `add_up`: a few columns of all programs' sums at once."""

import triton
import triton.language as tl


@triton.jit
def add_up(sums, first, second, programs, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """Of the first kind of sums into `first` (the second number of this program is 0), or of the second (1)."""
    p = tl.arange(0, BLOCK_P)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    sums += tl.program_id(1) * programs * E
    found = tl.load(sums + p[:, None] * E + e[None, :], mask=(p < programs)[:, None] & (e < E)[None, :], other=0.0)
    to = first if tl.program_id(1) == 0 else second
    tl.store(to + e, tl.sum(found, 0).to(to.dtype.element_ty), mask=e < E)
