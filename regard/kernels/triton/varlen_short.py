"""Attention over short packed sequences of up to 128 tokens, with tiles of about their length (CUDA, Triton).

Reference: `regard.attention.reference.reference_packed`. torch's variable-length attention has tiles of 128 rows,
which sentences of 10 to 100 tokens leave mostly empty. Nothing synchronizes with the device, and torch.compile sees one
operator, so calls can be compiled and captured in a CUDA graph.

A program handles one head of one sequence at a time, all keys in one tile. There are as many programs as the GPU runs
at once; each continues with its next head or sequence until only empty sequences are left. Since a tile contains
complete rows of weights, softmax needs no running maximum, and the backward pass neither the output nor a saved
log-sum-exp: it recomputes the weights from q and k, and the row sums of dO·O as those of P·dP. Each element of dq, dk
and dv is written by one program, without atomics, so results are bitwise reproducible.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.triton.support import contiguous_rows, next_power_of_two, operator, tl, triton, triton_available

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
    out = torch.empty_strided(*_contiguous_layout(q, v.shape[-1]), dtype=v.dtype, device=v.device)
    sequences, tiling = len(q_starts) - 1, _tiling(q, v, max_k, FORWARD)
    varlen_short_forward_kernel[(_programs(q, sequences * q.shape[1], tiling),)](
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
    grad = contiguous_rows(grad)
    grads = _empty_grads(q, k, v)
    sequences, tiling = len(q_starts) - 1, _tiling(q, v, max_k, BACKWARD)
    varlen_short_backward_kernel[(_programs(q, sequences * k.shape[1], tiling),)](
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


@triton.jit
def _load(x, rows, count, columns, width, row_stride):
    """Load rows of x as a tile, with zeros beyond `count` rows or `width` columns."""
    offsets = rows[:, None] * row_stride + columns[None, :]
    return tl.load(x + offsets, mask=(rows[:, None] < count) & (columns[None, :] < width), other=0.0)


@triton.jit
def _store(x, tile, rows, count, columns, width, row_stride):
    offsets = rows[:, None] * row_stride + columns[None, :]
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < width))


@triton.jit
def _row_pointer(x, row, row_stride, head, head_stride):
    """Pointer to a row and head of x."""
    return x + row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride


@triton.jit
def _sequence_bounds(starts, sequence, sequences):
    """Start and end of a sequence; both are the end of the data for indices beyond the last sequence."""
    first = tl.load(starts + tl.minimum(sequence, sequences))
    return first, tl.load(starts + tl.minimum(sequence + 1, sequences))


@triton.jit
def _weights(q, k, t, s, S, scale, CAUSAL: tl.constexpr):
    """The weights of a tile of queries; zeros for a query without an allowed key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    last = tl.minimum(t, S - 1)[:, None] if CAUSAL else S - 1
    scores = tl.where(s[None, :] <= last, scores, float("-inf"))
    top = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return p * (1.0 / tl.maximum(tl.sum(p, 1), 1e-30))[:, None]


@triton.jit(do_not_specialize=["sequences"])
def varlen_short_forward_kernel(
    q, k, v, out, q_starts, k_starts, sequences, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SEVERAL_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i, s, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    task, end = tl.program_id(0), tl.load(q_starts + sequences)
    t0, t1 = _sequence_bounds(q_starts, task // HEADS, sequences)
    s0, s1 = _sequence_bounds(k_starts, task // HEADS, sequences)
    while t0 < end:
        head, T, S = task % HEADS, t1 - t0, s1 - s0
        keys = _load(_row_pointer(k, s0, k_row, head // GROUP, k_head), s, S, d, WIDTH, k_row)
        values = _load(_row_pointer(v, s0, v_row, head // GROUP, v_head), s, S, e, VALUE_WIDTH, v_row)
        row = t0
        # Load the bounds of the next sequence before the first use of these tiles, which waits for memory.
        task += tl.num_programs(0)
        t0, t1 = _sequence_bounds(q_starts, task // HEADS, sequences)
        s0, s1 = _sequence_bounds(k_starts, task // HEADS, sequences)
        for begin in range(0, T if HAS_SEVERAL_TILES else BLOCK_T, BLOCK_T):
            queries = _load(_row_pointer(q, row + begin, q_row, head, q_head), i, T - begin, d, WIDTH, q_row)
            p = _weights(queries, keys, begin + i, s, S, scale, CAUSAL)
            output = tl.dot(p.to(values.dtype), values, input_precision="ieee")
            _store(
                _row_pointer(out, row + begin, out_row, head, out_head), output, i, T - begin, e, VALUE_WIDTH, out_row
            )


@triton.jit(do_not_specialize=["sequences"])
def varlen_short_backward_kernel(
    q, k, v, grad, dq, dk, dv, q_starts, k_starts, sequences, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
    dq_row, dq_head, dk_row, dk_head, dv_row, dv_head,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SEVERAL_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i, s, d, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    task, t_end, s_end = tl.program_id(0), tl.load(q_starts + sequences), tl.load(k_starts + sequences)
    t0, t1 = _sequence_bounds(q_starts, task // GROUPS, sequences)
    s0, s1 = _sequence_bounds(k_starts, task // GROUPS, sequences)
    while (t0 < t_end) | (s0 < s_end):
        group, T, S = task % GROUPS, t1 - t0, s1 - s0
        keys = _load(_row_pointer(k, s0, k_row, group, k_head), s, S, d, WIDTH, k_row)
        values = _load(_row_pointer(v, s0, v_row, group, v_head), s, S, e, VALUE_WIDTH, v_row)
        row, key = t0, s0
        task += tl.num_programs(0)
        t0, t1 = _sequence_bounds(q_starts, task // GROUPS, sequences)
        s0, s1 = _sequence_bounds(k_starts, task // GROUPS, sequences)
        key_grad = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
        value_grad = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
        for head_in_group in range(GROUP):
            head = group * GROUP + head_in_group
            for begin in range(0, T if HAS_SEVERAL_TILES else BLOCK_T, BLOCK_T):
                queries = _load(_row_pointer(q, row + begin, q_row, head, q_head), i, T - begin, d, WIDTH, q_row)
                out_grad = _load(
                    _row_pointer(grad, row + begin, grad_row, head, grad_head), i, T - begin, e, VALUE_WIDTH, grad_row
                )
                p = _weights(queries, keys, begin + i, s, S, scale, CAUSAL)
                value_grad += tl.dot(tl.trans(p.to(out_grad.dtype)), out_grad, input_precision="ieee")
                dp = tl.dot(out_grad, tl.trans(values), input_precision="ieee")
                ds = (p * scale * (dp - tl.sum(p * dp, 1)[:, None])).to(keys.dtype)
                query_grad = tl.dot(ds, keys, input_precision="ieee")
                _store(_row_pointer(dq, row + begin, dq_row, head, dq_head), query_grad, i, T - begin, d, WIDTH, dq_row)
                key_grad += tl.dot(tl.trans(ds), queries, input_precision="ieee")
        _store(_row_pointer(dk, key, dk_row, group, dk_head), key_grad, s, S, d, WIDTH, dk_row)
        _store(_row_pointer(dv, key, dv_row, group, dv_head), value_grad, s, S, e, VALUE_WIDTH, dv_row)
