"""Start of a decoding step in one launch: embeddings, positions and constraints (CUDA, Triton; inference only).

Reference: `reference_start_step`. Nothing synchronizes with the host, so calls can be captured in a CUDA graph. B
slots, K hypotheses per slot, R = B·K rows.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.kernels.triton.support import (
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_two,
    tl,
    triton,
)


class StepInputs(NamedTuple):
    """The input of the first layer, and the positions and constraints of a step."""

    x: Float[Tensor, "R E"]
    positions: Int[Tensor, "B"]
    """cache position of the last token of each slot; -1 if the slot is done"""
    forced: Int[Tensor, "R"]
    """the only token allowed next, or -1"""
    ban_eos: Bool[Tensor, "R"]
    """whether the output is too short to end"""


class StepTables(NamedTuple):
    """Embeddings and constraints that do not change between steps."""

    tokens: Float[Tensor, "V E"]
    positions: Float[Tensor, "P E"] | None
    scale: float
    position_offset: int
    eos: int
    min_len: int


def start_step(
    last: Int[Tensor, "B K"],
    step: Int[Tensor, "B"],
    done: Bool[Tensor, "B"],
    offsets: Int[Tensor, "B"],
    limit: Int[Tensor, "B"],
    prefix: Int[Tensor, "B P"],
    tables: StepTables,
) -> StepInputs:
    """Embed the last token of each hypothesis at its position offsets + step, and determine its constraints."""
    B, K = last.shape
    E = tables.tokens.shape[1]
    device = last.device
    start = StepInputs(
        torch.empty(B * K, E, dtype=tables.tokens.dtype, device=device),
        torch.empty(B, dtype=torch.long, device=device),
        torch.empty(B * K, dtype=torch.int32, device=device),
        torch.empty(B * K, dtype=torch.bool, device=device),
    )
    start_step_kernel[(B * K,)](
        *(last, step, done, offsets, limit, prefix, tables.tokens, tables.positions, *start),
        *(tables.scale, tables.min_len, prefix.shape[1], tables.position_offset),
        K=K,
        E=E,
        EOS=tables.eos,
        HAS_POSITIONS=tables.positions is not None,
        BLOCK_E=next_power_of_two(E),
        num_warps=1 if E <= 512 else 4,
        **dependent_launch(last),
    )
    return start


def reference_start_step(
    last: Int[Tensor, "B K"],
    step: Int[Tensor, "B"],
    done: Bool[Tensor, "B"],
    offsets: Int[Tensor, "B"],
    limit: Int[Tensor, "B"],
    prefix: Int[Tensor, "B P"],
    tables: StepTables,
) -> StepInputs:
    """`start_step` in torch operations."""
    K, position = last.shape[1], torch.where(done, 0, offsets + step)
    x = tables.tokens[last.flatten()] * tables.scale
    if tables.positions is not None:
        x = x + tables.positions[position + tables.position_offset].repeat_interleave(K, 0).to(x.dtype)
    forced = torch.where(step >= limit, tables.eos, -1)
    if prefix.shape[1]:
        token = prefix.gather(1, step.clamp(max=prefix.shape[1] - 1)[:, None])[:, 0]
        forced = torch.where((step < prefix.shape[1]) & (token >= 0), token, forced)
    ban_eos = step < tables.min_len
    positions = torch.where(done, -1, position)
    return StepInputs(x, positions, forced.int().repeat_interleave(K), ban_eos.repeat_interleave(K))


@triton.jit
def start_step_kernel(
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
