"""Concat on a CPU: a block of rows at a time, without a single tanh.

tanh(a + b) = 1 − 2r with r = 1 / (1 + e^{2a} e^{2b}). The exponentials belong to rows and to columns, so that a pair
costs a multiplication and a reciprocal, which a CPU does twenty times as fast as a tanh. The 1 is the same for every
key, and softmax does not see it: scores are −2 w·r. In the backward pass ∂score/∂a = ∂score/∂b = 4 w r (1 − r).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.kernels import Call, chunked, outside_graphs
from regard.attention.masks import Form
from regard.attention.reference import repeat_heads, softmax
from regard.attention.scores import Concat

# e^{2·40} and its inverse are still numbers in float32; only beyond that is the sum taken before the exponential.
LIMIT = 40.0


def takes(call: Call) -> bool:
    return (
        type(call.score) is Concat
        and call.q.device.type == "cpu"
        and call.bias is None
        and call.v.dtype in (torch.float32, torch.float64)
    )


@outside_graphs
def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    H = call.q.shape[1]
    q, k, _ = call.fold(repeat_heads(call.k, H))
    return _ConcatCPU.apply(call.form, q, k, repeat_heads(call.v, H), call.score.weight_a.to(q.dtype))


class Block(NamedTuple):
    """Sequences, heads and queries; sequences, heads and keys."""

    rows: tuple[slice, slice, slice]
    columns: tuple[slice, slice, slice]


class _Blocks:
    """The blocks of a call, and for each the r of its pairs and its weights; the room for r is used again."""

    def __init__(self, form: Form, q: Tensor, k: Tensor, w: Tensor) -> None:
        self.form, self.q, self.k, self.w = form, q, k, w
        self.factors = max(float(x.abs().max()) for x in (q, k)) <= LIMIT  # a NaN is not
        self.rows, self.columns = (x.mul(2).exp_() for x in (q, k)) if self.factors else (q.mul(-2), k.mul(-2))
        self.room: dict[int, Tensor] = {}
        self.one = q.new_ones(())

    def __iter__(self) -> Iterator[Block]:
        (_, H, T, C), S = self.q.shape, self.k.shape[2]
        # The more queries a block has, the less often the sums over them are added up: one head where that fills it.
        alone = chunked.BLOCK["cpu"] <= T * S * C
        for h in [slice(h, h + 1) for h in range(H)] if alone else [slice(0, H)]:
            for b, t, s in chunked.blocks(self.q[:, h], S, C, self.form):
                yield Block((b, h, t), (b, h, s))

    def of_head(self, h: slice) -> Float[Tensor, "*h C 1"]:
        return self.w if self.w.dim() == 2 else self.w[h]

    def empty(self, number: int, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if number not in self.room or self.room[number].numel() < size:
            self.room[number] = self.q.new_empty(size)
        return self.room[number][:size].view(shape)

    def compute(self, block: Block) -> tuple[Float[Tensor, "b h t s C"], Float[Tensor, "b h t s"]]:
        (b, h, t), (_, _, s) = block
        rows, columns = self.rows[block.rows].unsqueeze(3), self.columns[block.columns].unsqueeze(2)
        r = self.empty(0, *rows.shape[:3], columns.shape[3], rows.shape[4])
        if self.factors:
            torch.addcmul(self.one, rows, columns, out=r).reciprocal_()
        else:
            torch.add(rows, columns, out=r).sigmoid_()
        scores = (r.flatten(2, 3) @ self.of_head(h)).view(r.shape[:4]).mul_(-2.0)
        T, S = self.q.shape[2], self.k.shape[2]
        mask = self.form.of_batch(b).mask
        if mask is None:
            return r, softmax(scores)
        p = torch.arange(t.start, min(t.stop, T)) + (S - T)
        return r, softmax(scores, mask.block(p, torch.arange(s.start, s.stop)))


class _ConcatCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, form, q, k, v, w):  # type: ignore[override]
        ctx.save_for_backward(q, k, v, w)
        ctx.form = form
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        blocks = _Blocks(form, q, k, w)
        for block in blocks:
            _, weights = blocks.compute(block)
            out[block.rows] = weights @ v[block.columns]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, w = ctx.saved_tensors
        dq, dk, dv, dw = (torch.zeros_like(x) for x in (q, k, v, w))
        blocks = _Blocks(ctx.form, q, k, w)
        for block in blocks:
            r, weights = blocks.compute(block)
            one_grad = grad[block.rows]
            dv[block.columns] += weights.mT @ one_grad
            d_scores = one_grad @ v[block.columns].mT
            d_scores -= (d_scores * weights).sum(-1, keepdim=True)
            d_scores *= weights
            of_w = (d_scores.flatten(2).unsqueeze(2) @ r.flatten(2, 3)).mT  # (b, h, C, 1)
            if w.dim() == 2:
                dw += of_w.sum((0, 1))
            else:
                dw[block.rows[1]] += of_w.sum(0)
            d = torch.mul(r, d_scores.unsqueeze(-1), out=blocks.empty(1, *r.shape))
            d.addcmul_(d, r, value=-1.0)
            dq[block.rows] += d.sum(3)
            dk[block.columns] += d.sum(2)
        # What all pairs have in common: 4 w, and −2 for w itself.
        common = 4.0 * w.mT
        wanted: list[Any] = [dq.mul_(common), dk.mul_(common), dv, dw.mul_(-2.0)]
        return None, *(x if needed else None for x, needed in zip(wanted, ctx.needs_input_grad[1:]))
