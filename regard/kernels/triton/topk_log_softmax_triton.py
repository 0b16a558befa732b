"""Triton source of `topk_log_softmax_cuda`: log-sum-exp and largest logits of a row in one pass over it.

A program reads its part of a row in blocks and keeps a sum of exponentials and the largest logit of each column of the
block. The k largest logits are in the k columns with the largest maxima, so only these are read again. Candidates are
ordered by keys of 64 bits: the logit, then the lower id first.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from regard.kernels.triton.sort_keys_triton import LOWEST_KEY, largest_keys, make_keys, split_keys

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
def topk_log_softmax(
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
def merge_parts(
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
