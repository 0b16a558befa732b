"""Triton source of `column_sums_cuda`: each program sums a few columns over all partial sums."""

import triton
import triton.language as tl


@triton.jit
def column_sums(
    partial_sums, first, second, programs, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Sum partial sums of the first kind into `first` (program_id(1) = 0) or of the second into `second` (1)."""
    p = tl.arange(0, BLOCK_P)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    partial_sums += tl.program_id(1) * programs * E
    in_bounds = (p < programs)[:, None] & (e < E)[None, :]
    tile = tl.load(partial_sums + p[:, None] * E + e[None, :], mask=in_bounds, other=0.0)
    out = first if tl.program_id(1) == 0 else second
    tl.store(out + e, tl.sum(tile, 0).to(out.dtype.element_ty), mask=e < E)
