"""Cross-entropy with label smoothing and R-Drop, computed in chunks so that the full logits are never in memory."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.batching.batch import IGNORE_INDEX
from regard.kernels.derivatives import once_differentiable
from regard.kernels.triton import cross_entropy


class LossParts(NamedTuple):
    """Sums over the tokens with a target: training loss, negative log-likelihood, and number of tokens."""

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    tokens: Float[Tensor, ""]


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows of logits per chunk: on a CPU small enough for its cache, on a GPU large enough to use all of it."""
    cells = 2**22 if device.type == "cpu" else 2**27
    return max(64, cells // vocab)


def token_loss(
    features: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float = 0.0,
    second_pass: Float[Tensor, "N E"] | None = None,
    divergence: float = 0.0,
    bias: Float[Tensor, "V"] | None = None,
    logit_cap: float = 0.0,
) -> LossParts:
    """(1 - ε)·nll + ε·(mean over the vocabulary of -log p), summed over the targets that are not IGNORE_INDEX.

    `second_pass` are the features of a second pass over the same batch with different dropout. With it, the loss is the
    mean of both passes plus `divergence` times the mean of the two Kullback-Leibler divergences between them (R-Drop,
    Liang et al. 2021). Gradients are computed together with the loss, so that each chunk of logits is computed once.
    With `logit_cap` the logits are soft-capped, cap · tanh(logit / cap).

    >>> token_loss(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([3, -1])).nll  # log 8
    tensor(2.0794)
    """
    if not torch.is_grad_enabled():
        features, weight = features.detach(), weight.detach()  # otherwise their gradients would be computed too
        bias = None if bias is None else bias.detach()
    loss, nll, tokens = _TokenLoss.apply(features, weight, targets, smoothing, second_pass, divergence, bias, logit_cap)
    return LossParts(loss, nll, tokens)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight, targets, smoothing, second_pass, divergence, bias, logit_cap):
        needs_grad = any(ctx.needs_input_grad)
        passes = [features] if second_pass is None else [features, second_pass]
        # Matrix products run in the autocast dtype; sums and logarithms in float32.
        dtype = features.dtype
        if torch.is_autocast_enabled(features.device.type):
            dtype = torch.get_autocast_dtype(features.device.type)
        fused = partial(cross_entropy.cross_entropy, ignore_index=IGNORE_INDEX)
        compute = fused if cross_entropy.supports(features) else _loss_and_grads
        if logit_cap:
            compute = partial(_capped_loss_and_grads, logit_cap=logit_cap)
        loss, nll, weight_grad, bias_grad, feature_grads = compute(
            passes, weight, targets, smoothing, divergence, bias, dtype, needs_grad
        )
        tokens = (targets != IGNORE_INDEX).float().sum()
        ctx.has_second_pass = second_pass is not None
        ctx.save_for_backward(weight_grad, bias_grad, *feature_grads)
        ctx.mark_non_differentiable(nll, tokens)
        return loss, nll, tokens

    @staticmethod
    @once_differentiable
    def backward(ctx, scale, _nll, _tokens):
        weight_grad, bias_grad, *feature_grads = ctx.saved_tensors
        first, second = (feature_grads[0] * scale, feature_grads[1] * scale if ctx.has_second_pass else None)
        bias_grad = None if bias_grad is None else bias_grad * scale
        return first, weight_grad * scale, None, None, second, None, bias_grad, None


def _loss_and_grads(
    passes: list[Float[Tensor, "N E"]],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float,
    divergence: float,
    bias: Float[Tensor, "V"] | None,
    dtype: torch.dtype,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Sums of the loss and of the negative log-likelihood and, on request, gradients of weight, bias and features."""
    cast_weight = weight.to(dtype)
    # The smoothed part of the target is 1/V for every token, so it only needs the mean row of the weight matrix:
    # the mean logit is features · mean row, and its gradient has rank one.
    mean_row = weight.mean(dim=0, dtype=torch.float32)
    feature_grads = [torch.empty_like(x) for x in passes] if needs_grad else []
    weight_grad = torch.zeros_like(weight) if needs_grad else None
    mean_grad = torch.zeros_like(mean_row)
    bias_grad = torch.zeros_like(bias) if needs_grad and bias is not None else None
    mean_bias = 0.0 if bias is None else bias.mean(dtype=torch.float32)
    loss, nll = (torch.zeros((), device=targets.device) for _ in range(2))
    counted = (targets != IGNORE_INDEX).float()
    targets = targets.clamp(min=0)
    share = counted / len(passes)
    rows = chunk_rows(weight.shape[0], targets.device)
    for begin in range(0, len(targets), rows):
        part = slice(begin, begin + rows)
        inputs = [x[part].to(dtype) for x in passes]
        logits = [x @ cast_weight.T for x in inputs]
        if bias is not None:
            logits = [row + bias.to(dtype) for row in logits]
        norms, nlls, divergences, grads = _rows_loss(logits, targets[part], smoothing, divergence, needs_grad)
        chunk_share = share[part]
        for x, norm, pass_nll in zip(passes, norms, nlls):
            nll += (pass_nll * chunk_share).sum()
            smooth = norm - x[part].float() @ mean_row - mean_bias
            loss += (((1 - smoothing) * pass_nll + smoothing * smooth) * chunk_share).sum()
        for kl in divergences:
            loss += divergence * (kl * chunk_share).sum()
        for x, grad, feature_grad in zip(inputs, grads, feature_grads):
            assert weight_grad is not None
            cast_share = chunk_share[:, None].to(dtype)
            feature_grad[part] = (grad @ cast_weight - smoothing * mean_row.to(dtype)) * cast_share
            scaled = x * cast_share
            weight_grad += grad.T @ scaled
            mean_grad += scaled.sum(dim=0, dtype=torch.float32)
            if bias_grad is not None:
                bias_grad += (chunk_share @ grad.float()).to(bias_grad.dtype)
    if weight_grad is not None:
        weight_grad -= (smoothing / len(weight)) * mean_grad.to(weight_grad.dtype)
    if bias_grad is not None:
        bias_grad -= (smoothing / len(weight)) * counted.sum()
    return loss, nll, weight_grad, bias_grad, feature_grads


def _capped_loss_and_grads(
    passes: list[Float[Tensor, "N E"]],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float,
    divergence: float,
    bias: Float[Tensor, "V"] | None,
    dtype: torch.dtype,
    needs_grad: bool,
    *,
    logit_cap: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """`_loss_and_grads` for soft-capped logits, which are not linear in the features: autograd on each chunk."""
    share = (targets != IGNORE_INDEX).float() / len(passes)
    targets = targets.clamp(min=0)
    loss, nll = (torch.zeros((), device=targets.device) for _ in range(2))
    inputs = [x.detach().to(dtype).requires_grad_(needs_grad) for x in passes]
    parameters = [p.detach().to(dtype).requires_grad_(needs_grad) for p in (weight, bias) if p is not None]
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (*parameters, *inputs)] if needs_grad else []
    rows = chunk_rows(weight.shape[0], targets.device)
    for begin in range(0, len(targets), rows):
        part = slice(begin, begin + rows)
        with torch.set_grad_enabled(needs_grad):
            logits = [torch.nn.functional.linear(x[part], *parameters).float() for x in inputs]
            logprobs = [((row / logit_cap).tanh() * logit_cap).log_softmax(-1) for row in logits]
            nlls = [-row.gather(1, targets[part, None])[:, 0] for row in logprobs]
            losses = [(1 - smoothing) * pass_nll - smoothing * row.mean(-1) for pass_nll, row in zip(nlls, logprobs)]
            if len(logprobs) == 2:
                first, second = logprobs
                # Both divergences: Σ (p − q)(log p − log q); each pass has half of the share.
                losses.append(divergence * ((first.exp() - second.exp()) * (first - second)).sum(-1))
            chunk_loss = sum(((rows_loss * share[part]).sum() for rows_loss in losses), start=torch.zeros_like(loss))
        if needs_grad:
            for total, grad in zip(grads, torch.autograd.grad(chunk_loss, [*parameters, *inputs])):
                total += grad
        loss += chunk_loss.detach()
        nll += sum((pass_nll.detach() * share[part]).sum() for pass_nll in nlls)
    if not needs_grad:
        return loss, nll, None, None, []
    converted = [grad.to(x.dtype) for grad, x in zip(grads, [p for p in (weight, bias) if p is not None] + passes)]
    return loss, nll, converted[0], None if bias is None else converted[1], converted[len(parameters) :]


def _rows_loss(
    logits: list[Tensor], targets: Tensor, smoothing: float, divergence: float, needs_grad: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """For each pass over a chunk of rows: log-sum-exp, negative log-likelihood, divergence from the other pass, and the
    gradient of the logits (without the smoothing term, which is the same for all rows). The logits are overwritten.
    """
    norms, nlls, probs, logprobs = [], [], [], []
    for row in logits:
        full = row.float()
        target_logit = full.gather(1, targets[:, None])
        top = full.amax(dim=-1, keepdim=True)
        # Exponentials dominate the cost on a CPU, so they are computed once for the sum and the gradient.
        full.sub_(top)
        powers = full.exp() if divergence else full.exp_()
        total = powers.sum(dim=-1, keepdim=True)
        norm = top + total.log()
        norms.append(norm[:, 0])
        nlls.append((norm - target_logit)[:, 0])
        probs.append(powers.div_(total))
        logprobs.append(full.sub_(total.log()) if divergence else full)
    if not needs_grad:
        return norms, nlls, [], []
    if not divergence:
        divergences: list[Tensor] = []
        grads = probs
    else:
        p, q = probs
        gap = logprobs[0].sub_(logprobs[1])
        divergences = [(p * gap).sum(-1), -(q * gap).sum(-1)]
        # With respect to the logits of p: d KL(p||q) = p (log p - log q - KL), d KL(q||p) = p - q. With respect to
        # those of q: the same, with p and q swapped.
        grads = [
            p + divergence * (p * (gap - divergences[0][:, None]) + p - q),
            q + divergence * (q * (-gap - divergences[1][:, None]) + q - p),
        ]
    for grad in grads:
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), smoothing - 1))
    return norms, nlls, divergences, [grad.to(row.dtype) for grad, row in zip(grads, logits)]
