"""Top-k log-probabilities under constraints without writing a log-softmax (CUDA, Triton; inference only).

Reference: `reference_topk_log_softmax`. Nothing synchronizes with the host, and launches depend on shapes only, so
calls can be captured in a CUDA graph.

Log-sum-exp and largest logits take one pass over a row. A program reads its part of a row in blocks and keeps a sum of
exponentials and the largest logit of each column of the block. The k largest logits are in the k columns with the
largest maxima, so only these are read again. Candidates are ordered by keys of 64 bits: the logit, then the lower id
first.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.triton.sort_keys import LOWEST_KEY, largest_keys, make_keys, split_keys
from regard.kernels.triton.support import (
    contiguous_rows,
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_two,
    tl,
    triton,
    triton_available,
)

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
    topk_log_softmax_kernel[(R, splits)](
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
        merge_parts_kernel[(R,)](*row_arguments, part_max, part_sum, part_keys, V, num_warps=MERGE_WARPS, **shape)
    return log_p, ids


def reference_topk_log_softmax(
    logits: Float[Tensor, "R V"],
    k: int,
    *,
    banned: tuple[int, ...],
    eos: int,
    forced: Int[Tensor, "R"] | None = None,
    ban_eos: Tensor | None = None,
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """`topk_log_softmax` in torch operations, without synchronization; the order of equal logits is torch's.

    >>> reference_topk_log_softmax(torch.tensor([[1.0, 5.0, 0.0, 2.0]]), 2, banned=(1,), eos=2)[1]
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


LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Beyond every id; less than 2^31.
NO_ID = tl.constexpr(0x7FFFFFFE)


@triton.jit
def _without_banned(x, ids, banned_eos, BANNED: tl.constexpr):
    """−∞ for banned ids. `banned_eos` is an id or −1."""
    for i in tl.static_range(len(BANNED)):
        x = tl.where(ids == BANNED[i], -float("inf"), x)
    return tl.where(ids == banned_eos, -float("inf"), x)


@triton.jit
def _load_block(row, begin, end, BLOCK: tl.constexpr):
    ids = begin + tl.arange(0, BLOCK)
    return tl.load(row + ids, mask=ids < end, other=-float("inf"))


@triton.jit
def _store_result(
    log_p, ids, row, forced, lse, keys, result, V, HAS_FORCED: tl.constexpr, COUNT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Log-probabilities and ids of the largest keys, or of the forced token followed by −∞."""
    j = tl.arange(0, BLOCK_K)
    x, token = split_keys(keys)
    token = tl.where(token < V, token, 0)
    if HAS_FORCED:
        forced_id = tl.load(forced + result)
        if forced_id >= 0:
            forced_x = tl.load(row + forced_id).to(tl.float32)
            x = tl.where(j == 0, forced_x, -float("inf"))
            token = tl.where(j == 0, forced_id, token)
    value = tl.where(x == -float("inf"), x, x - lse)
    tl.store(log_p + result * COUNT + j, value, mask=j < COUNT)
    tl.store(ids + result * COUNT + j, token, mask=j < COUNT)


@triton.jit
def topk_log_softmax_kernel(
    logits, row_stride, log_p, ids, forced, ban_eos, part_max, part_sum, part_keys, V, part_len,
    EOS: tl.constexpr, BANNED: tl.constexpr, HAS_FORCED: tl.constexpr, HAS_BAN_EOS: tl.constexpr,
    SPLITS: tl.constexpr, COUNT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The result of a row; with SPLITS > 1, the partial result of `part_len` logits for `merge_parts`.

    ROUNDS: blocks per part, rounded up to a power of two.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    result, split = tl.program_id(0), tl.program_id(1)
    row = logits + result.to(tl.int64) * row_stride
    begin = split * part_len
    end = tl.minimum(begin + part_len, V)
    banned_eos = -1
    if HAS_BAN_EOS:
        banned_eos = tl.where(tl.load(ban_eos + result) != 0, EOS, -1)
    column = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = tl.where(begin + column < end, begin + column, NO_ID)
    next_block = _load_block(row, begin, end, BLOCK)
    for start in range(begin, end, BLOCK):
        x = next_block.to(tl.float32)
        # Prefetch the next logits while these are processed.
        next_block = _load_block(row, start + BLOCK, end, BLOCK)
        token = start + column
        # One of the two exponentials of the online softmax is always 1.
        decay = tl.exp2(-tl.abs(x - top) * LOG2E)
        total = tl.where(x > top, total * decay + 1.0, total + decay)
        top = tl.maximum(top, x)
        has_banned = (banned_eos >= start) & (banned_eos < start + BLOCK)
        for i in tl.static_range(len(BANNED)):
            has_banned = has_banned | ((BANNED[i] >= start) & (BANNED[i] < start + BLOCK))
        if has_banned:
            x = _without_banned(x, token, banned_eos, BANNED)
        is_better = (x > best) | ((x != x) & (best == best))
        best = tl.where(is_better, x, best)
        best_id = tl.where(is_better, token, best_id)
    largest = largest_keys(make_keys(best, best_id), COUNT, BLOCK_K)
    if (ROUNDS > 1) & (COUNT > 1):
        _, token = split_keys(largest)
        # The columns of the block that these are in: all their logits.
        is_column = (tl.arange(0, BLOCK_K) < COUNT) & (token < end)
        candidates = begin + (token - begin)[:, None] % BLOCK + tl.arange(0, ROUNDS)[None, :] * BLOCK
        is_candidate = is_column[:, None] & (candidates < end)
        x = tl.load(row + candidates, mask=is_candidate, other=-float("inf")).to(tl.float32)
        x = _without_banned(x, candidates, banned_eos, BANNED)
        keys = tl.where(is_candidate, make_keys(x, candidates), LOWEST_KEY)
        largest = largest_keys(tl.reshape(keys, (BLOCK_K * ROUNDS,)), COUNT, BLOCK_K)
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    # tl.max ignores NaN, the sum does not.
    if SPLITS == 1:
        lse = row_top + tl.log2(row_total) / LOG2E
        _store_result(log_p, ids, row, forced, lse, largest, result, V, HAS_FORCED, COUNT, BLOCK_K)
    else:
        part = result * SPLITS + split
        tl.store(part_max + part, row_top)
        tl.store(part_sum + part, row_total)
        tl.store(part_keys + part * BLOCK_K + tl.arange(0, BLOCK_K), largest)


@triton.jit
def merge_parts_kernel(
    logits, row_stride, log_p, ids, forced, part_max, part_sum, part_keys, V,
    HAS_FORCED: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The result of a row from those of its parts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    result = tl.program_id(0)
    row = logits + result.to(tl.int64) * row_stride
    part = result * SPLITS + tl.arange(0, SPLITS)
    keys = tl.load(part_keys + result * SPLITS * BLOCK_K + tl.arange(0, SPLITS * BLOCK_K))
    top, total = tl.load(part_max + part), tl.load(part_sum + part)
    row_top = tl.max(top, 0)
    lse = row_top + tl.log2(tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)) / LOG2E
    largest = largest_keys(keys, COUNT, BLOCK_K)
    _store_result(log_p, ids, row, forced, lse, largest, result, V, HAS_FORCED, COUNT, BLOCK_K)
