"""Helpers of the tests of attention: scores and masks by name, inputs, and comparisons."""

import torch
from torch import nn

from regard.attention import (
    Concat,
    Cosine,
    Dot,
    General,
    Location,
    ScaledDot,
    Score,
    causal,
    local,
    padding,
    window,
)


class FakeCudaTensor(torch.Tensor):
    """A CPU tensor whose `is_cuda` is True, for conditions that are checked before anything is computed."""

    is_cuda = True


class Slope(nn.Module):
    """A bias that decays with the distance: one learned parameter per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-1.5, 2.0, heads))

    def forward(self, p, s):
        return self.slope[:, None, None] / (1 + (p[:, None] - s).abs())


class Tanh(Score):
    """A custom score with a parameter, Σ_i w_i tanh(s_i − h_i), which only `chunked` supports."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 2.0, width))

    def pair_scores(self, q, k):
        return (q.unsqueeze(-2) - k.unsqueeze(-3)).tanh() @ self.weight

    def pair_elements(self, width):
        return width


def scores(D: int, C: int, S: int, H: int) -> dict:
    """Every score, with and without parameters per head; scores that need D = C only if that is the case."""
    scores = {
        "general": General(D, C),
        "general-heads": General(D, C, heads=H),
        "concat": Concat(D, C, hidden=5),
        "concat-joint": Concat(D, C, hidden=5, joint=True),
        "concat-heads": Concat(D, C, hidden=5, heads=H),
        "location": Location(D, max_keys=S + 3),
        "location-heads": Location(D, max_keys=S + 3, heads=H),
    }
    if D == C:
        scores |= {
            "dot": Dot(),
            "scaled_dot": ScaledDot(),
            "cosine": Cosine(3.0),
            "cosine-learned": Cosine(10.0, learned=True),
            "cosine-heads": Cosine(10.0, learned=True, heads=H),
        }
    return scores


def masks(lengths: torch.Tensor) -> dict:
    return {
        "none": None,
        "causal": causal(),
        "padding": padding(lengths),
        "causal&padding": causal() & padding(lengths),
        "window": window(3),
        "local": local(2),
        "local&padding": local(1) & padding(lengths),
        "window&padding": window(2) & padding(lengths),
        "~causal": ~causal(),
        "causal|padding": causal() | padding(lengths),
        "~padding&causal": ~padding(lengths) & causal(),
    }


SCORE_NAMES = sorted(scores(4, 4, 4, 2))
MASK_NAMES = sorted(masks(torch.tensor([1])))


TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def outputs_and_gradients(function, tensors, score, bias, grad):
    """The output of function(*tensors), and the gradients of the tensors and of the parameters of score and bias."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    parameters = [*score.parameters(), *(bias.parameters() if bias is not None else ())]
    out.backward(grad)
    return [out, *(x.grad for x in tensors), *(p.grad for p in parameters)]


def assert_all_close(actual, expected, tolerance):
    for x, y in zip(actual, expected, strict=True):
        # A tensor that the score does not use may have no gradient, or a zero one.
        x, y = (torch.zeros(()) if z is None else z.double() for z in (x, y))
        assert torch.isfinite(x).all()
        torch.testing.assert_close(*torch.broadcast_tensors(x, y), rtol=tolerance, atol=tolerance)


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
