"""Top-k log-probabilities under constraints without writing a log-softmax (CUDA, Triton; inference only).

Plain twin: `plain_topk_log_softmax`. Nothing synchronizes with the host, and launches depend on shapes only, so calls
can be captured in a CUDA graph.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.triton_support import contiguous_rows, dependent_launch, next_power_of_two, triton_available

MAX_K = 16
# Logits per block, warps per program, and per program that merges parts.
BLOCK, WARPS, MERGE_WARPS = 1024, 4, 1
# Fewer rows than MIN_ROWS are split into parts, up to MAX_SPLITS, until there are MIN_PROGRAMS programs.
MIN_ROWS, MIN_PROGRAMS, MAX_SPLITS = 256, 512, 32
# Up to this many rows, blocks have twice as many logits: there are too few programs to hide the latency of loads.
MAX_WIDE_ROWS = 1024


def supports(logits: Tensor, k: int) -> bool:
    """Whether the kernel runs on these logits."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return triton_available() and logits.is_cuda and logits.dtype in dtypes and k <= min(MAX_K, logits.shape[-1])


def topk_log_softmax(
    logits: Float[Tensor, "R V"],
    k: int,
    *,
    banned: tuple[int, ...],
    eos: int,
    forced: Int[Tensor, "R"] | None = None,
    ban_eos: Tensor | None = None,
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """The k largest log-probabilities of each row in descending order (float32), and their ids (int64).

    The softmax is over all logits. Afterwards `banned` tokens, and `eos` in rows where `ban_eos` (R, bool or uint8) is
    not 0, have a log-probability of −∞. In rows with forced[r] ≥ 0, all other tokens have −∞, and the forced token
    keeps its log-probability even if it is banned. Of equal logits the lower id is first. Ids of entries with −∞ are
    arbitrary valid ids. NaN among the logits of a row makes its finite results NaN.
    """
    from regard.kernels.triton import topk_log_softmax_triton

    logits = contiguous_rows(logits)
    R, V = logits.shape
    splits = _splits(R, V)
    part_len = -(-V // (16 * splits)) * 16  # aligned, so that loads are vectorized
    is_wide = splits == 1 and R <= MAX_WIDE_ROWS
    block = min(2 * BLOCK if is_wide else BLOCK, next_power_of_two(part_len))
    block_k = next_power_of_two(k)
    log_p = torch.empty(R, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(R, k, dtype=torch.int64, device=logits.device)
    parts = R * splits if splits > 1 else 0
    part_max, part_sum = torch.empty(2, parts, dtype=torch.float32, device=logits.device)
    part_keys = torch.empty(parts * block_k, dtype=torch.int64, device=logits.device)
    shape = {"HAS_FORCED": forced is not None, "SPLITS": splits, "COUNT": k, "BLOCK_K": block_k}
    shape |= dependent_launch(logits)
    row_arguments = logits, logits.stride(0), log_p, ids, forced
    topk_log_softmax_triton.topk_log_softmax[(R, splits)](
        *(*row_arguments, ban_eos, part_max, part_sum, part_keys, V, part_len),
        EOS=eos,
        BANNED=banned,
        HAS_BAN_EOS=ban_eos is not None,
        BLOCK=block,
        ROUNDS=next_power_of_two(-(-part_len // block)),
        num_warps=WARPS,
        **shape,
    )
    if splits > 1:
        topk_log_softmax_triton.merge_parts[(R,)](
            *row_arguments, part_max, part_sum, part_keys, V, num_warps=MERGE_WARPS, **shape
        )
    return log_p, ids


def plain_topk_log_softmax(
    logits: Float[Tensor, "R V"],
    k: int,
    *,
    banned: tuple[int, ...],
    eos: int,
    forced: Int[Tensor, "R"] | None = None,
    ban_eos: Tensor | None = None,
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """`topk_log_softmax` in torch operations, without synchronization; the order of equal logits is torch's.

    >>> plain_topk_log_softmax(torch.tensor([[1.0, 5.0, 0.0, 2.0]]), 2, banned=(1,), eos=2)[1]
    tensor([[3, 0]])
    """
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    log_p = torch.where(logits == -torch.inf, -torch.inf, log_p)
    allowed = log_p.clone()
    for token in banned:
        allowed[:, token] = -torch.inf
    if ban_eos is not None:
        allowed[:, eos] = torch.where(ban_eos != 0, -torch.inf, allowed[:, eos])
    if forced is not None:
        is_forced = forced[:, None] == torch.arange(logits.shape[1], device=logits.device)
        allowed = torch.where(forced[:, None] < 0, allowed, torch.where(is_forced, log_p, -torch.inf))
    top, ids = allowed.topk(k, dim=-1)
    return top, ids


def _splits(rows: int, columns: int) -> int:
    """Number of parts of a row: a power of two."""
    if rows >= MIN_ROWS:
        return 1
    blocks = next_power_of_two(-(-columns // BLOCK))
    return min(MAX_SPLITS, blocks, next_power_of_two(-(-MIN_PROGRAMS // rows)))
