"""Bookkeeping of a step of beam search and of greedy decoding in one launch (CUDA, Triton).

References: `BeamSearch.keep_best` and `StepwiseSearch.append` of `regard.decode.search`, which launch dozens of small
kernels. Nothing synchronizes with the host, and launches depend on shapes only, so calls can be captured in a CUDA
graph. B slots, K hypotheses per slot, N finished hypotheses per slot, T steps, S cache positions.

One program handles one slot, with all candidates in registers.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.kernels.triton.sort_keys import LOWEST_KEY, largest_keys, make_keys, split_keys
from regard.kernels.triton.support import (
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_two,
    tl,
    triton,
    triton_available,
)

MAX_BEAM, MAX_CANDIDATES = 32, 1024
# Cache positions whose ancestors are copied at once; slots per program of `greedy_update`.
BLOCK_S, BLOCK_B = 64, 32


def supports(log_prob: Tensor, hypotheses: int, candidates: int) -> bool:
    """Whether the kernels run on the device of a tensor, for this many hypotheses with this many candidates each."""
    is_small = hypotheses <= MAX_BEAM and hypotheses * candidates <= MAX_CANDIDATES
    return triton_available() and log_prob.is_cuda and is_small


def beam_update(
    top: Float[Tensor, "B K C"],
    ids: Int[Tensor, "B K C"],
    positions: Int[Tensor, "B"],
    last_step: Int[Tensor, "B"],
    *,
    last: Int[Tensor, "B K"],
    step: Int[Tensor, "B"],
    done: Bool[Tensor, "B"],
    log_prob: Float[Tensor, "B K"],
    ancestors: Int[Tensor, "B K S"],
    tokens: Int[Tensor, "B T K"],
    parents: Int[Tensor, "B T K"],
    token_log_p: Float[Tensor, "B T K"],
    finished_score: Float[Tensor, "B N"],
    finished_log_prob: Float[Tensor, "B N"],
    finished_step: Int[Tensor, "B N"],
    finished_parent: Int[Tensor, "B N"],
    end_token: Int[Tensor, "B N"],
    end_log_p: Float[Tensor, "B N"],
    finished_count: Int[Tensor, "B"],
    eos: int,
    length_penalty: float,
    enough: float,
    early_stopping: bool = True,
) -> Int[Tensor, "B K"]:
    """Update the state of a beam search in place from the best C tokens of each beam; returns the parents of new beams.

    `top` are log-probabilities, best first. `positions` are the cache positions of the last tokens; ancestors beyond
    the next position are not updated. At `last_step` the first K candidates are finished, whatever their tokens. A
    search stops after `enough` finished hypotheses; without `early_stopping`, the best unfinished one is judged at its
    current length. Of equal candidates the first is kept. All tensors are contiguous; integers are int64 except
    `ancestors`, which are int32.
    """
    B, K, C = top.shape
    N = finished_score.shape[1]
    new_parents = torch.empty_like(last)
    beam_update_kernel[(B,)](
        *(top, ids, positions, last_step, last, step, done, log_prob, ancestors, tokens, parents, token_log_p),
        *(finished_score, finished_log_prob, finished_step, finished_parent, end_token, end_log_p, finished_count),
        new_parents,
        *(tokens.shape[1], ancestors.shape[2]),
        K=K,
        C=C,
        N=N,
        EOS=eos,
        PENALTY=length_penalty,
        ENOUGH=min(enough, 2.0**30),
        EARLY_STOPPING=early_stopping,
        BLOCK_K=next_power_of_two(K),
        BLOCK_C=next_power_of_two(K * C),
        BLOCK_B=next_power_of_two(min(2 * K, K * C)),
        BLOCK_N=next_power_of_two(N),
        BLOCK_S=BLOCK_S,
        num_warps=1,
        **dependent_launch(top),
    )
    return new_parents


def greedy_update(
    token: Int[Tensor, "B K"],
    log_p: Float[Tensor, "B K"],
    *,
    step: Int[Tensor, "B"],
    done: Bool[Tensor, "B"],
    live: Bool[Tensor, "B K"],
    last: Int[Tensor, "B K"],
    tokens: Int[Tensor, "B T K"],
    token_log_p: Float[Tensor, "B T K"],
    lengths: Int[Tensor, "B K"],
    eos: int,
) -> None:
    """Append a token to each of K independent hypotheses per slot, in place. All tensors are contiguous."""
    B, K = token.shape
    greedy_update_kernel[(-(-B // BLOCK_B),)](
        *(token, log_p, step, done, live, last, tokens, token_log_p, lengths, B, tokens.shape[1]),
        K=K,
        EOS=eos,
        BLOCK_B=BLOCK_B,
        BLOCK_K=next_power_of_two(K),
        num_warps=1,
        **dependent_launch(token),
    )


@triton.jit
def _take(x, index, BLOCK: tl.constexpr):
    """x[index] of a tensor of BLOCK elements; 0 for an index out of range."""
    is_element = index[:, None] == tl.arange(0, BLOCK)[None, :]
    return tl.sum(tl.where(is_element, x[None, :], tl.zeros_like(x)[None, :]), 1)


@triton.jit
def _length_factor(length, PENALTY: tl.constexpr):
    """length ** PENALTY, exact for penalties of 0 and 1."""
    length = length.to(tl.float32)
    if PENALTY == 0.0:
        factor = length * 0.0 + 1.0
    elif PENALTY == 1.0:
        factor = length
    else:
        factor = tl.exp2(tl.log2(length) * PENALTY)
    return factor


@triton.jit
def beam_update_kernel(
    top, ids, positions, last_step, last, step, done, log_prob, ancestors, tokens, parents, token_log_p,
    finished_score, finished_log_prob, finished_step, finished_parent, end_token, end_log_p, finished_count,
    new_parents, capacity, S,
    K: tl.constexpr, C: tl.constexpr, N: tl.constexpr, EOS: tl.constexpr, PENALTY: tl.constexpr, ENOUGH: tl.constexpr,
    EARLY_STOPPING: tl.constexpr,
    PDL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """K beams with C candidates each, of which the best 2K (BLOCK_B: padded) matter; N finished hypotheses."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(0)
    k, j, n, c = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    now, is_active = tl.load(step + slot), tl.load(done + slot) == 0
    position = tl.load(positions + slot).to(tl.int32)

    # The best 2K candidates.
    COUNT: tl.constexpr = min(2 * K, K * C)
    candidates = slot * K * C + c
    total = tl.load(top + candidates, mask=c < K * C, other=0.0)
    total += tl.load(log_prob + slot * K + c // C, mask=c < K * C, other=0.0)
    best, index = split_keys(largest_keys(tl.where(c < K * C, make_keys(total, c), LOWEST_KEY), COUNT, BLOCK_B))
    is_candidate = j < COUNT
    index = tl.where(is_candidate, index, 0)
    parent = index // C
    token = tl.load(ids + slot * K * C + index).to(tl.int64)
    log_p = tl.load(top + slot * K * C + index)
    max_step = tl.load(last_step + slot)
    is_last = now >= max_step
    ends = token == EOS

    # Those that end among the first K, all of them at the last step, join the N best finished hypotheses.
    finishes = (ends | is_last) & is_active & (j < K) & is_candidate
    score = tl.where(finishes, best / _length_factor(now + 1, PENALTY), -float("inf"))
    stored = slot * N + n
    old_score = tl.load(finished_score + stored, mask=n < N, other=0.0)
    old_keys = tl.where(n < N, make_keys(old_score, n), LOWEST_KEY)
    new_keys = tl.where(is_candidate, make_keys(score, N + j), LOWEST_KEY)
    kept = tl.full((BLOCK_N,), LOWEST_KEY, tl.int64)
    for i in tl.static_range(N):
        largest = tl.maximum(tl.max(old_keys, 0), tl.max(new_keys, 0))
        kept = tl.where(n == i, largest, kept)
        old_keys = tl.where(old_keys == largest, LOWEST_KEY, old_keys)
        new_keys = tl.where(new_keys == largest, LOWEST_KEY, new_keys)
    kept_score, order = split_keys(kept)
    is_old, is_stored = order < N, n < N
    old = slot * N + order
    old_log_prob = tl.load(finished_log_prob + old, mask=is_stored & is_old, other=0.0)
    old_step = tl.load(finished_step + old, mask=is_stored & is_old, other=0)
    old_parent = tl.load(finished_parent + old, mask=is_stored & is_old, other=0)
    old_token = tl.load(end_token + old, mask=is_stored & is_old, other=0)
    old_log_p = tl.load(end_log_p + old, mask=is_stored & is_old, other=0.0)
    tl.debug_barrier()  # all threads have read these before any of them overwrites one
    tl.store(finished_score + stored, kept_score, mask=is_stored)
    tl.store(
        finished_log_prob + stored, tl.where(is_old, old_log_prob, _take(best, order - N, BLOCK_B)), mask=is_stored
    )
    tl.store(finished_step + stored, tl.where(is_old, old_step, now), mask=is_stored)
    tl.store(finished_parent + stored, tl.where(is_old, old_parent, _take(parent, order - N, BLOCK_B)), mask=is_stored)
    tl.store(end_token + stored, tl.where(is_old, old_token, _take(token, order - N, BLOCK_B)), mask=is_stored)
    tl.store(end_log_p + stored, tl.where(is_old, old_log_p, _take(log_p, order - N, BLOCK_B)), mask=is_stored)
    count = tl.load(finished_count + slot) + tl.sum((score > -float("inf")).to(tl.int64), 0)
    tl.store(finished_count + slot, count)

    # The K best others continue.
    keys = tl.where(is_candidate, make_keys(tl.where(ends, -float("inf"), best), j), LOWEST_KEY)
    continuing, chosen = split_keys(largest_keys(keys, K, BLOCK_K))
    is_beam = k < K
    new_parent = _take(parent, chosen, BLOCK_B)
    new_token = _take(token, chosen, BLOCK_B)
    row = slot * K + k
    new_token = tl.where(is_active, new_token, tl.load(last + row, mask=is_beam, other=0))
    tl.store(last + row, new_token, mask=is_beam)
    tl.store(log_prob + row, continuing, mask=is_beam)
    tl.store(new_parents + row, new_parent.to(tl.int64), mask=is_beam)
    history = (slot.to(tl.int64) * capacity + tl.minimum(now, capacity - 1)) * K + k
    tl.store(tokens + history, new_token, mask=is_beam)
    tl.store(parents + history, new_parent.to(tl.int64), mask=is_beam)
    tl.store(token_log_p + history, _take(log_p, chosen, BLOCK_B), mask=is_beam)

    # Ancestors up to the position of the last token are those of the parent; the next column is the beam's own.
    table = ancestors + slot.to(tl.int64) * K * S
    after = tl.minimum(position + 1, S - 1)
    for begin in range(0, after, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        in_bounds = is_beam[:, None] & (s < after)[None, :]
        columns = tl.load(table + new_parent[:, None] * S + s[None, :], mask=in_bounds, other=0)
        tl.debug_barrier()
        tl.store(table + k[:, None] * S + s[None, :], columns, mask=in_bounds)
    tl.store(table + k * S + after, k, mask=is_beam)

    bound = tl.max(tl.where(k == 0, continuing, -float("inf")), 0)
    bound = bound / _length_factor((max_step if EARLY_STOPPING else now) + 1, PENALTY)
    worst = tl.max(tl.where(n == N - 1, kept_score, -float("inf")), 0)
    is_done = (worst >= bound) | (count >= ENOUGH) | is_last | (is_active == 0)
    tl.store(done + slot, is_done)
    tl.store(step + slot, now + is_active.to(tl.int64))


@triton.jit
def greedy_update_kernel(
    token, log_p, step, done, live, last, tokens, token_log_p, lengths, slots, capacity,
    K: tl.constexpr, EOS: tl.constexpr, PDL: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_B slots with K independent hypotheses each."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot, k = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
    is_slot = slot < slots
    in_bounds = is_slot[:, None] & (k < K)[None, :]
    row = slot[:, None] * K + k[None, :]
    chosen = tl.load(token + row, mask=in_bounds, other=0)
    value = tl.load(log_p + row, mask=in_bounds, other=0.0)
    now = tl.load(step + slot, mask=is_slot, other=0)
    is_active = tl.load(done + slot, mask=is_slot, other=1) == 0
    # −∞: no token is allowed, and the output ends without <eos>.
    is_live = (tl.load(live + row, mask=in_bounds, other=0) != 0) & (value != -float("inf"))
    history = (slot.to(tl.int64) * capacity + tl.minimum(now, capacity - 1))[:, None] * K + k[None, :]
    tl.store(tokens + history, chosen, mask=in_bounds)
    tl.store(token_log_p + history, value, mask=in_bounds)
    count = tl.load(lengths + row, mask=in_bounds, other=0) + is_live.to(tl.int64)
    tl.store(lengths + row, count, mask=in_bounds)
    is_live = is_live & (chosen != EOS)
    tl.store(live + row, is_live, mask=in_bounds)
    tl.store(last + row, chosen, mask=in_bounds)
    tl.store(step + slot, now + is_active.to(tl.int64), mask=is_slot)
    tl.store(done + slot, tl.max((is_live & in_bounds).to(tl.int32), 1) == 0, mask=is_slot)
