"""attend, whatever kernel it takes, against the float64 reference: outputs and all gradients."""

import copy

import pytest
import torch

from regard.attention import attend, use
from regard.attention.reference import reference
from tests.attention.helpers import Slope, masks, random, scores

# B, H, G (heads of k and v), T, S, D, C (width of k), Dv, lengths
SHAPES = {
    "plain": (2, 2, 2, 5, 5, 4, 4, 4, [5, 3]),
    "odd": (3, 4, 2, 7, 9, 6, 6, 5, [9, 0, 4]),
    "tall": (2, 2, 1, 9, 7, 4, 4, 7, [7, 1]),
    "one query": (3, 2, 2, 1, 6, 4, 4, 4, [0, 6, 2]),
    "one key": (2, 2, 2, 4, 1, 4, 4, 4, [0, 1]),
    "few of many": (2, 2, 2, 2, 11, 4, 4, 4, [11, 5]),
    "own width of keys": (2, 2, 1, 5, 6, 4, 3, 8, [2, 6]),
    "long": (1, 2, 2, 67, 70, 4, 4, 4, [40]),
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def outputs_and_gradients(function, tensors, score, bias, grad):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    parameters = [*score.parameters(), *(bias.parameters() if bias is not None else ())]
    out.backward(grad)
    return [out, *(x.grad for x in tensors), *(p.grad for p in parameters)]


def check(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        # A tensor that the score never looks at may have no gradient, or a zero one.
        one, other = (torch.zeros(()) if x is None else x.double() for x in (one, other))
        assert torch.isfinite(one).all()
        torch.testing.assert_close(*torch.broadcast_tensors(one, other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", ["auto", "short", "sdpa", "concat_cpu", "chunked"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_reference(shape, kernel, with_bias, dtype):
    B, H, G, T, S, D, C, Dv, lengths = SHAPES[shape]
    tensors = random(B, H, T, D), random(B, G, S, C, seed=1), random(B, G, S, Dv, seed=2)
    grad = random(B, H, T, Dv, seed=3)
    torch.manual_seed(4)
    for score_name, score in scores(D, C, S, H).items():
        for mask_name, mask in masks(torch.tensor(lengths)).items():
            if kernel == "short" and "concat" in score_name:
                continue
            if kernel == "concat_cpu" and ("concat" not in score_name or with_bias):
                continue
            if kernel == "sdpa" and (
                "concat" in score_name or with_bias or mask_name not in ("none", "causal", "padding", "causal&padding")
            ):
                continue
            exact, exact_bias = copy.deepcopy(score).double(), Slope(H).double() if with_bias else None
            expected = outputs_and_gradients(
                lambda q, k, v, score=exact, bias=exact_bias, mask=mask: reference(q, k, v, score, mask, bias),
                tensors,
                exact,
                exact_bias,
                grad,
            )
            near, near_bias = copy.deepcopy(score).to(dtype), Slope(H).to(dtype) if with_bias else None

            def call(q, k, v, score=near, bias=near_bias, mask=mask):
                if kernel == "auto":
                    return attend(q, k, v, score=score, mask=mask, bias=bias)
                with use(kernel):
                    return attend(q, k, v, score=score, mask=mask, bias=bias)

            found = outputs_and_gradients(call, [x.to(dtype) for x in tensors], near, near_bias, grad.to(dtype))
            try:
                check(found, expected, TOLERANCE[dtype])
            except AssertionError as wrong:
                raise AssertionError(f"{score_name}, {mask_name}: {wrong}") from wrong
