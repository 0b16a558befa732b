"""Coverage penalty: how much cross-attention each source position has received (GNMT, Wu et al. 2016, section 7)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.recording import record
from regard.decode.protocol import Decodable
from regard.errors import RegardError


def step_with_attention(
    model: Decodable, state: Any, last: Int[Tensor, "B K"]
) -> tuple[Float[Tensor, "B K V"], Any, Float[Tensor, "B K S"]]:
    """One decoding step, with its cross-attention averaged over heads and layers."""
    attention: list[Tensor] = []
    if isinstance(model, nn.Module):
        with record(model) as recording:
            logits, state = model.step(state, last)
        # The beams are the queries of the cross-attention: (B, H, K, S).
        attention = [
            recorded.weights().mean(1) for recorded in recording.values() if recorded.kind == "cross" and recorded.calls
        ]
    if not attention:
        raise RegardError(
            "coverage_penalty requires a model with cross-attention; this model has none.",
            "Set coverage_penalty to 0.",
        )
    return logits, state, torch.stack(attention).mean(0)


def coverage_term(coverage: Float[Tensor, "B C S"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B C"]:
    """sum over s of log min(coverage_s, 1): 0 if every source position is fully covered, else negative.

    >>> coverage_term(torch.tensor([[[0.5, 1.5, 0.0]]]), torch.tensor([2]))
    tensor([[-0.6931]])
    """
    is_valid = torch.arange(coverage.shape[-1], device=coverage.device) < lengths[:, None]
    clamped = coverage.clamp(min=torch.finfo(coverage.dtype).tiny, max=1.0)  # log 0 would exclude the hypothesis
    return clamped.log().masked_fill(~is_valid[:, None], 0.0).sum(-1)
