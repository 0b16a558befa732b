"""Attention of one new token per hypothesis over static caches (CUDA, Triton; inference only).

Plain twins: `plain_decode_attention` and `plain_decode_cross_attention`. Nothing synchronizes with the host, and
launches depend on shapes only, so calls can be captured in a CUDA graph. Beam search never copies a cache: the key of
position s of a hypothesis stays in the column of the hypothesis that wrote it, and `ancestors` says which that is.

B slots (sentences), K hypotheses per slot, R = B·K rows, H query heads, G key heads, D channels per head, S positions
of the cache, M positions of the source.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.triton_support import contiguous_rows, dependent_launch, next_power_of_two, triton_available

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
    from regard.kernels.triton import decode_attention_triton

    qkv = contiguous_rows(qkv)
    B, G, S, K, D = k_cache.shape
    group = heads // G
    assert v_cache.stride() == k_cache.stride(), "caches of keys and values must have the same strides"
    out = qkv.new_empty(len(qkv), heads * D)
    splits = _splits(B * G, S)
    partial_max, partial_sum = qkv.new_empty(2, len(qkv) * heads * splits if splits > 1 else 0, dtype=torch.float32)
    partial_out = partial_max.new_empty(len(partial_max), D)
    decode_attention_triton.decode_attention[(B * G, splits)](
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
        decode_attention_triton.merge_splits[(len(qkv) * heads,)](
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
    from regard.kernels.triton import decode_attention_triton

    q = contiguous_rows(q)
    B, G, M, D = k.shape
    K, group = len(q) // B, heads // G
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode_attention_triton.decode_cross_attention[(B * G,)](
        *(q, k, v, lengths, out, scale, q.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        K=K,
        GROUPS=G,
        GROUP=group,
        D=D,
        **dependent_launch(q),
        **_blocks(B * G, K * group, M, D),
    )
    return out


def plain_decode_attention(
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


def plain_decode_cross_attention(
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
