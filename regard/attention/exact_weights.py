"""Exact attention weights of a call, a block of queries at a time, and their gradients."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.backends import chunked
from regard.attention.backends.call import Call, disable_autocast
from regard.attention.bias import HeadSubsetBias
from regard.attention.masks import NO_MASK, MaskParts
from regard.attention.offsets import Offsets
from regard.attention.reference import repeat_heads
from regard.attention.scores import Dot, DotLike, ScaledDot, is_computed_as
from regard.errors import RegardError
from regard.kernels.derivatives import is_transformed
from regard.kernels.triton import exact_weights

Selection = int | slice | Sequence[int] | None
"""Heads or queries to compute: an index, a slice, several indices; None: all."""


def compute_weights(call: Call, heads: Selection = None, queries: Selection = None) -> Float[Tensor, "B h t S"]:
    """The weights of the selected heads and queries; a packed call gives a padded batch, zero beyond each length.

    Nothing is computed for other heads and queries. In addition to the result, memory is linear in T and S: queries are
    processed in blocks.
    """
    with disable_autocast(call.q):
        return _compute_weights(select_heads(call, resolve_indices(heads, call.q.shape[1], "head")), queries)


def select_heads(call: Call, heads: list[int]) -> Call:
    """The call restricted to some heads, which are copied so that the memory of the others can be freed."""
    H = call.q.shape[1]
    if heads == list(range(H)):
        return call
    # Each head of k and v serves H / G heads of q. Heads are the second axis, packed or not.
    q, k, v = (
        torch.stack([x[:, h * x.shape[1] // H] for h in heads], dim=1) if heads else x[:, :0]
        for x in (call.q, call.k, call.v)
    )
    bias = None if call.bias is None else HeadSubsetBias(call.bias, heads)
    return call._replace(q=q, k=k, v=v, score=call.score.select_heads(heads), bias=bias)


def _compute_weights(call: Call, queries: Selection) -> Float[Tensor, "B h t S"]:
    precise = torch.promote_types(call.q.dtype, torch.float32)
    q, k, parts, q_lengths, positions = call.q, call.k, call.mask_parts, None, None
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = (_pad(x, offsets) for x, offsets in ((q, call.q_offsets), (k, call.k_offsets)))
        positions = torch.arange(k.shape[2], device=k.device)
        if not (_is_single(call.q_offsets) and _is_single(call.k_offsets)):
            q_lengths = call.q_offsets.lengths
            parts = parts.intersect(MaskParts(lengths=call.k_offsets.lengths))
    (B, H, T, _), S = q.shape, k.shape[2]
    query_indices = None
    if queries is not None:
        query_indices = torch.tensor(resolve_indices(queries, T, "query"), dtype=torch.long, device=q.device)
        q = q[:, :, query_indices]
    # Products of 16-bit numbers are exact in float32: for scores that do not transform q and k the cast can wait.
    if type(call.score) not in (Dot, ScaledDot):
        q, k = q.to(precise), repeat_heads(k, H).to(precise)
    q, k, scale = call.score.transform(q, k, positions)
    if _kernel_supports(call, q, k, parts):
        return exact_weights.exact_weights(
            q,
            k,
            scale,
            causal=parts.causal,
            window=parts.window,
            lengths=parts.lengths,
            rows=query_indices,
            shift=S - T,
            q_lengths=q_lengths,
        )
    q, k = q.to(precise), repeat_heads(k, H).to(precise)
    rows = torch.arange(T, device=q.device) if query_indices is None else query_indices
    s = torch.arange(S, device=q.device)
    if is_transformed():  # vmap cannot assign blocks
        out = chunked.block_weights(q, k, scale, call.score, parts, call.bias, rows + (S - T), s)
        return out if q_lengths is None else out.masked_fill(~(rows < q_lengths[:, None])[:, None, :, None], 0.0)
    out = torch.zeros(B, H, q.shape[2], S, dtype=precise, device=q.device)
    # In addition to its pairs a block holds scores, masked scores and weights. If all queries are computed, keys that
    # are masked for an entire block are left out.
    pair_elements, block_parts = call.score.pair_elements(q.shape[-1]) + 3, parts if query_indices is None else NO_MASK
    for b, t, keys in chunked.blocks(q, S, pair_elements, block_parts):
        out[b, :, t, keys] = chunked.block_weights(
            q[b, :, t],
            k[b, :, keys],
            scale,
            call.score,
            parts.select_sequences(b),
            call.bias,
            rows[t] + (S - T),
            s[keys],
        )
    return out if q_lengths is None else out.masked_fill_(~(rows < q_lengths[:, None])[:, None, :, None], 0.0)


def _kernel_supports(call: Call, q: Tensor, k: Tensor, parts: MaskParts) -> bool:
    """Whether the kernel supports this call, with transformed q and k."""
    return (
        is_computed_as(call.score, DotLike)
        and call.bias is None
        and parts.rest is None
        and parts.distance is None
        and exact_weights.supports(q, k)
    )


def weight_gradients(call: Call, output_grad: Float[Tensor, "..."]) -> Float[Tensor, "B H T S"]:
    """The gradient of the weights from that of the output: ∂L/∂a_ts = ∂L/∂o_t · v_s.

    The weights themselves are not needed. A packed call gives a padded batch, zero beyond each length.
    """
    precise = torch.promote_types(call.v.dtype, torch.float32)
    grad, v = output_grad.to(precise), call.v.to(precise)
    with disable_autocast(grad):
        if call.q_offsets is None or call.k_offsets is None:
            return grad @ repeat_heads(v, grad.shape[1]).mT
        grad, v = _pad(grad, call.q_offsets), _pad(v, call.k_offsets)
        is_valid = call.q_offsets.valid[:, None, :, None] & call.k_offsets.valid[:, None, None, :]
        return (grad @ repeat_heads(v, grad.shape[1]).mT).masked_fill(~is_valid, 0.0)


def _pad(x: Float[Tensor, "N H D"], offsets: Offsets) -> Float[Tensor, "B H M D"]:
    return x.transpose(0, 1)[None] if _is_single(offsets) else x[offsets.rows].transpose(1, 2)


def _is_single(offsets: Offsets) -> bool:
    """Whether there is one sequence without padding, as when one text is inspected: no data needs to move."""
    return len(offsets.starts) == 2 and offsets.total == offsets.max_len


def resolve_indices(selection: Selection, count: int, kind: str) -> list[int]:
    """The indices from 0 to count − 1 that are selected; `kind` ("head", "query") is for the error message."""
    valid = range(count)
    try:
        match selection:
            case None:
                return list(valid)
            case slice():
                return list(valid[selection])
            case int():
                return [valid[selection]]
        return [valid[i] for i in selection]
    except IndexError:
        raise RegardError(f"There is no {kind} {selection}.", f"There are {count}, with indices from 0.") from None
