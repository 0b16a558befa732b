"""The loss over a vocabulary on a GPU: a chunk of logits at a time, turned into its gradient where it lies.

A chunk of narrow logits comes from a matrix product, one kernel reads each row and writes its gradient in its place,
and two products take that to the features and the weights. The full logits never exist, and no float32 ones at all.
"""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention import triton_here
from regard.attention.triton_here import power_of_two
from regard.data.batching.pair_batches import IGNORED

# Logits that exist at a time: larger chunks add up the weights' gradient less often.
CELLS = 2**28
# Columns that a program reads at a time, and its warps.
BLOCK, WARPS = 4096, 4


def takes(features: Float[Tensor, "N E"]) -> bool:
    return features.is_cuda and triton_here.FOUND and features.dtype != torch.float64


def sweep(
    passes: list[Float[Tensor, "N E"]],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float,
    divergence: float,
    bias: Float[Tensor, "V"] | None,
    narrow: torch.dtype,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Sums of the loss and of the negative log-likelihood; if wanted, gradients by weight, bias and features."""
    V, N = len(weight), len(targets)
    narrow_weight = weight.to(narrow)
    narrow_bias = None if bias is None else bias.to(narrow)
    inputs = [x.to(narrow) for x in passes]
    feature_grads = [torch.empty_like(x) for x in passes] if wanted else []
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
    bias_grad = torch.zeros_like(bias, dtype=torch.float32) if wanted and bias is not None else None
    losses, nlls = targets.new_zeros((2, N), dtype=torch.float32)
    rows = even_rows(N, V)
    # Rows begin at multiples of 16 bytes, or the matrix units would be fed number by number.
    logits = [x.new_empty(rows, -(-V // 8) * 8) for x in inputs]
    for begin in range(0, N, rows):
        part = slice(begin, min(begin + rows, N))
        chunks = [whole[: part.stop - begin, :V] for whole in logits]
        for x, chunk in zip(inputs, chunks):
            if narrow_bias is None:
                torch.mm(x[part], narrow_weight.T, out=chunk)
            else:
                torch.addmm(narrow_bias, x[part], narrow_weight.T, out=chunk)
        own = targets[part], losses[part], nlls[part]
        if divergence and wanted:
            twin_rows(*chunks, *own, smoothing, divergence)
        else:
            for chunk in chunks:
                row_losses(chunk, *own, smoothing, 1 / len(chunks), wanted)
        if weight_grad is None:
            continue
        for x, grad, feature_grad in zip(inputs, chunks, feature_grads):
            if feature_grad.dtype == narrow:
                torch.mm(grad, narrow_weight, out=feature_grad[part])
            else:
                feature_grad[part] = grad @ narrow_weight
            _add_product(weight_grad, grad.T, x[part])
            if bias_grad is not None:
                bias_grad += grad.sum(dim=0, dtype=torch.float32)
    if weight_grad is not None:
        weight_grad = weight_grad.to(weight.dtype)
    if bias is not None and bias_grad is not None:
        bias_grad = bias_grad.to(bias.dtype)
    return losses.sum(), nlls.sum(), weight_grad, bias_grad, feature_grads


def even_rows(count: int, vocab: int) -> int:
    """How many rows a chunk has, so that all are about alike.

    >>> even_rows(25_600, 32_000)
    6400
    """
    chunks = max(1, -(-count * vocab // CELLS))
    return -(-count // chunks // 128) * 128


@torch.library.custom_op("regard::row_losses", mutates_args=("logits", "losses", "nlls"))
def row_losses(
    logits: Tensor, targets: Tensor, losses: Tensor, nlls: Tensor, smoothing: float, share: float, wanted: bool
) -> None:
    """Adds each row's loss and negative log-likelihood, times `share`; if wanted, logits become their gradient."""
    from regard.training import vocabulary_triton

    vocabulary_triton.vocabulary_rows[(len(targets),)](
        *(logits, logits.stride(0), targets, losses, nlls, logits.shape[1], smoothing, share),
        IGNORED=IGNORED,
        WANTED=wanted,
        BLOCK=_block(logits.shape[1]),
        num_warps=WARPS,
    )


@torch.library.custom_op("regard::twin_rows", mutates_args=("first", "second", "losses", "nlls"))
def twin_rows(
    first: Tensor,
    second: Tensor,
    targets: Tensor,
    losses: Tensor,
    nlls: Tensor,
    smoothing: float,
    divergence: float,
) -> None:
    """The same for two passes at once and how far they are from each other (R-Drop)."""
    from regard.training import vocabulary_triton

    vocabulary_triton.vocabulary_twins[(len(targets),)](
        *(first, second, first.stride(0), second.stride(0)),
        *(targets, losses, nlls, first.shape[1], smoothing, divergence),
        IGNORED=IGNORED,
        BLOCK=_block(first.shape[1]),
        num_warps=WARPS,
    )


@row_losses.register_fake
def _(logits, targets, losses, nlls, smoothing, share, wanted):
    return None


@twin_rows.register_fake
def _(first, second, targets, losses, nlls, smoothing, divergence):
    return None


def _block(vocab: int) -> int:
    return min(BLOCK, power_of_two(vocab, 32))


def _add_product(total: Float[Tensor, "V E"], a: Float[Tensor, "V n"], b: Float[Tensor, "n E"]) -> None:
    """total += a @ b, in float32 where the library can."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif not a.is_cuda:
        total += a @ b
    elif _adds_in_float32():
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


@functools.cache
def _adds_in_float32() -> bool:
    """Whether torch adds a product of narrow matrices to a float32 one; not all versions do."""
    total, a = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, a, total.dtype, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())
