"""Triton source of `start_step_cuda`: one program per hypothesis."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_step(
    last, step, done, offsets, limit, prefix, tokens, position_table, x, positions, forced, ban_eos,
    scale, min_len, prefix_len, position_offset,
    K: tl.constexpr, E: tl.constexpr, EOS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    slot = row // K
    now, is_done = tl.load(step + slot), tl.load(done + slot) != 0
    # The position after the last token of a finished sentence may not exist.
    position = tl.where(is_done, 0, tl.load(offsets + slot) + now)
    only = tl.where(now >= tl.load(limit + slot), EOS, -1).to(tl.int64)
    if prefix_len > 0:
        token = tl.load(prefix + slot * prefix_len + tl.minimum(now, prefix_len - 1))
        only = tl.where((now < prefix_len) & (token >= 0), token, only)
    tl.store(forced + row, only)
    tl.store(ban_eos + row, now < min_len)
    if row % K == 0:
        tl.store(positions + slot, tl.where(is_done, -1, position))
    e = tl.arange(0, BLOCK_E)
    in_bounds = e < E
    value = tl.load(tokens + tl.load(last + row) * E + e, mask=in_bounds, other=0.0)
    # Rounded as separate operations would be.
    value = (value.to(tl.float32) * scale).to(x.dtype.element_ty)
    if HAS_POSITIONS:
        encoding = tl.load(position_table + (position + position_offset) * E + e, mask=in_bounds, other=0.0)
        value = value.to(tl.float32) + encoding.to(x.dtype.element_ty).to(tl.float32)
    tl.store(x + row.to(tl.int64) * E + e, value, mask=in_bounds)
