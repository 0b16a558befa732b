"""Attention of one new token per hypothesis over static caches (CUDA, Triton; inference only).

References: `reference_decode_attention` and `reference_decode_cross_attention`. Nothing synchronizes with the host, and
launches depend on shapes only, so calls can be captured in a CUDA graph. Beam search never copies a cache: the key of
position s of a hypothesis stays in the column of the hypothesis that wrote it, and `ancestors` says which that is.

B slots (sentences), K hypotheses per slot, R = B·K rows, H query heads, G key heads, D channels per head, S positions
of the cache, M positions of the source.

A program handles all hypotheses of one slot and one head of keys. The keys of a slot are one contiguous run of
(position, hypothesis) rows. Each is read once and scored against the queries of all hypotheses; a mask of ancestors
selects those that belong to a query's own history ("tree attention"). One query per program (greedy decoding without
grouped heads) uses no matrix units: each row of the tile has a running maximum and sum of its own, so the loop contains
no reduction over keys.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

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

MAX_WIDTH = 256
MAX_QUERIES = 64
# The smallest side of a tile that matrix units support.
MIN_BLOCK = 16
# Caches with at least SPLIT_LEN positions are attended in parts until there are SPLIT_PROGRAMS programs.
SPLIT_LEN, SPLIT_PROGRAMS, MAX_SPLITS = 512, 264, 8
# One warp per program, if there are at least MANY_PROGRAMS of them or at most SHORT_LEN positions.
MANY_PROGRAMS, SHORT_LEN = 1024, 32


def supports(q: Tensor, k: Tensor, hypotheses: int, heads: int) -> bool:
    """Whether the kernels run on queries (or qkv) q and keys k (B, G, …, D)."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return (
        triton_available()
        and q.is_cuda
        and q.dtype in dtypes
        and k.dtype in dtypes
        and k.shape[-1] <= MAX_WIDTH
        and heads % k.shape[1] == 0
        and hypotheses * heads // k.shape[1] <= MAX_QUERIES
        and k[0, 0].is_contiguous()
    )


def decode_attention(
    qkv: Float[Tensor, "R C"],
    k_cache: Float[Tensor, "B G S K D"],
    v_cache: Float[Tensor, "B G S K D"],
    ancestors: Int[Tensor, "B K S"] | None,
    positions: Int[Tensor, "B"],
    *,
    heads: int,
    scale: float,
    bias: Float[Tensor, "H S"] | None = None,
    rotary: Float[Tensor, "S D"] | None = None,
) -> Float[Tensor, "R HD"]:
    """Self-attention of the token at `positions` over the cache, after its key and value are stored there.

    Row b·K + k of `qkv` has the query, key and value of hypothesis k of slot b: C = (H + 2G)·D. Position s of that
    hypothesis is in column `ancestors[b, k, s]` of the cache; its own column is k. `ancestors` is None if K is 1.
    `bias[h, distance]` is added to scaled scores. Row s of `rotary` has the cosines and sines of position s; queries
    and new keys are rotated by them. Slots with a negative position are empty: their caches stay unchanged and their
    outputs are zeros. Columns before the position must be finite even where no hypothesis refers to them.
    """
    qkv = contiguous_rows(qkv)
    B, G, S, K, D = k_cache.shape
    group = heads // G
    assert v_cache.stride() == k_cache.stride(), "caches of keys and values must have the same strides"
    out = qkv.new_empty(len(qkv), heads * D)
    splits = _splits(B * G, S)
    partial_max, partial_sum = qkv.new_empty(2, len(qkv) * heads * splits if splits > 1 else 0, dtype=torch.float32)
    partial_out = partial_max.new_empty(len(partial_max), D)
    decode_attention_kernel[(B * G, splits)](
        *(qkv, k_cache, v_cache, ancestors, positions, bias, rotary, out, partial_max, partial_sum, partial_out),
        *(scale, qkv.stride(0), k_cache.stride(0), k_cache.stride(1), S),
        SPLITS=splits,
        K=K,
        GROUPS=G,
        GROUP=group,
        D=D,
        HAS_BIAS=bias is not None,
        HAS_ROTARY=rotary is not None,
        **dependent_launch(qkv),
        **_blocks(B * G, K * group, S, D),
    )
    if splits > 1:
        merge_splits_kernel[(len(qkv) * heads,)](
            *(partial_max, partial_sum, partial_out, out),
            SPLITS=splits,
            D=D,
            BLOCK_D=next_power_of_two(D, MIN_BLOCK),
            num_warps=2,
            **dependent_launch(qkv),
        )
    return out


def decode_cross_attention(
    q: Float[Tensor, "R HD"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    lengths: Int[Tensor, "B"],
    *,
    heads: int,
    scale: float,
) -> Float[Tensor, "R HD"]:
    """Attention of every hypothesis over the first `lengths` positions of its source; zeros where that is 0."""
    q = contiguous_rows(q)
    B, G, M, D = k.shape
    K, group = len(q) // B, heads // G
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode_cross_attention_kernel[(B * G,)](
        *(q, k, v, lengths, out, scale, q.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        K=K,
        GROUPS=G,
        GROUP=group,
        D=D,
        **dependent_launch(q),
        **_blocks(B * G, K * group, M, D),
    )
    return out


def reference_decode_attention(
    qkv: Float[Tensor, "R C"],
    k_cache: Float[Tensor, "B G S K D"],
    v_cache: Float[Tensor, "B G S K D"],
    ancestors: Int[Tensor, "B K S"] | None,
    positions: Int[Tensor, "B"],
    *,
    heads: int,
    scale: float,
    bias: Float[Tensor, "H S"] | None = None,
    rotary: Float[Tensor, "S D"] | None = None,
) -> Float[Tensor, "R HD"]:
    """`decode_attention` in torch operations, without synchronization."""
    B, G, S, K, D = k_cache.shape
    is_used = positions >= 0
    at = positions.clamp(min=0).long()
    q, k, v = qkv.view(B, K, heads + 2 * G, D).split((heads, G, G), dim=2)
    if rotary is not None:
        cos, sin = rotary[at].to(qkv.dtype)[:, None, None, :].chunk(2, dim=-1)
        q, k = (_rotate(x, cos, sin) for x in (q, k))
    slots = torch.arange(B, device=qkv.device)
    for cache, new in ((k_cache, k), (v_cache, v)):  # (B, K, G, D) at (b, g, positions[b])
        new = new.transpose(1, 2).to(cache.dtype)
        cache[slots, :, at] = torch.where(is_used[:, None, None, None], new, cache[slots, :, at])
    keys, values = k_cache.transpose(2, 3), v_cache.transpose(2, 3)  # (B, G, K, S, D)
    if ancestors is not None:
        s = torch.arange(S, device=qkv.device)
        own = torch.arange(K, device=qkv.device)[:, None]
        columns = torch.where(s == at[:, None, None], own, ancestors.long()).clamp(0, K - 1)
        columns = columns[:, None, :, :, None].expand(B, G, K, S, D)
        keys, values = keys.gather(2, columns), values.gather(2, columns)
    distance = at[:, None] - torch.arange(S, device=qkv.device)  # (B, S)
    scores = torch.einsum("bkghd,bgksd->bghks", q.unflatten(2, (G, -1)).to(keys.dtype), keys).float() * scale
    if bias is not None:
        scores += bias[:, distance.clamp(min=0)].transpose(0, 1).unflatten(1, (G, -1))[:, :, :, None]
    scores = scores.masked_fill((distance < 0)[:, None, None, None], -torch.inf)
    # Where nothing was stored yet, a cache may contain anything, even NaN.
    values = values.masked_fill((distance < 0)[:, None, None, :, None], 0.0)
    out = torch.einsum("bghks,bgksd->bkghd", scores.softmax(-1).to(values.dtype), values)
    return torch.where(is_used[:, None], out.reshape(B, -1), 0.0).view(B * K, heads * D).to(qkv.dtype)


def reference_decode_cross_attention(
    q: Float[Tensor, "R HD"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    lengths: Int[Tensor, "B"],
    *,
    heads: int,
    scale: float,
) -> Float[Tensor, "R HD"]:
    """`decode_cross_attention` in torch operations, without synchronization."""
    B, G, M, D = k.shape
    queries = q.view(B, -1, G, heads // G, D).to(k.dtype)
    is_padding = torch.arange(M, device=q.device) >= lengths[:, None]
    scores = torch.einsum("bkghd,bgmd->bghkm", queries, k).float() * scale
    scores = scores.masked_fill(is_padding[:, None, None, None], -torch.inf)
    p = scores.softmax(-1).masked_fill(is_padding[:, None, None, None], 0.0)
    values = v.masked_fill(is_padding[:, None, :, None], 0.0)
    return torch.einsum("bghkm,bgmd->bkghd", p.to(v.dtype), values).reshape(q.shape).to(q.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _splits(programs: int, positions: int) -> int:
    """Number of parts of the keys of a slot: a power of two."""
    if positions < SPLIT_LEN:
        return 1
    return min(MAX_SPLITS, next_power_of_two(-(-SPLIT_PROGRAMS // programs)))


def _blocks(programs: int, queries: int, positions: int, width: int) -> dict[str, int]:
    """Tile sizes and compiler options for a number of programs, and the queries and key positions of each.

    The fastest on an H200 with heads of 64 channels.
    """
    block_d = next_power_of_two(width, MIN_BLOCK)
    block_q = 1 if queries == 1 else next_power_of_two(queries, MIN_BLOCK)
    if positions >= SPLIT_LEN:
        block_n, warps = 64, 4
    elif positions <= SHORT_LEN:
        block_n, warps = 32, 1
    elif block_q == 1 or programs >= MANY_PROGRAMS:
        block_n, warps = 16, 1
    else:
        block_n, warps = 64, 4
    block_n = min(block_n, next_power_of_two(positions, MIN_BLOCK), max(MIN_BLOCK, 64 * 64 // block_d))
    # Without matrix units there are registers left for the next keys and values.
    prefetch = block_q == 1 and positions > block_n
    blocks = {"BLOCK_Q": block_q, "BLOCK_N": block_n, "BLOCK_D": block_d, "PREFETCH": prefetch}
    return blocks | {"num_warps": warps, "num_stages": 1}


LOG2E = tl.constexpr(1.4426950408889634)
# Below every score; finite, so that differences of maxima are never NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _load_keys(keys, values, start, end, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_bounds = (n < end)[:, None] & (d < D)[None, :]
    offsets = n[:, None] * D + d[None, :]
    return tl.load(keys + offsets, mask=in_bounds, other=0.0), tl.load(values + offsets, mask=in_bounds, other=0.0)


@triton.jit
def _attend(
    q, m, keys, values, begin, end, scale, ancestor_rows, bias_rows,
    K: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax over keys [begin, end) of q: maximum (at least m; base 2), sum and weighted sum of values.

    Key n has position n // K and hypothesis n % K. `bias_rows` point to the biases of a distance of 0 plus the position
    of the query. PREFETCH: load the next block of keys and values while one is processed.
    """
    if BLOCK_Q == 1:
        lane_max = tl.broadcast_to(m, (BLOCK_N,))
        lane_sum = tl.zeros((BLOCK_N,), tl.float32)
        lane_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    if PREFETCH:
        next_k, next_v = _load_keys(keys, values, begin, end, D, BLOCK_N, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        s = n // K
        if PREFETCH:
            k, v = next_k, next_v
            next_k, next_v = _load_keys(keys, values, start + BLOCK_N, end, D, BLOCK_N, BLOCK_D)
        else:
            k, v = _load_keys(keys, values, start, end, D, BLOCK_N, BLOCK_D)
        if BLOCK_Q == 1:
            scores = tl.sum(k.to(tl.float32) * q.to(tl.float32), 1) * (scale * LOG2E)
            if HAS_BIAS:
                biases = tl.load(bias_rows[:, None] - s[None, :], mask=(n < end)[None, :], other=0.0)
                scores += tl.reshape(biases, (BLOCK_N,)) * LOG2E
            scores = tl.where(n < end, scores, -float("inf"))
            new_max = tl.maximum(lane_max, scores)
            decay = tl.exp2(lane_max - new_max)
            p = tl.exp2(scores - new_max)
            lane_sum = lane_sum * decay + p
            lane_acc = lane_acc * decay[:, None] + p[:, None] * v.to(tl.float32)
            lane_max = new_max
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            is_allowed = (n < end)[None, :]
            if HAS_BIAS:
                scores += tl.load(bias_rows[:, None] - s[None, :], mask=(n < end)[None, :], other=0.0) * LOG2E
            if K > 1:
                ancestors = tl.load(ancestor_rows[:, None] + s[None, :], mask=(n < end)[None, :], other=-1)
                is_allowed = is_allowed & (ancestors == (n % K)[None, :])
            scores = tl.where(is_allowed, scores, -float("inf"))
            new_max = tl.maximum(m, tl.max(scores, 1))
            decay = tl.exp2(m - new_max)
            p = tl.exp2(scores - new_max[:, None])
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = new_max
    if BLOCK_Q == 1:
        m = tl.max(lane_max[None, :], 1)
        decay = tl.exp2(lane_max - m)
        total = tl.sum((lane_sum * decay)[None, :], 1)
        acc = tl.sum(lane_acc * decay[:, None], 0)[None, :]
    return m, total, acc


@triton.jit
def _load_rotated(rows, rotary, is_row, d, D: tl.constexpr, HAS_ROTARY: tl.constexpr):
    """One vector per row in float32, rotated by the angles whose cosines and sines `rotary` points to."""
    in_bounds = is_row[:, None] & (d < D)[None, :]
    x = tl.load(rows[:, None] + d[None, :], mask=in_bounds, other=0.0).to(tl.float32)
    if HAS_ROTARY:
        HALF: tl.constexpr = D // 2
        is_first = d < HALF
        partner = tl.load(rows[:, None] + tl.where(is_first, d + HALF, d - HALF)[None, :], mask=in_bounds, other=0.0)
        angle = tl.where(is_first, d, d - HALF)
        cos = tl.load(rotary + angle, mask=d < D, other=0.0)
        sin = tl.load(rotary + HALF + angle, mask=d < D, other=0.0)
        x = x * cos[None, :] + partner.to(tl.float32) * tl.where(is_first, -sin, sin)[None, :]
    return x


@triton.jit
def decode_attention_kernel(
    qkv, k_cache, v_cache, ancestors, positions, bias, rotary, out, partial_max, partial_sum, partial_out,
    scale, qkv_row, slot_stride, head_stride, S,
    SPLITS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROTARY: tl.constexpr, PDL: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the new keys and values of a slot and attend; with SPLITS > 1, over one of as many parts of the keys."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot, group, split = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS, tl.program_id(1)
    HEADS: tl.constexpr = GROUPS * GROUP
    i, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    beam, head = i // GROUP, group * GROUP + i % GROUP
    row = slot * K + beam
    is_query = i < K * GROUP
    in_bounds = is_query[:, None] & (d < D)[None, :]
    position = tl.load(positions + slot).to(tl.int32)
    m = tl.zeros((BLOCK_Q,), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    if position >= 0:
        cache_offset = slot.to(tl.int64) * slot_stride + group * head_stride
        keys, values = k_cache + cache_offset, v_cache + cache_offset
        angles = rotary
        if HAS_ROTARY:
            angles = rotary + position * D
        rows = qkv + row.to(tl.int64) * qkv_row
        q = _load_rotated(rows + head * D, angles, is_query, d, D, HAS_ROTARY).to(keys.dtype.element_ty)
        own_key = _load_rotated(rows + (HEADS + group) * D, angles, is_query, d, D, HAS_ROTARY)
        own_key = own_key.to(keys.dtype.element_ty)
        own_value = tl.load(rows[:, None] + ((HEADS + GROUPS + group) * D + d)[None, :], mask=in_bounds, other=0.0)
        own_value = own_value.to(values.dtype.element_ty)
        # The score of the current position is the initial maximum of every part; the first part adds its weight.
        own_score = tl.sum(q.to(tl.float32) * own_key.to(tl.float32), 1) * (scale * LOG2E)
        if HAS_BIAS:
            own_score += tl.load(bias + head * S, mask=is_query, other=0.0) * LOG2E
        ancestor_rows, bias_rows = ancestors, bias
        if K > 1:
            ancestor_rows = ancestors + tl.where(is_query, row, 0) * S
        if HAS_BIAS:
            bias_rows = bias + tl.where(is_query, head, 0) * S + position
        end = position * K
        begin = 0
        if SPLITS > 1:
            part = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_N) * BLOCK_N
            begin = split * part
            end = tl.minimum(begin + part, end)
        m, total, acc = _attend(
            q, own_score, keys, values, begin, end, scale, ancestor_rows, bias_rows,
            K, D, HAS_BIAS, PREFETCH, BLOCK_Q, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if split == 0:
            weight = tl.exp2(own_score - m)
            total += weight
            acc += weight[:, None] * own_value.to(tl.float32)
            new_offsets = (position * K + beam)[:, None] * D + d[None, :]
            is_new = in_bounds & (i % GROUP == 0)[:, None]
            tl.store(keys + new_offsets, own_key, mask=is_new)
            tl.store(values + new_offsets, own_value, mask=is_new)
    out_row = row * HEADS + head
    if SPLITS > 1:
        out_row = out_row * SPLITS + split
        tl.store(partial_max + out_row, m, mask=is_query)
        tl.store(partial_sum + out_row, total, mask=is_query)
        tl.store(partial_out + out_row[:, None] * D + d[None, :], acc, mask=in_bounds)
    else:
        acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(out + out_row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit
def merge_splits_kernel(
    partial_max, partial_sum, partial_out, out,
    SPLITS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The output of one row and head from the results of its parts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split, d = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    m = tl.load(partial_max + split)
    total = tl.load(partial_sum + split)
    acc = tl.load(partial_out + split[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(total * weight, 0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + tl.program_id(0) * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def decode_cross_attention_kernel(
    q, k, v, lengths, out, scale, q_row, k_slot, k_head, v_slot, v_head,
    K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    HEADS: tl.constexpr = GROUPS * GROUP
    i, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    head, row = group * GROUP + i % GROUP, slot * K + i // GROUP
    in_bounds = (i < K * GROUP)[:, None] & (d < D)[None, :]
    length = tl.load(lengths + slot).to(tl.int32)
    keys = k + slot.to(tl.int64) * k_slot + group * k_head
    values = v + slot.to(tl.int64) * v_slot + group * v_head
    query_offsets = row.to(tl.int64)[:, None] * q_row + head[:, None] * D + d[None, :]
    queries = tl.load(q + query_offsets, mask=in_bounds, other=0.0).to(keys.dtype.element_ty)
    lowest = tl.full((BLOCK_Q,), LOWEST, tl.float32)
    _, total, acc = _attend(
        queries, lowest, keys, values, 0, length, scale, None, None,
        1, D, False, PREFETCH, BLOCK_Q, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(out + (row * HEADS + head)[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=in_bounds)
