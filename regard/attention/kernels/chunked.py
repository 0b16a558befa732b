"""Any score, any mask, any bias, any device: a block of rows at a time, recomputed in the backward pass.

Forward computes the weights of a few queries at a time and keeps none; backward computes each block again, this time
with its graph, and adds up the gradients. Memory is that of the inputs and of one block.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.kernels import Call, outside_graphs
from regard.attention.masks import Form
from regard.attention.reference import repeat_heads, softmax
from regard.attention.scores import Score

# Numbers in a block: on a CPU about what its caches hold, elsewhere enough to keep the device busy.
BLOCK = {"cpu": 1 << 20}
BLOCK_ELSEWHERE = 1 << 26


def takes(call: Call) -> bool:
    return True


@outside_graphs
def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    H = call.q.shape[1]
    q, k, scale = call.fold(repeat_heads(call.k, H))
    v = repeat_heads(call.v, H)
    parameters = [*call.score.parameters(), *(call.bias.parameters() if call.bias is not None else ())]
    return _Chunked.apply(call.score, call.form, call.bias, scale, q, k, v, *parameters)


def blocks(q: Tensor, S: int, width: int, form: Form) -> Iterator[tuple[slice, slice, slice]]:
    """The sequences, queries and keys of each block; keys that no query of the block may see are left out."""
    B, H, T, _ = q.shape
    if 0 in (B, H, T, S):
        return
    room = BLOCK.get(q.device.type, BLOCK_ELSEWHERE)
    queries = min(T, max(1, room // (H * S * width)))
    sequences = min(B, max(1, room // (H * S * width * queries)))
    for t in range(0, T, queries):
        first, last = t + S - T, min(t + queries, T) - 1 + S - T
        low = 0 if form.window is None else max(0, first - form.window + 1)
        high = S if form.window is None and not form.causal else min(S, last + 1)
        if low < high:
            for b in range(0, B, sequences):
                yield slice(b, b + sequences), slice(t, t + queries), slice(low, high)


def block_weights(
    q: Float[Tensor, "b H t D"],
    k: Float[Tensor, "b H s D"],
    scale: float,
    score: Score,
    form: Form,
    bias: Callable[[Tensor, Tensor], Tensor] | None,
    p: Tensor,
    s: Tensor,
) -> Float[Tensor, "b H t s"]:
    """The weights of one block, from folded q and k, at queries' positions p and keys' s."""
    scores = score.pair(q, k)
    if scale != 1.0:
        scores = scores * scale
    if bias is not None:
        scores = scores + bias(p, s)
    mask = form.mask
    return softmax(scores, None if mask is None else mask.block(p, s))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score, form, bias, scale, q, k, v, *parameters):  # type: ignore[override]
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.given = score, form, bias, scale
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            for b, t, s in blocks(q, k.shape[2], score.pair_width(q.shape[-1]), form):
                weights = _weights(ctx.given, q, k, (b, t, s), q[b, :, t], k[b, :, s])
                out[b, :, t] = weights.to(v.dtype) @ v[b, :, s]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, *parameters = ctx.saved_tensors
        score, form, *_ = ctx.given
        wanted = ctx.needs_input_grad[4:]
        grads = [torch.zeros_like(x) if w else None for x, w in zip((q, k, v, *parameters), wanted)]
        with torch.autocast(q.device.type, enabled=False):
            for b, t, s in blocks(q, k.shape[2], score.pair_width(q.shape[-1]), form):
                places: list[Any] = [(b, slice(None), t), *[(b, slice(None), s)] * 2, *[...] * len(parameters)]
                one_q, one_k, one_v = (
                    x[place].detach().requires_grad_(w) for x, place, w in zip((q, k, v), places, wanted)
                )
                with torch.enable_grad():
                    weights = _weights(ctx.given, q, k, (b, t, s), one_q, one_k)
                    out = weights.to(v.dtype) @ one_v
                inputs = [x for x, w in zip((one_q, one_k, one_v, *parameters), wanted) if w]
                found = torch.autograd.grad(out, inputs, grad[b, :, t], allow_unused=True)
                to_add = [(total, place) for total, place in zip(grads, places) if total is not None]
                for (total, place), one in zip(to_add, found):
                    if one is not None:
                        total[place] += one
        return None, None, None, None, *grads


def _weights(given, q: Tensor, k: Tensor, block: tuple[slice, slice, slice], one_q: Tensor, one_k: Tensor) -> Tensor:
    """The weights of one block of q and k, whose own rows are one_q and one_k."""
    score, form, bias, scale = given
    T, S = q.shape[2], k.shape[2]
    b, t, s = block
    p = torch.arange(t.start, min(t.stop, T), device=q.device) + (S - T)
    keys = torch.arange(s.start, s.stop, device=q.device)
    return block_weights(one_q, one_k, scale, score, form.of_batch(b), bias, p, keys)
