"""Exact weights, a block of rows at a time: for those who want to look."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import triton_here
from regard.attention.bias import OfHeads
from regard.attention.kernels import Call, chunked
from regard.attention.masks import FREE, Form
from regard.attention.offsets import Offsets
from regard.attention.reference import repeat_heads
from regard.attention.scores import Dot, DotLike, ScaledDot
from regard.errors import RegardError

Chosen = int | slice | Sequence[int] | None


def weights(call: Call, heads: Chosen = None, queries: Chosen = None) -> Float[Tensor, "B h t S"]:
    """The weights of the chosen heads and queries; a packed call gives a padded rectangle, zero beyond each length.

    Nothing is computed for other heads and queries. Besides the result, memory is linear in T and S: queries are taken
    a few at a time.
    """
    with torch.autocast(call.q.device.type, enabled=False):
        return _weights(of_heads(call, indices(heads, call.q.shape[1], "head")), queries)


def of_heads(call: Call, chosen: list[int]) -> Call:
    """The same call for a few of its heads, which are copied: the others can be let go."""
    H = call.q.shape[1]
    if chosen == list(range(H)):
        return call
    # Each head of k and v serves H / G heads of q. Heads are the second axis, packed or not.
    q, k, v = (
        torch.stack([x[:, h * x.shape[1] // H] for h in chosen], dim=1) if chosen else x[:, :0]
        for x in (call.q, call.k, call.v)
    )
    bias = None if call.bias is None else OfHeads(call.bias, chosen)
    return call._replace(q=q, k=k, v=v, score=call.score.of_heads(chosen), bias=bias)


def _weights(call: Call, queries: Chosen) -> Float[Tensor, "B h t S"]:
    precise = torch.promote_types(call.q.dtype, torch.float32)
    q, k, form, q_lengths, positions = call.q, call.k, call.form, None, None
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = (_rectangle(x, o) for x, o in ((q, call.q_offsets), (k, call.k_offsets)))
        positions = torch.arange(k.shape[2], device=k.device)
        if not (_alone(call.q_offsets) and _alone(call.k_offsets)):
            q_lengths = call.q_offsets.lengths
            form = form.both(Form(lengths=call.k_offsets.lengths))
    (B, H, T, _), S = q.shape, k.shape[2]
    at = None
    if queries is not None:
        at = torch.tensor(indices(queries, T, "query"), dtype=torch.long, device=q.device)
        q = q[:, :, at]
    # Products of 16-bit numbers are exact in float32: where folding changes nothing they need not be widened first.
    if type(call.score) not in (Dot, ScaledDot):
        q, k = q.to(precise), repeat_heads(k, H).to(precise)
    q, k, scale = call.score.fold(q, k, positions)
    if in_tiles(call, q, k, form):
        from regard.attention import exact_triton

        return exact_triton.weights(q, k, scale, form, at, S - T, q_lengths)
    q, k = q.to(precise), repeat_heads(k, H).to(precise)
    out = torch.zeros(B, H, q.shape[2], S, dtype=precise, device=q.device)
    rows, s = torch.arange(T, device=q.device) if at is None else at, torch.arange(S, device=q.device)
    # Beside its pairs a block holds scores, masked scores and weights. Where all queries are asked for, keys that none
    # of a block may see are left out.
    for b, t, seen in chunked.blocks(q, S, call.score.pair_width(q.shape[-1]) + 3, form if at is None else FREE):
        out[b, :, t, seen] = chunked.block_weights(
            q[b, :, t], k[b, :, seen], scale, call.score, form.of_batch(b), call.bias, rows[t] + (S - T), s[seen]
        )
    return out if q_lengths is None else out.masked_fill_(~(rows < q_lengths[:, None])[:, None, :, None], 0.0)


def in_tiles(call: Call, q: Tensor, k: Tensor, form: Form) -> bool:
    """Whether `exact_triton` can make these weights, of folded q and k; it knows no gradients."""
    return (
        triton_here.FOUND
        and q.is_cuda
        and isinstance(call.score, DotLike)
        and type(call.score).pair is DotLike.pair
        and call.bias is None
        and form.rest is None
        and q.dtype == k.dtype
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and q.numel() > 0
        and k.numel() > 0
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    )


def gradients(call: Call, of_output: Float[Tensor, "..."]) -> Float[Tensor, "B H T S"]:
    """The gradient of the weights, from that of the output: what weighs v_s into output t is worth of_output_t · v_s.

    So nobody has to keep the weights for it. A packed call gives a padded rectangle, zero beyond each length.
    """
    precise = torch.promote_types(call.v.dtype, torch.float32)
    g, v = of_output.to(precise), call.v.to(precise)
    with torch.autocast(g.device.type, enabled=False):
        if call.q_offsets is None or call.k_offsets is None:
            return g @ repeat_heads(v, g.shape[1]).mT
        g, v = _rectangle(g, call.q_offsets), _rectangle(v, call.k_offsets)
        real = call.q_offsets.valid[:, None, :, None] & call.k_offsets.valid[:, None, None, :]
        return (g @ repeat_heads(v, g.shape[1]).mT).masked_fill(~real, 0.0)


def _rectangle(x: Float[Tensor, "N H D"], offsets: Offsets) -> Float[Tensor, "B H M D"]:
    return x.transpose(0, 1)[None] if _alone(offsets) else x[offsets.rows].transpose(1, 2)


def _alone(offsets: Offsets) -> bool:
    """Whether one sequence fills the whole run, as when somebody looks at a text: then nothing needs to be moved."""
    return len(offsets.starts) == 2 and offsets.total == offsets.max_len


def indices(chosen: Chosen, count: int, what: str) -> list[int]:
    everything = range(count)
    try:
        match chosen:
            case None:
                return list(everything)
            case slice():
                return list(everything[chosen])
            case int():
                return [everything[chosen]]
        return [everything[i] for i in chosen]
    except IndexError:
        raise RegardError(f"There is no {what} {chosen}.", f"There are {count}, counted from 0.") from None
