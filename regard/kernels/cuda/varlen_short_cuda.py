"""Attention over short packed sequences of up to 128 tokens, with tiles of about their length (CUDA, Triton).

Plain twin: `regard.attention.reference.reference_packed`. torch's variable-length attention has tiles of 128 rows,
which sentences of 10 to 100 tokens leave mostly empty. Nothing synchronizes with the device, and torch.compile sees one
operator, so calls can be compiled and captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.triton_support import contiguous_rows, next_power_of_two, operator, triton_available

MAX_LEN = 128
# The smallest side of a tile that matrix units support.
MIN_BLOCK = 16
# Elements in a tile of keys: with more, the shared memory of consumer GPUs is too small for the backward pass.
MAX_ELEMENTS = 128 * 64


class VarlenTiling(NamedTuple):
    """Queries per tile (all keys are in one tile), warps per program, and registers per thread."""

    rows: int
    warps: int
    registers: int


# By the maximum number of elements in a tile of keys. Register limits are so low that a few registers may spill: the
# more programs a multiprocessor holds, the more of them compute while others wait for memory.
FORWARD = {
    1024: VarlenTiling(16, 1, 80),
    2048: VarlenTiling(32, 1, 168),
    4096: VarlenTiling(64, 4, 96),
    MAX_ELEMENTS: VarlenTiling(64, 4, 168),
}
BACKWARD = {
    1024: VarlenTiling(16, 1, 128),
    2048: VarlenTiling(32, 1, 255),
    4096: VarlenTiling(64, 4, 168),
    MAX_ELEMENTS: VarlenTiling(32, 8, 128),
}
REGISTERS = 2**14  # of each of the four partitions of a multiprocessor, among which a program's warps are distributed


def supports(q: Tensor, max_q: int, max_k: int, width: int) -> bool:
    """Whether the kernel runs on sequences of these maximum lengths; `width` is the largest of q, k and v."""
    return (
        q.is_cuda
        and triton_available()
        and max(max_q, max_k) <= MAX_LEN
        and max_k * next_power_of_two(width, MIN_BLOCK) <= MAX_ELEMENTS
    )


@operator("regard::varlen_short")
def varlen_short_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """The output (N, H, Dv) of q (N, H, D), k (M, G, D) and v (M, G, Dv), whose rows of one head are contiguous."""
    from regard.kernels.triton import varlen_short_triton

    out = torch.empty_strided(*_contiguous_layout(q, v.shape[-1]), dtype=v.dtype, device=v.device)
    sequences, tiling = len(q_starts) - 1, _tiling(q, v, max_k, FORWARD)
    varlen_short_triton.varlen_short_forward[(_programs(q, sequences * q.shape[1], tiling),)](
        *(q, k, v, out, q_starts, k_starts, sequences, scale),
        *(stride for x in (q, k, v, out) for stride in x.stride()[:2]),
        HEADS=q.shape[1],
        GROUP=q.shape[1] // k.shape[1],
        WIDTH=q.shape[-1],
        VALUE_WIDTH=v.shape[-1],
        CAUSAL=causal,
        **_blocks(q, v, max_q, max_k, tiling),
    )
    return out


@operator("regard::varlen_short_backward")
def varlen_short_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from regard.kernels.triton import varlen_short_triton

    grad = contiguous_rows(grad)
    grads = _empty_grads(q, k, v)
    sequences, tiling = len(q_starts) - 1, _tiling(q, v, max_k, BACKWARD)
    varlen_short_triton.varlen_short_backward[(_programs(q, sequences * k.shape[1], tiling),)](
        *(q, k, v, grad, *grads, q_starts, k_starts, sequences, scale),
        *(stride for x in (q, k, v, grad, *grads) for stride in x.stride()[:2]),
        GROUPS=k.shape[1],
        GROUP=q.shape[1] // k.shape[1],
        WIDTH=q.shape[-1],
        VALUE_WIDTH=v.shape[-1],
        CAUSAL=causal,
        **_blocks(q, v, max_q, max_k, tiling),
    )
    return grads


@varlen_short_forward.register_fake
def _(q, k, v, q_starts, k_starts, max_q, max_k, scale, causal):
    return torch.empty_strided(*_contiguous_layout(q, v.shape[-1]), dtype=v.dtype, device=v.device)


@varlen_short_backward.register_fake
def _(grad, q, k, v, q_starts, k_starts, max_q, max_k, scale, causal):
    return _empty_grads(q, k, v)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad: Tensor):
    grads = varlen_short_backward(grad, *ctx.saved_tensors, ctx.max_q, ctx.max_k, ctx.scale, ctx.causal)
    return *grads, None, None, None, None, None, None


varlen_short_forward.register_autograd(_backward, setup_context=_setup_context)


def _contiguous_layout(x: Tensor, width: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shape and strides of a contiguous tensor with the rows and heads of x."""
    return (x.shape[0], x.shape[1], width), (x.shape[1] * width, width, 1)


def _empty_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_strided(*_contiguous_layout(x, x.shape[-1]), dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    return dq, dk, dv


def _tiling(q: Tensor, v: Tensor, max_k: int, tilings: dict[int, VarlenTiling]) -> VarlenTiling:
    width = max(q.shape[-1], v.shape[-1], 64)  # with narrow heads the scores need more space than the keys
    elements = next_power_of_two(max_k, MIN_BLOCK) * next_power_of_two(width, MIN_BLOCK)
    return next((tiling for limit, tiling in tilings.items() if elements <= limit), tilings[MAX_ELEMENTS])


def _programs(x: Tensor, tasks: int, tiling: VarlenTiling) -> int:
    """The number of programs that fit on the GPU at once; each iterates over tasks (heads of sequences).

    One program per task would be slower: batches of constant shape have thousands of empty sequences.
    """
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs_per_processor = 4 * (REGISTERS // (32 * tiling.registers)) // tiling.warps
    return max(1, min(tasks, processors * programs_per_processor))


def _blocks(q: Tensor, v: Tensor, max_q: int, max_k: int, tiling: VarlenTiling) -> dict[str, int]:
    """Tile sizes and compiler options."""
    sizes = dict(BLOCK_T=min(max_q, tiling.rows), BLOCK_S=max_k, BLOCK_D=q.shape[-1], BLOCK_V=v.shape[-1])
    blocks = {name: next_power_of_two(size, MIN_BLOCK) for name, size in sizes.items()}
    blocks |= {"HAS_SEVERAL_TILES": max_q > tiling.rows}
    return blocks | {"num_warps": tiling.warps, "num_stages": 1, "maxnreg": tiling.registers}
