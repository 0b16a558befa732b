"""float16 on a CPU: dot products exceed its maximum, 65504, and every backend still equals float64.

Queries, keys and the matrices of scores are integer multiples of small powers of two, so that all scores are exact in
float32: any difference is an overflow or a rounding to float16.
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
BACKENDS = (None, "batched_matmul", "sdpa", "chunked", "concat_cpu", "reference")  # None: chosen by dispatch
CASES = [
    (name, backend, mask)
    for name in SCORE_NAMES
    for backend in BACKENDS
    for mask in MASKS
    if not (backend in ("batched_matmul", "sdpa") and "concat" in name)
    and not (backend == "concat_cpu" and "concat" not in name)
    and not (backend == "sdpa" and mask.startswith("~"))
]


def make_integer_score(name: str) -> Score:
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


def to_double(score: Score) -> Score:
    return copy.deepcopy(score).double()


def test_dot_products_of_the_inputs_overflow() -> None:
    q, k, _ = inputs(B, H, T, D)
    assert (q @ k.mT).isinf().any()


@pytest.mark.parametrize(("name", "backend", "mask"), CASES)
def test_every_score_and_backend_equals_float64(name, backend, mask) -> None:
    score = make_integer_score(name)
    q, k, v = (x.requires_grad_() for x in inputs(B, H, T, D))
    with explain() as choices:
        if backend is None:
            out = attend(q, k, v, score=score, mask=MASKS[mask])
        else:
            with use(backend):
                out = attend(q, k, v, score=score, mask=MASKS[mask])
    assert backend in (None, choices[0].backend)
    assert out.dtype == torch.float16
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*exact, to_double(score), MASKS[mask])
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)
    out.sum().backward()
    expected.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v))  # Location does not use the keys
    torch.testing.assert_close(v.grad.double(), exact[2].grad, atol=8e-3, rtol=4e-3)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_packed_outputs_weights_and_recordings_equal_float64(name) -> None:
    score = make_integer_score(name)
    starts = torch.tensor([0, 9, 12, 21])
    offsets = Offsets(starts, 21, 9)
    q, k, v = inputs(21, H, D)
    packed = attend(q, k, v, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)
    matrices = weights(q, k, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    class SelfAttention(nn.Module):
        kind = "self"

        def forward(self, q, k, v):
            return attend(q, k, v, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    model = nn.Sequential()
    model.add_module("attention", SelfAttention())
    with record(model) as recording:
        model.attention(q, k, v)
    torch.testing.assert_close(recording["attention"].weights(), matrices)
    for b in range(3):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        sequence = [x[rows].transpose(0, 1)[None].double() for x in (q, k, v)]
        expected = reference(*sequence, to_double(score), causal())[0].transpose(0, 1)
        torch.testing.assert_close(packed[rows].double(), expected, atol=4e-3, rtol=2e-3)
        n = len(expected)
        matrix = matrices[b, :, :n, :n]
        torch.testing.assert_close((matrix.double() @ sequence[2][0]).transpose(0, 1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", ["batched_matmul", "chunked", "reference"])
def test_bias_equals_float64(backend) -> None:
    q, k, v = inputs(B, H, T, D)
    bias = Slope(H)
    with use(backend):
        out = attend(q, k, v, bias=bias)
    expected = reference(q.double(), k.double(), v.double(), scores(D, D, T, H)["scaled_dot"], None, bias.double())
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("backend", ["batched_matmul", "sdpa", "chunked", "reference"])
def test_autocast_equals_float64(backend) -> None:
    """Autocast would cast products to float16."""
    q, k, v = inputs(B, H, T, D)
    with torch.autocast("cpu", dtype=torch.float16), use(backend):
        out = attend(q, k, v)
    expected = reference(q.double(), k.double(), v.double(), scores(D, D, T, H)["scaled_dot"])
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=2e-3)


def test_score_is_scaled_before_rounding() -> None:
    """80,000 / √64 is finite in float16; 80,000 is not."""
    q = torch.full((1, 1, 64), 50.0).half()
    k = torch.full((1, 1, 64), 25.0).half()
    assert scores(64, 64, 1, 1)["scaled_dot"](q, k).item() == 10000
    assert scores(64, 64, 1, 1)["cosine"](q * 1000, k * 1000).item() == pytest.approx(3.0, abs=2e-3)
