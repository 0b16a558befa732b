"""Blockwise attention for every score, mask, bias and device; weights are recomputed in the backward pass.

The forward pass computes the weights of a block of queries at a time and stores none. The backward pass recomputes each
block with its autograd graph and accumulates the gradients. Memory is that of the inputs and of one block.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from regard.attention.backends.call import Call, disable_autocast, disable_compile
from regard.attention.bias import Bias
from regard.attention.masks import MaskParts
from regard.attention.reference import repeat_heads
from regard.attention.scores import Score
from regard.kernels.derivatives import once_differentiable
from regard.kernels.masked_softmax import masked_softmax
from regard.kernels.score_blocks import score_blocks


def supports(call: Call) -> bool:
    return True


@disable_compile
def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    H = call.q.shape[1]
    q, k, scale = call.transform(repeat_heads(call.k, H))
    v = repeat_heads(call.v, H)
    settings = _ScoreSettings(call.score, call.mask_parts, call.bias, scale)
    return _ChunkedAttention.apply(settings, q, k, v, *_State(call.score, call.bias).tensors().values())


def blocks(q: Tensor, S: int, pair_elements: int, parts: MaskParts) -> Iterator[tuple[slice, slice, slice]]:
    """The sequences, queries and keys of each block; keys that are masked for the entire block are left out."""
    B, H, T, _ = q.shape
    return score_blocks((B, H, T, S), q.device.type, pair_elements, parts.causal, parts.window, parts.distance)


def block_weights(
    q: Float[Tensor, "b H t D"],
    k: Float[Tensor, "b H s D"],
    scale: float,
    score: Score,
    parts: MaskParts,
    bias: Callable[[Tensor, Tensor], Tensor] | None,
    p: Tensor,
    s: Tensor,
) -> Float[Tensor, "b H t s"]:
    """The weights of one block, from transformed q and k at positions p and s."""
    scores = score.pair_scores_at(q, k, p, s)
    if scale != 1.0:
        scores = scores * scale
    if bias is not None:
        scores = scores + bias(p, s)
    mask = parts.mask
    return masked_softmax(scores, None if mask is None else mask(p, s))


class _ScoreSettings(NamedTuple):
    """The inputs of a call that are not tensors."""

    score: Score
    parts: MaskParts
    bias: Bias | None
    scale: float


class _State(nn.Module):
    """The parameters and buffers of score and bias, from which the backward pass recomputes the weights.

    Those of the forward pass, which later differ if `torch.func.functional_call` or a checkpoint provided them.
    """

    def __init__(self, score: Score, bias: Bias | None) -> None:
        super().__init__()
        self.score, self.bias = score, bias

    def tensors(self) -> dict[str, Tensor]:
        return dict((*self.named_parameters(), *self.named_buffers()))

    def forward(self, function: Callable[[], None]) -> None:
        """Called by `functional_call`, with other tensors in their place."""
        function()


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, q, k, v, *parameters):  # type: ignore[override]
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.settings = settings
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        with disable_autocast(q):
            for b, t, s in blocks(q, k.shape[2], settings.score.pair_elements(q.shape[-1]), settings.parts):
                weights = _weights(settings, q, k, (b, t, s), q[b, :, t], k[b, :, s])
                out[b, :, t] = weights.to(v.dtype) @ v[b, :, s]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs_grad = ctx.needs_input_grad[1:]
        tensors = [x.detach().requires_grad_(needed) for x, needed in zip(ctx.saved_tensors, needs_grad)]
        (q, k, v, *parameters), settings = tensors, ctx.settings
        grads = [torch.zeros_like(x) if needed else None for x, needed in zip(tensors, needs_grad)]

        def add_blocks() -> None:
            for b, t, s in blocks(q, k.shape[2], settings.score.pair_elements(q.shape[-1]), settings.parts):
                indices: list[Any] = [(b, slice(None), t), *[(b, slice(None), s)] * 2, *[...] * len(parameters)]
                block_q, block_k, block_v = (
                    x[index].detach().requires_grad_(needed) for x, index, needed in zip((q, k, v), indices, needs_grad)
                )
                with torch.enable_grad():
                    weights = _weights(settings, q, k, (b, t, s), block_q, block_k)
                    out = weights.to(v.dtype) @ block_v
                inputs = [x for x, needed in zip((block_q, block_k, block_v, *parameters), needs_grad) if needed]
                block_grads = torch.autograd.grad(out, inputs, grad[b, :, t], allow_unused=True)
                totals = [(total, index) for total, index in zip(grads, indices) if total is not None]
                for (total, index), block_grad in zip(totals, block_grads):
                    if block_grad is not None:
                        total[index] += block_grad

        state = _State(settings.score, settings.bias)
        with disable_autocast(q):
            functional_call(state, dict(zip(state.tensors(), parameters)), (add_blocks,))
        return None, *grads


def _weights(
    settings: _ScoreSettings, q: Tensor, k: Tensor, block: tuple[slice, slice, slice], block_q: Tensor, block_k: Tensor
) -> Tensor:
    """The weights of one block of q and k, whose rows are block_q and block_k."""
    score, parts, bias, scale = settings
    T, S = q.shape[2], k.shape[2]
    b, t, s = block
    p = torch.arange(t.start, min(t.stop, T), device=q.device) + (S - T)
    keys = torch.arange(s.start, s.stop, device=q.device)
    return block_weights(block_q, block_k, scale, score, parts.select_sequences(b), bias, p, keys)
