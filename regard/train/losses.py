"""Cross-entropy with label smoothing, and R-Drop, computed in chunks so that the full logits never exist."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORED = 0


class LossParts(NamedTuple):
    """Sums over the counted tokens: what is minimised, the plain negative log-likelihood, and how many they were."""

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    tokens: Float[Tensor, ""]


def chunk_rows(vocab: int, device: torch.device) -> int:
    """How many rows of logits to hold at a time: what stays in a CPU's cache, or fills a GPU."""
    cells = 2**20 if device.type == "cpu" else 2**27
    return max(64, cells // vocab)


def token_loss(
    features: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, "N"],
    smoothing: float = 0.0,
    twin: Float[Tensor, "N E"] | None = None,
    divergence: float = 0.0,
) -> LossParts:
    """(1 - ε)·nll + ε·(mean over the vocabulary of -log p), summed over the targets that are not 0.

    With a `twin` (a second pass over the same batch with other dropout) the loss is the mean of both passes plus
    `divergence` times the mean of the two Kullback-Leibler divergences between them (R-Drop, Liang et al. 2021).
    The gradient is computed in the same sweep as the loss: a chunk of logits lives once.

    >>> token_loss(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([3, 0])).nll  # log 8
    tensor(2.0794)
    """
    if not torch.is_grad_enabled():
        features, weight = features.detach(), weight.detach()  # otherwise the sweep would compute their gradients
    loss, nll, tokens = _TokenLoss.apply(features, weight, targets, smoothing, twin, divergence)
    return LossParts(loss, nll, tokens)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight, targets, smoothing, twin, divergence):
        wanted = any(ctx.needs_input_grad)
        passes = [features] if twin is None else [features, twin]
        # Matrix products run in the width that autocast asks for; sums and logarithms in float32.
        narrow = features.dtype
        if torch.is_autocast_enabled(features.device.type):
            narrow = torch.get_autocast_dtype(features.device.type)
        narrow_weight = weight.to(narrow)
        feature_grads = [torch.empty_like(x) for x in passes] if wanted else []
        weight_grad = torch.zeros_like(weight) if wanted else None
        loss = features.new_zeros((), dtype=torch.float32)
        nll = torch.zeros_like(loss)
        counted = (targets != IGNORED).float()
        rows = chunk_rows(weight.shape[0], features.device)
        for begin in range(0, len(targets), rows):
            part = slice(begin, begin + rows)
            narrow_rows = [x[part].to(narrow) for x in passes]
            logits = [(x @ narrow_weight.T).float() for x in narrow_rows]
            part_loss, part_nll, grads = _rows_loss(logits, targets[part], counted[part], smoothing, divergence, wanted)
            loss += part_loss
            nll += part_nll
            for x, grad, feature_grad in zip(narrow_rows, grads, feature_grads):
                grad = grad.to(narrow)
                feature_grad[part] = grad @ narrow_weight
                weight_grad += grad.T @ x
        ctx.pair = twin is not None
        ctx.save_for_backward(weight_grad, *feature_grads)
        tokens = counted.sum()
        ctx.mark_non_differentiable(nll, tokens)
        return loss, nll, tokens

    @staticmethod
    def backward(ctx, scale, _nll, _tokens):
        weight_grad, *feature_grads = ctx.saved_tensors
        first, second = (feature_grads[0] * scale, feature_grads[1] * scale if ctx.pair else None)
        return first, weight_grad * scale, None, None, second, None


def _rows_loss(
    logits: list[Float[Tensor, "R V"]],
    targets: Int[Tensor, "R"],
    counted: Float[Tensor, "R"],
    smoothing: float,
    divergence: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss and plain nll of some rows, and the gradient of the loss by the logits. The logits are used up."""
    vocab = logits[0].shape[1]
    share = counted / len(logits)
    loss = torch.zeros_like(counted)
    nll = torch.zeros_like(counted)
    logprobs = []
    for row in logits:
        norm = row.logsumexp(dim=-1)
        own_nll = norm - row.gather(1, targets[:, None])[:, 0]
        nll += own_nll
        loss += (1 - smoothing) * own_nll + (smoothing * (norm - row.mean(dim=-1)) if smoothing else 0.0)
        logprobs.append(row.sub_(norm[:, None]))
    grads = []
    if wanted or divergence:
        probs = [row.exp() for row in logprobs]
    if divergence:
        p, q = probs
        gap = logprobs[0] - logprobs[1]
        forward_kl, backward_kl = (p * gap).sum(-1), -(q * gap).sum(-1)
        # The mean over the two passes is taken at the end, so the divergence is counted twice here.
        loss += divergence * (forward_kl + backward_kl)
    if wanted:
        for i, prob in enumerate(probs):
            grad = prob.clone() if divergence else prob
            if smoothing:
                grad -= smoothing / vocab
            grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), smoothing - 1))
            if divergence:
                # d KL(p||q)/dp's logits = p (log p - log q - KL);  d KL(q||p)/dp's logits = p - q
                sign, kl = (1, forward_kl) if i == 0 else (-1, backward_kl)
                grad += divergence * (prob * (sign * gap - kl[:, None]) + prob - probs[1 - i])
            grads.append(grad.mul_(share[:, None]))
    return (loss * share).sum(), (nll * share).sum(), grads
