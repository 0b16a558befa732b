"""float16 on a CPU: its largest number is 65504, and dot products exceed it. Every kernel gives what float64 gives.

Queries, keys and the matrices of scores are whole multiples of small powers of two, so that float32 holds all scores
exactly: a difference is an overflow or a rounding to float16, nothing else.
"""

import copy

import pytest
import torch
from torch import nn

from regard.attention import Offsets, Score, attend, causal, explain, padding, record, use, weights
from regard.attention.reference import reference
from tests.attention.helpers import SCORE_NAMES, Slope, scores

B, H, T, D = 2, 2, 9, 16
LENGTHS = torch.tensor([9, 5])
MASKS = {
    "none": None,
    "causal": causal(),
    "padding": padding(LENGTHS),
    "causal&padding": causal() & padding(LENGTHS),
    "~causal|padding": ~causal() | padding(LENGTHS),
}
KERNELS = (None, "short", "sdpa", "chunked", "concat_cpu", "reference")  # None: the one that is chosen
CASES = [
    (name, kernel, mask)
    for name in SCORE_NAMES
    for kernel in KERNELS
    for mask in MASKS
    if not (kernel in ("short", "sdpa") and "concat" in name)
    and not (kernel == "concat_cpu" and "concat" not in name)
    and not (kernel == "sdpa" and mask.startswith("~"))
]


def score_of(name: str) -> Score:
    generator = torch.Generator().manual_seed(1)
    score = scores(D, D, T, H)[name]
    with torch.no_grad():
        for key, p in score.named_parameters():
            if key.startswith("weight") and key != "weight_a":
                p.copy_(torch.randint(-2, 3, p.shape, generator=generator))
    return score


def inputs(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-16, 17, shape, generator=generator) * 64.0 for _ in range(2))
    return [x.half() for x in (q, k, torch.randn(shape, generator=generator))]


def in_double(score: Score) -> Score:
    return copy.deepcopy(score).double()


def test_the_inputs_are_large_enough() -> None:
    q, k, _ = inputs(B, H, T, D)
    assert (q @ k.mT).isinf().any()


@pytest.mark.parametrize(("name", "kernel", "mask"), CASES)
def test_every_score_and_kernel(name, kernel, mask) -> None:
    score = score_of(name)
    q, k, v = (x.requires_grad_() for x in inputs(B, H, T, D))
    with explain() as choices:
        if kernel is None:
            out = attend(q, k, v, score=score, mask=MASKS[mask])
        else:
            with use(kernel):
                out = attend(q, k, v, score=score, mask=MASKS[mask])
    assert kernel in (None, choices[0].kernel)
    assert out.dtype == torch.float16
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, in_double(score), MASKS[mask])
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)
    out.sum().backward()
    expected.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v))  # Location reads no keys
    torch.testing.assert_close(v.grad.double(), wide[2].grad, atol=8e-3, rtol=4e-3)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_packed_weights_and_recordings(name) -> None:
    """Packed sequences are unpacked for these kernels; weights and recordings are computed apart from them."""
    score = score_of(name)
    starts = torch.tensor([0, 9, 12, 21])
    offsets = Offsets(starts, 21, 9)
    q, k, v = inputs(21, H, D)
    packed = attend(q, k, v, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)
    exact = weights(q, k, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    class Self(nn.Module):
        kind = "self"

        def forward(self, q, k, v):
            return attend(q, k, v, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    model = nn.Sequential()
    model.add_module("attention", Self())
    with record(model) as recording:
        model.attention(q, k, v)
    torch.testing.assert_close(recording["attention"].weights(), exact)
    for b in range(3):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        one = [x[rows].transpose(0, 1)[None].double() for x in (q, k, v)]
        expected = reference(*one, in_double(score), causal())[0].transpose(0, 1)
        torch.testing.assert_close(packed[rows].double(), expected, atol=4e-3, rtol=2e-3)
        n = len(expected)
        of_one = exact[b, :, :n, :n]
        torch.testing.assert_close((of_one.double() @ one[2][0]).transpose(0, 1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kernel", ["short", "chunked", "reference"])
def test_with_a_bias(kernel) -> None:
    q, k, v = inputs(B, H, T, D)
    bias = Slope(H)
    with use(kernel):
        out = attend(q, k, v, bias=bias)
    expected = reference(q.double(), k.double(), v.double(), scores(D, D, T, H)["scaled_dot"], None, bias.double())
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("kernel", ["short", "sdpa", "chunked", "reference"])
def test_under_autocast(kernel) -> None:
    """Autocast would bring products back to float16."""
    q, k, v = inputs(B, H, T, D)
    with torch.autocast("cpu", dtype=torch.float16), use(kernel):
        out = attend(q, k, v)
    expected = reference(q.double(), k.double(), v.double(), scores(D, D, T, H)["scaled_dot"])
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)


def test_a_score_is_scaled_before_it_is_rounded() -> None:
    """80,000 / √64 is a number in float16; 80,000 is not."""
    q = torch.full((1, 1, 64), 50.0).half()
    k = torch.full((1, 1, 64), 25.0).half()
    assert scores(64, 64, 1, 1)["scaled_dot"](q, k).item() == 10000
    assert scores(64, 64, 1, 1)["cosine"](q * 1000, k * 1000).item() == pytest.approx(3.0, abs=2e-3)
