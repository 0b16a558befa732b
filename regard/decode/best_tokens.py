"""The most probable tokens of every row of logits, without a log-softmax over the vocabulary."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.rules.constraints import Constraints, log_sum_exp

# The maxima of about this many strided groups of tokens show which groups contain the best tokens.
_GROUPS = 256


def best_tokens(
    logits: Float[Tensor, "B K V"], count: int, constraints: Constraints, step: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B K C"], Int[Tensor, "B K C"]]:
    """The log-probabilities and ids of the `count` most probable allowed tokens (at most V), best first.

    With a shortlist, V is the number of its tokens, and each slot is normalized over its own ones. Disallowed tokens
    have a log-probability of -inf; the others keep theirs. `logits` are overwritten.

    >>> from regard.decode.decode_config import DecodeConfig
    >>> from regard.decode.protocol import SpecialTokens
    >>> constraints = Constraints(1, 0, DecodeConfig(), SpecialTokens(), torch.device("cpu"))
    >>> constraints.set_slots([0], [9], [[]])
    >>> log_p, ids = best_tokens(torch.tensor([[[0.0, 0.0, 0.0, 0.0, 2.0, 1.0]]]), 2, constraints, torch.tensor([0]))
    >>> ids
    tensor([[[4, 5]]])
    """
    B, K, V = logits.shape
    logits = constraints.restrict(logits)
    log_sum = log_sum_exp(logits)
    forced = constraints.forced_tokens(step)
    forced_log_p = logits.gather(-1, constraints.columns(forced.clamp(min=0))[:, None, None].expand(-1, K, 1))
    for column in constraints.banned_columns:
        logits[..., column] = -torch.inf
    bans_eos = constraints.bans_eos(step)
    if bans_eos is not None:
        for column in constraints.end_columns:
            logits[..., column].masked_fill_(bans_eos[:, None], -torch.inf)
    top, columns = top_logits(logits.view(B * K, V), min(count, V))
    top, ids = top.view(B, K, -1), constraints.tokens(columns).view(B, K, -1)
    is_forced = (forced >= 0)[:, None, None]
    rest = torch.full_like(top[..., 1:], -torch.inf)
    top = torch.where(is_forced, torch.cat((forced_log_p, rest), dim=-1), top)
    ids = torch.where(is_forced, forced[:, None, None], ids)
    return top - log_sum, ids


def top_logits(logits: Float[Tensor, "R V"], count: int) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """torch.topk over the last axis, faster for a large vocabulary on a CPU.

    The `count` best tokens are in the `count` groups with the largest maxima. Groups are strided (token i belongs to
    group i mod G), so that their maxima are one vectorized pass over contiguous memory.

    >>> top_logits(torch.arange(5000.0)[None], 2)[1]
    tensor([[4999, 4998]])
    """
    V = logits.shape[1]
    size = V // _GROUPS  # tokens per group
    if size < 2 * count or logits.is_cuda:
        return logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
    grouped = logits[:, : size * _GROUPS].unflatten(1, (size, _GROUPS))
    maxima = grouped.amax(1)
    group = maxima.max(1, keepdim=True)[1] if count == 1 else maxima.topk(count, dim=1)[1]
    members = grouped.gather(2, group[:, None].expand(-1, size, -1)).flatten(1)
    candidates = torch.cat((members, logits[:, size * _GROUPS :]), dim=1)
    top, index = candidates.max(1, keepdim=True) if count == 1 else candidates.topk(count, dim=1)
    within, remainder = index.div(count, rounding_mode="floor"), index - members.shape[1]
    ids = within * _GROUPS + group.gather(1, index % count)
    return top, torch.where(remainder >= 0, size * _GROUPS + remainder, ids)
