"""How much of the source the outputs have looked at (GNMT's coverage, Wu et al. 2016, section 7)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.recording import record
from regard.decode.protocol import Decodable
from regard.errors import RegardError


def step_and_regard(
    model: Decodable, state: Any, last: Int[Tensor, "B K"]
) -> tuple[Float[Tensor, "B K V"], Any, Float[Tensor, "B K S"]]:
    """The model's step, and where its cross-attention looked meanwhile: the mean over heads and layers."""
    regards: list[Tensor] = []
    if isinstance(model, nn.Module):
        with record(model) as recording:
            logits, state = model.step(state, last)
        # The beams are the queries of a cross-attention: (B, H, K, S).
        regards = [one.weights().mean(1) for one in recording.values() if one.kind == "cross" and one.calls]
    if not regards:
        raise RegardError(
            "A coverage penalty needs a model with cross-attention, and this one has none.",
            "Leave coverage_penalty at 0.",
        )
    return logits, state, torch.stack(regards).mean(0)


def coverage_term(coverage: Float[Tensor, "B C S"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B C"]:
    """sum over s of log min(coverage_s, 1): 0 when every source position was looked at in full, else below.

    >>> coverage_term(torch.tensor([[[0.5, 1.5, 0.0]]]), torch.tensor([2]))
    tensor([[-0.6931]])
    """
    inside = torch.arange(coverage.shape[-1], device=coverage.device) < lengths[:, None]
    looked_at = coverage.clamp(min=torch.finfo(coverage.dtype).tiny, max=1.0)  # log 0 would rule an output out
    return looked_at.log().masked_fill(~inside[:, None], 0.0).sum(-1)
