"""Additive attention on a CPU, a block of rows at a time, without computing a tanh.

Reference: `regard.attention.reference` with the score `Concat`. tanh(a + b) = 1 − 2r with r = 1 / (1 + e^{2a} e^{2b}).
The exponentials depend on rows and columns separately, so that a pair costs a multiplication and a reciprocal, which on
a CPU are twenty times as fast as a tanh. The 1 is the same for every key and cancels in the softmax: scores are −2 w·r.
In the backward pass ∂score/∂a = ∂score/∂b = 4 w r (1 − r).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.kernels.derivatives import once_differentiable
from regard.kernels.masked_softmax import masked_softmax
from regard.kernels.score_blocks import BLOCK_ELEMENTS, score_blocks

# e^{2·40} and its inverse are finite in float32; for larger arguments a and b are added before the exponential.
MAX_ARGUMENT = 40.0

BlockMask = Callable[[slice, Tensor, Tensor], Bool[Tensor, "..."] | None]
"""The mask of a block: from a slice of sequences and positions of queries and keys, True where allowed; None: all."""


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel runs on these inputs."""
    return q.device.type == "cpu" and v.dtype in (torch.float32, torch.float64)


def concat_attention(
    a: Float[Tensor, "B H T C"],
    b: Float[Tensor, "B H S C"],
    v: Float[Tensor, "B H S Dv"],
    w: Float[Tensor, "*H C 1"],
    causal: bool,
    window: int | None,
    block_mask: BlockMask,
) -> Float[Tensor, "B H T Dv"]:
    """softmax(w·tanh(a + b)) v. `block_mask` is the complete mask; `causal` and `window` only allow skipping blocks."""
    return _ConcatAttention.apply(causal, window, block_mask, a, b, v, w)


class Block(NamedTuple):
    """Slices of a block: sequences, heads and queries; sequences, heads and keys."""

    rows: tuple[slice, slice, slice]
    columns: tuple[slice, slice, slice]


class _Blocks:
    """The blocks of one call; computes r and the weights of each, in a buffer that all blocks share."""

    def __init__(
        self, causal: bool, window: int | None, block_mask: BlockMask, a: Tensor, b: Tensor, w: Tensor
    ) -> None:
        self.causal, self.window, self.block_mask = causal, window, block_mask
        self.a, self.b, self.w = a, b, w
        self.is_factored = max(float(x.abs().max()) for x in (a, b)) <= MAX_ARGUMENT  # False for NaN
        self.rows, self.columns = (x.mul(2).exp_() for x in (a, b)) if self.is_factored else (a.mul(-2), b.mul(-2))
        self.buffers: dict[int, Tensor] = {}
        self.one = a.new_ones(())

    def __iter__(self) -> Iterator[Block]:
        (B, H, T, C), S = self.a.shape, self.b.shape[2]
        # Blocks with more queries accumulate sums over them less often: one head per block where that fills it.
        by_head = BLOCK_ELEMENTS["cpu"] <= T * S * C
        for h in [slice(h, h + 1) for h in range(H)] if by_head else [slice(0, H)]:
            shape = (B, h.stop - h.start, T, S)
            for b, t, s in score_blocks(shape, self.a.device.type, C, self.causal, self.window):
                yield Block((b, h, t), (b, h, s))

    def head_weights(self, h: slice) -> Float[Tensor, "*h C 1"]:
        return self.w if self.w.dim() == 2 else self.w[h]

    def buffer(self, index: int, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if index not in self.buffers or self.buffers[index].numel() < size:
            self.buffers[index] = self.a.new_empty(size)
        return self.buffers[index][:size].view(shape)

    def compute(self, block: Block) -> tuple[Float[Tensor, "b h t s C"], Float[Tensor, "b h t s"]]:
        """r and the attention weights."""
        (b, h, t), (_, _, s) = block
        rows, columns = self.rows[block.rows].unsqueeze(3), self.columns[block.columns].unsqueeze(2)
        r = self.buffer(0, *rows.shape[:3], columns.shape[3], rows.shape[4])
        if self.is_factored:
            torch.addcmul(self.one, rows, columns, out=r).reciprocal_()
        else:
            torch.add(rows, columns, out=r).sigmoid_()
        scores = (r.flatten(2, 3) @ self.head_weights(h)).view(r.shape[:4]).mul_(-2.0)
        T, S = self.a.shape[2], self.b.shape[2]
        p = torch.arange(t.start, min(t.stop, T)) + (S - T)
        return r, masked_softmax(scores, self.block_mask(b, p, torch.arange(s.start, s.stop)))


class _ConcatAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, causal, window, block_mask, a, b, v, w):  # type: ignore[override]
        ctx.save_for_backward(a, b, v, w)
        ctx.causal, ctx.window, ctx.block_mask = causal, window, block_mask
        out = v.new_zeros(*a.shape[:3], v.shape[-1])
        blocks = _Blocks(causal, window, block_mask, a, b, w)
        for block in blocks:
            _, weights = blocks.compute(block)
            out[block.rows] = weights @ v[block.columns]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, v, w = ctx.saved_tensors
        da, db, dv, dw = (torch.zeros_like(x) for x in (a, b, v, w))
        blocks = _Blocks(ctx.causal, ctx.window, ctx.block_mask, a, b, w)
        for block in blocks:
            r, weights = blocks.compute(block)
            block_grad = grad[block.rows]
            dv[block.columns] += weights.mT @ block_grad
            d_scores = block_grad @ v[block.columns].mT
            d_scores -= (d_scores * weights).sum(-1, keepdim=True)
            d_scores *= weights
            block_dw = (d_scores.flatten(2).unsqueeze(2) @ r.flatten(2, 3)).mT  # (b, h, C, 1)
            if w.dim() == 2:
                dw += block_dw.sum((0, 1))
            else:
                dw[block.rows[1]] += block_dw.sum(0)
            d = torch.mul(r, d_scores.unsqueeze(-1), out=blocks.buffer(1, *r.shape))
            d.addcmul_(d, r, value=-1.0)
            da[block.rows] += d.sum(3)
            db[block.columns] += d.sum(2)
        # Factors common to all pairs: 4 w, and −2 for w itself.
        factor = 4.0 * w.mT
        grads: list[Any] = [da.mul_(factor), db.mul_(factor), dv, dw.mul_(-2.0)]
        needs_grad = ctx.needs_input_grad[3:]
        return None, None, None, *(x if needed else None for x, needed in zip(grads, needs_grad))
