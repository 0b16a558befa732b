"""What the tests of attention share: scores and masks by name, and inputs, also such as there are on GPUs."""

import torch
from torch import nn

from regard.attention import Concat, Cosine, Dot, General, Location, ScaledDot, causal, padding, window


class OnGPU(torch.Tensor):
    """Says that it lies on a GPU, to whoever asks before computing."""

    is_cuda = True


class Slope(nn.Module):
    """A small bias of relative position: a learned number a head, less with distance."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-1.5, 2.0, heads))

    def forward(self, p, s):
        return self.slope[:, None, None] / (1 + (p[:, None] - s).abs())


def scores(D: int, C: int, S: int, H: int) -> dict:
    """Every score, with and without heads of its own; those that need D = C only when it is so."""
    made = {
        "general": General(D, C),
        "general-heads": General(D, C, heads=H),
        "concat": Concat(D, C, hidden=5),
        "concat-joint": Concat(D, C, hidden=5, joint=True),
        "concat-heads": Concat(D, C, hidden=5, heads=H),
        "location": Location(D, max_keys=S + 3),
        "location-heads": Location(D, max_keys=S + 3, heads=H),
    }
    if D == C:
        made |= {
            "dot": Dot(),
            "scaled_dot": ScaledDot(),
            "cosine": Cosine(3.0),
            "cosine-learned": Cosine(10.0, learned=True),
            "cosine-heads": Cosine(10.0, learned=True, heads=H),
        }
    return made


def masks(lengths: torch.Tensor) -> dict:
    return {
        "none": None,
        "causal": causal(),
        "padding": padding(lengths),
        "causal&padding": causal() & padding(lengths),
        "window": window(3),
        "window&padding": window(2) & padding(lengths),
        "~causal": ~causal(),
        "causal|padding": causal() | padding(lengths),
        "~padding&causal": ~padding(lengths) & causal(),
    }


SCORE_NAMES = sorted(scores(4, 4, 4, 2))
MASK_NAMES = sorted(masks(torch.tensor([1])))


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
