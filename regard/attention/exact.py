"""Exact weights, a block of rows at a time: for those who want to look."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.kernels import Call, chunked
from regard.attention.masks import Form
from regard.attention.offsets import Offsets
from regard.attention.reference import repeat_heads
from regard.errors import RegardError

Chosen = int | slice | Sequence[int] | None


def weights(call: Call, heads: Chosen = None, queries: Chosen = None) -> Float[Tensor, "B h t S"]:
    """The weights of the chosen heads and queries; a packed call gives a padded rectangle, zero beyond each length.

    Besides the result, memory is linear in T and S: queries are taken a few at a time.
    """
    with torch.autocast(call.q.device.type, enabled=False):
        return _weights(call, heads, queries)


def _weights(call: Call, heads: Chosen, queries: Chosen) -> Float[Tensor, "B h t S"]:
    precise = torch.promote_types(call.q.dtype, torch.float32)
    q, k, form = call.q.to(precise), call.k.to(precise), call.form
    positions, real = None, None
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = (_rectangle(x, o) for x, o in ((q, call.q_offsets), (k, call.k_offsets)))
        positions, real = torch.arange(k.shape[2], device=k.device), call.q_offsets.valid
        form = form.both(Form(lengths=call.k_offsets.lengths))
    (B, H, T, _), S = q.shape, k.shape[2]
    chosen, rows = indices(heads, H, "head"), indices(queries, T, "query")
    score = call.score
    if rows != list(range(T)):
        q = q[:, :, rows]
    if chosen != list(range(H)):
        q, score = q[:, chosen], score.of_heads(chosen)
    # Each head of k serves H / G heads of q.
    q, k, scale = score.fold(q, k[:, [h * k.shape[1] // H for h in chosen]], positions)
    out = torch.zeros(B, len(chosen), len(rows), S, dtype=precise, device=q.device)
    p, s = torch.tensor(rows, device=q.device) + (S - T), torch.arange(S, device=q.device)
    for b, t, _ in chunked.blocks(q, S, score.pair_width(q.shape[-1]), Form()):
        w = chunked.block_weights(
            q[b, :, t], k[b], scale, score, form.of_batch(b), _of_heads(call.bias, chosen), p[t], s
        )
        out[b, :, t] = w
    return out if real is None else out.masked_fill_(~real[:, rows][:, None, :, None], 0.0)


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
    return x[offsets.rows].transpose(1, 2)


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


def _of_heads(bias, chosen):
    return None if bias is None else lambda p, s: bias(p, s)[chosen]
