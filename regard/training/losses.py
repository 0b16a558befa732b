"""Cross-entropy with label smoothing, and R-Drop, computed in chunks so that the full logits never exist."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.batches import IGNORED
from regard.kernels import cross_entropy_cuda


class LossParts(NamedTuple):
    """Sums over the counted tokens: what is minimised, the plain negative log-likelihood, and how many they were."""

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    tokens: Float[Tensor, ""]


def chunk_rows(vocab: int, device: torch.device) -> int:
    """How many rows of logits to hold at a time: enough for a CPU's products, in its cache; or what fills a GPU."""
    cells = 2**22 if device.type == "cpu" else 2**27
    return max(64, cells // vocab)


def token_loss(
    features: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float = 0.0,
    twin: Float[Tensor, "N E"] | None = None,
    divergence: float = 0.0,
    bias: Float[Tensor, "V"] | None = None,
) -> LossParts:
    """(1 - ε)·nll + ε·(mean over the vocabulary of -log p), summed over the targets that are not IGNORED.

    With a `twin` (a second pass over the same batch with other dropout) the loss is the mean of both passes plus
    `divergence` times the mean of the two Kullback-Leibler divergences between them (R-Drop, Liang et al. 2021).
    The gradient is computed in the same sweep as the loss: a chunk of logits lives once.

    >>> token_loss(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([3, -1])).nll  # log 8
    tensor(2.0794)
    """
    if not torch.is_grad_enabled():
        features, weight = features.detach(), weight.detach()  # otherwise the sweep would compute their gradients
        bias = None if bias is None else bias.detach()
    loss, nll, tokens = _TokenLoss.apply(features, weight, targets, smoothing, twin, divergence, bias)
    return LossParts(loss, nll, tokens)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight, targets, smoothing, twin, divergence, bias):
        wanted = any(ctx.needs_input_grad)
        passes = [features] if twin is None else [features, twin]
        # Matrix products run in the width that autocast asks for; sums and logarithms in float32.
        narrow = features.dtype
        if torch.is_autocast_enabled(features.device.type):
            narrow = torch.get_autocast_dtype(features.device.type)
        fused = partial(cross_entropy_cuda.cross_entropy, ignore_index=IGNORED)
        sweep = fused if cross_entropy_cuda.supports(features) else _sweep
        loss, nll, weight_grad, bias_grad, feature_grads = sweep(
            passes, weight, targets, smoothing, divergence, bias, narrow, wanted
        )
        tokens = (targets != IGNORED).float().sum()
        ctx.pair = twin is not None
        ctx.save_for_backward(weight_grad, bias_grad, *feature_grads)
        ctx.mark_non_differentiable(nll, tokens)
        return loss, nll, tokens

    @staticmethod
    def backward(ctx, scale, _nll, _tokens):
        weight_grad, bias_grad, *feature_grads = ctx.saved_tensors
        first, second = (feature_grads[0] * scale, feature_grads[1] * scale if ctx.pair else None)
        return first, weight_grad * scale, None, None, second, None, None if bias_grad is None else bias_grad * scale


def _sweep(
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
    narrow_weight = weight.to(narrow)
    # The smoothed part of the target is the same for every token, 1/V, so all that it needs is the mean row:
    # the mean logit is features · mean row, and its gradient a matrix of rank one.
    mean_row = weight.mean(dim=0, dtype=torch.float32)
    feature_grads = [torch.empty_like(x) for x in passes] if wanted else []
    weight_grad = torch.zeros_like(weight) if wanted else None
    mean_grad = torch.zeros_like(mean_row)
    bias_grad = torch.zeros_like(bias) if wanted and bias is not None else None
    mean_bias = 0.0 if bias is None else bias.mean(dtype=torch.float32)
    loss, nll = (torch.zeros((), device=targets.device) for _ in range(2))
    counted = (targets != IGNORED).float()
    targets = targets.clamp(min=0)
    share = counted / len(passes)
    rows = chunk_rows(weight.shape[0], targets.device)
    for begin in range(0, len(targets), rows):
        part = slice(begin, begin + rows)
        inputs = [x[part].to(narrow) for x in passes]
        logits = [x @ narrow_weight.T for x in inputs]
        if bias is not None:
            logits = [row + bias.to(narrow) for row in logits]
        norms, nlls, divergences, grads = _rows_loss(logits, targets[part], smoothing, divergence, wanted)
        own_share = share[part]
        for x, norm, own_nll in zip(passes, norms, nlls):
            nll += (own_nll * own_share).sum()
            smooth = norm - x[part].float() @ mean_row - mean_bias
            loss += (((1 - smoothing) * own_nll + smoothing * smooth) * own_share).sum()
        for kl in divergences:
            loss += divergence * (kl * own_share).sum()
        for x, grad, feature_grad in zip(inputs, grads, feature_grads):
            assert weight_grad is not None
            narrow_share = own_share[:, None].to(narrow)
            feature_grad[part] = (grad @ narrow_weight - smoothing * mean_row.to(narrow)) * narrow_share
            shared = x * narrow_share
            weight_grad += grad.T @ shared
            mean_grad += shared.sum(dim=0, dtype=torch.float32)
            if bias_grad is not None:
                bias_grad += (own_share @ grad.float()).to(bias_grad.dtype)
    if weight_grad is not None:
        weight_grad -= (smoothing / len(weight)) * mean_grad.to(weight_grad.dtype)
    if bias_grad is not None:
        bias_grad -= (smoothing / len(weight)) * counted.sum()
    return loss, nll, weight_grad, bias_grad, feature_grads


def _rows_loss(
    logits: list[Tensor], targets: Tensor, smoothing: float, divergence: float, wanted: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Of some rows of logits, which are used up, for each pass over them: log-sum-exp, negative log-likelihood,
    divergence from the other pass, and the gradient by the logits (without smoothing's part, the same for all rows).
    """
    norms, nlls, shares, logprobs = [], [], [], []
    for row in logits:
        full = row.float()
        wanted_logit = full.gather(1, targets[:, None])
        top = full.amax(dim=-1, keepdim=True)
        # Exponentials are what costs on a CPU: the same ones serve the sum and the gradient.
        full.sub_(top)
        powers = full.exp() if divergence else full.exp_()
        total = powers.sum(dim=-1, keepdim=True)
        norm = top + total.log()
        norms.append(norm[:, 0])
        nlls.append((norm - wanted_logit)[:, 0])
        shares.append(powers.div_(total))
        logprobs.append(full.sub_(total.log()) if divergence else full)
    if not wanted:
        return norms, nlls, [], []
    if not divergence:
        divergences: list[Tensor] = []
        grads = shares
    else:
        p, q = shares
        gap = logprobs[0].sub_(logprobs[1])
        divergences = [(p * gap).sum(-1), -(q * gap).sum(-1)]
        # By the logits of p: d KL(p||q) = p (log p - log q - KL), d KL(q||p) = p - q; by those of q likewise.
        grads = [
            p + divergence * (p * (gap - divergences[0][:, None]) + p - q),
            q + divergence * (q * (-gap - divergences[1][:, None]) + q - p),
        ]
    for grad in grads:
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), smoothing - 1))
    return norms, nlls, divergences, [grad.to(row.dtype) for grad, row in zip(grads, logits)]
