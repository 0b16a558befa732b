"""Exact attention weights for scores that are dot products (CUDA, Triton), without storing the scores.

Plain twin: the blockwise loop in `regard.attention.exact_weights`. One kernel computes the log-sum-exp of each row, a
second one the weights. Computing the scores twice is faster than storing them, and the second kernel, whose tiles are
independent of each other, fills the GPU. There is no backward pass.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.triton_support import contiguous_rows, next_power_of_two, triton_available

MAX_WIDTH = 256
# Rows, keys and warps per tile: of the kernel for the log-sum-exp, of the one for the weights.
LSE_TILE, WEIGHTS_TILE = (32, 128, 4), (64, 128, 8)


def supports(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel runs on these inputs. It has no backward pass."""
    return (
        triton_available()
        and q.is_cuda
        and q.dtype == k.dtype
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.shape[-1] <= MAX_WIDTH
        and q.numel() > 0
        and k.numel() > 0
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    )


def exact_weights(
    q: Float[Tensor, "B H t D"],
    k: Float[Tensor, "B G S D"],
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    rows: Int[Tensor, "t"] | None = None,
    shift: int = 0,
    q_lengths: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B H t S"]:
    """softmax(scale · q kᵀ) under a causal mask, a sliding window and lengths of the keys.

    `rows` are the indices of the queries among all queries (None: 0 to t − 1); query i is at position i + `shift` on
    the axis of the keys. Queries with indices from `q_lengths` on are padding and get zeros.
    """
    from regard.kernels.triton import exact_weights_triton

    (B, H, T, D), S = q.shape, k.shape[2]
    q, k = (contiguous_rows(x) for x in (q, k))
    out = torch.empty(B, H, T, S, dtype=torch.float32, device=q.device)
    # The log-sum-exp of each row, in base 2.
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    lengths = None if lengths is None else lengths.to(q.device)
    tensors = (q, k, lse, *(out if x is None else x for x in (rows, lengths, q_lengths)))
    sizes = (scale, shift, T, S, *q.stride()[:3], *k.stride()[:3])
    constants = dict(
        HEADS=H, GROUP=H // k.shape[1], WIDTH=D, BLOCK_D=next_power_of_two(D, 16), CAUSAL=causal,
        WINDOW=window or 0, HAS_ROWS=rows is not None, HAS_LENGTHS=lengths is not None,
        HAS_Q_LENGTHS=q_lengths is not None,
    )  # fmt: skip
    t, s, warps = LSE_TILE
    exact_weights_triton.row_log_sum_exp[(-(-T // t), B * H)](
        *tensors, *sizes, **constants, BLOCK_T=t, BLOCK_S=s, num_warps=warps
    )
    t, s, warps = WEIGHTS_TILE
    exact_weights_triton.exact_weights[(-(-S // s), -(-T // t), B * H)](
        out, *tensors, *sizes, **constants, BLOCK_T=t, BLOCK_S=s, num_warps=warps
    )
    return out
