"""Short sequences, each in a tile of about its own length: packed ones of up to 128 tokens, others of 16 to 64.

CUDA, bf16 or f16, in Triton.

torch's variable-length attention has tiles of 128 rows; sentences of 10 to 100 tokens leave most of them empty. Nothing
here waits for the device, and compilers see one operator, so it can be compiled and captured in a graph.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import triton_here
from regard.attention.kernels import Call, varlen
from regard.attention.offsets import Offsets
from regard.attention.triton_here import contiguous_rows, operator, power_of_two

MAX_LEN = 128
# The least side of a tile that matrix units take.
FEWEST = 16
# Tokens of sequences of one length, (B, H, T, D): longer ones fill the tiles of torch's own kernels.
LEAST_SAME, MOST_SAME = 16, 64
# Numbers in a tile of keys: with more, the shared memory of a desktop's GPU is too small for the backward pass.
MAX_CELLS = 128 * 64


class Tiling(NamedTuple):
    """Queries at a time (all keys are there at once), warps of a program, and registers of a thread."""

    rows: int
    warps: int
    registers: int


# By the numbers in a tile of keys, at most. Registers are so few that a handful is spilled at most: the more programs a
# processor holds, the more of them compute while others wait for memory.
FORWARD = {1024: Tiling(16, 1, 80), 2048: Tiling(32, 1, 168), 4096: Tiling(64, 4, 96), MAX_CELLS: Tiling(64, 4, 168)}
BACKWARD = {1024: Tiling(16, 1, 128), 2048: Tiling(32, 1, 255), 4096: Tiling(64, 4, 168), MAX_CELLS: Tiling(32, 8, 128)}
REGISTERS = 2**14  # of each of the four parts of a processor, which share out a program's warps


def takes(call: Call) -> bool:
    if not (call.q.is_cuda and triton_here.FOUND):
        return False
    if call.q_offsets is None or call.k_offsets is None:
        max_q, max_k = call.q.shape[2], call.k.shape[2]
        placed = LEAST_SAME <= max_q <= MOST_SAME and LEAST_SAME <= max_k <= MOST_SAME and _side_by_side(call)
    else:
        max_q, max_k = call.q_offsets.max_len, call.k_offsets.max_len
        placed = max(max_q, max_k) <= MAX_LEN
    return (
        placed
        and varlen.suits(call)
        and call.form.window is None
        and max_k * power_of_two(max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1]), FEWEST) <= MAX_CELLS
    )


def _side_by_side(call: Call) -> bool:
    """Whether heads of a token lie side by side, as in layers: then laying sequences end to end moves nothing."""
    q, k, v = call.q, call.k, call.v
    return (
        all(x.stride(0) == x.shape[2] * x.stride(2) for x in (q, k, v))
        and (q.shape[2] == k.shape[2] or not call.form.causal)
        and not call.unpacked
    )


def _end_to_end(call: Call) -> Call:
    """(B, H, T, D) as packed sequences."""
    sides = [x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v)]
    offsets = [_alike(x) for x in (call.q, call.k)]
    if call.q.shape[2] == call.k.shape[2]:
        offsets[1] = offsets[0]
    return call._replace(q=sides[0], k=sides[1], v=sides[2], q_offsets=offsets[0], k_offsets=offsets[1])


def _alike(x: Float[Tensor, "B H T D"]) -> Offsets:
    B, T = x.shape[0], x.shape[2]
    return Offsets(torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=x.device), total=B * T, max_len=T)


def run(call: Call) -> Float[Tensor, "..."]:
    if call.q_offsets is None:
        return run(_end_to_end(call)).unflatten(0, (call.q.shape[0], -1)).transpose(1, 2)
    q_offsets, k_offsets = call.q_offsets, call.k_offsets
    assert q_offsets is not None
    assert k_offsets is not None
    q, k, v, scale = varlen.folded(call)
    if k.shape[1] != v.shape[1]:  # Location makes a key for each head of q, whatever the heads of k
        v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
    starts = q_offsets.starts.int(), k_offsets.starts.int()
    bounds = q_offsets.max_len, k_offsets.max_len
    return attend_sentences(*(contiguous_rows(x) for x in (q, k, v)), *starts, *bounds, scale, call.form.causal)


@operator("regard::attend_sentences")
def attend_sentences(
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
    from regard.attention.kernels import sentences_triton

    out = torch.empty_strided(*_packed_rows(q, v.shape[-1]), dtype=v.dtype, device=v.device)
    sequences, tiling = len(q_starts) - 1, _tiling(q, v, max_k, FORWARD)
    sentences_triton.sentences_forward[(_programs(q, sequences * q.shape[1], tiling),)](
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


@operator("regard::attend_sentences_backward")
def attend_sentences_backward(
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
    """The gradients by q, k and v."""
    from regard.attention.kernels import sentences_triton

    grad = contiguous_rows(grad)
    grads = _empty_grads(q, k, v)
    sequences, tiling = len(q_starts) - 1, _tiling(q, v, max_k, BACKWARD)
    sentences_triton.sentences_backward[(_programs(q, sequences * k.shape[1], tiling),)](
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


@attend_sentences.register_fake
def _(q, k, v, q_starts, k_starts, max_q, max_k, scale, causal):
    return torch.empty_strided(*_packed_rows(q, v.shape[-1]), dtype=v.dtype, device=v.device)


@attend_sentences_backward.register_fake
def _(grad, q, k, v, q_starts, k_starts, max_q, max_k, scale, causal):
    return _empty_grads(q, k, v)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _flow_back(ctx, grad: Tensor):
    grads = attend_sentences_backward(grad, *ctx.saved_tensors, ctx.max_q, ctx.max_k, ctx.scale, ctx.causal)
    return *grads, None, None, None, None, None, None


attend_sentences.register_autograd(_flow_back, setup_context=_keep)


def _packed_rows(x: Tensor, width: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shape and strides of a fresh tensor with as many rows and heads as x."""
    return (x.shape[0], x.shape[1], width), (x.shape[1] * width, width, 1)


def _empty_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_strided(*_packed_rows(x, x.shape[-1]), dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _tiling(q: Tensor, v: Tensor, max_k: int, tilings: dict[int, Tiling]) -> Tiling:
    width = max(q.shape[-1], v.shape[-1], 64)  # with narrow heads, scores take the room
    cells = power_of_two(max_k, FEWEST) * power_of_two(width, FEWEST)
    return next((tiling for most, tiling in tilings.items() if cells <= most), tilings[MAX_CELLS])


def _programs(x: Tensor, pieces: int, tiling: Tiling) -> int:
    """As many as run at once: each goes from piece to piece. A program for each piece would be slower, since batches of
    a constant shape have thousands of empty sequences."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    at_once = 4 * (REGISTERS // (32 * tiling.registers)) // tiling.warps
    return max(1, min(pieces, processors * at_once))


def _blocks(q: Tensor, v: Tensor, max_q: int, max_k: int, tiling: Tiling) -> dict[str, int]:
    """The sizes of tiles, and what a program has."""
    sizes = dict(BLOCK_T=min(max_q, tiling.rows), BLOCK_S=max_k, BLOCK_D=q.shape[-1], BLOCK_V=v.shape[-1])
    blocks = {name: power_of_two(size, FEWEST) for name, size in sizes.items()} | {"SEVERAL": max_q > tiling.rows}
    return blocks | {"num_warps": tiling.warps, "num_stages": 1, "maxnreg": tiling.registers}
