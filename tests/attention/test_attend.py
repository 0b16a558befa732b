"""Every backend against the float64 reference: outputs and all gradients."""

import copy

import pytest
import torch

from regard.attention import attend, use
from regard.attention.reference import reference
from tests.attention.helpers import (
    TOLERANCE,
    Slope,
    assert_all_close,
    masks,
    outputs_and_gradients,
    random,
    scores,
)

# B, H, G (heads of k and v), T, S, D, C (width of k), Dv, lengths
SHAPES = {
    "plain": (2, 2, 2, 5, 5, 4, 4, 4, [5, 3]),
    "odd": (3, 4, 2, 7, 9, 6, 6, 5, [9, 0, 4]),
    "more queries than keys": (2, 2, 1, 9, 7, 4, 4, 7, [7, 1]),
    "one query": (3, 2, 2, 1, 6, 4, 4, 4, [0, 6, 2]),
    "one key": (2, 2, 2, 4, 1, 4, 4, 4, [0, 1]),
    "few queries": (2, 2, 2, 2, 11, 4, 4, 4, [11, 5]),
    "different widths": (2, 2, 1, 5, 6, 4, 3, 8, [2, 6]),
    "long": (1, 2, 2, 67, 70, 4, 4, 4, [40]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["auto", "batched_matmul", "sdpa", "concat_cpu", "chunked"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_backend_equals_reference(shape, backend, with_bias, dtype):
    B, H, G, T, S, D, C, Dv, lengths = SHAPES[shape]
    tensors = random(B, H, T, D), random(B, G, S, C, seed=1), random(B, G, S, Dv, seed=2)
    grad = random(B, H, T, Dv, seed=3)
    torch.manual_seed(4)
    for score_name, score in scores(D, C, S, H).items():
        for mask_name, mask in masks(torch.tensor(lengths)).items():
            if backend == "batched_matmul" and "concat" in score_name:
                continue
            if backend == "concat_cpu" and ("concat" not in score_name or with_bias):
                continue
            if backend == "sdpa" and (
                "concat" in score_name or with_bias or mask_name not in ("none", "causal", "padding", "causal&padding")
            ):
                continue
            exact_score, exact_bias = copy.deepcopy(score).double(), Slope(H).double() if with_bias else None
            expected = outputs_and_gradients(
                lambda q, k, v, score=exact_score, bias=exact_bias, mask=mask: reference(q, k, v, score, mask, bias),
                tensors,
                exact_score,
                exact_bias,
                grad,
            )
            cast_score, cast_bias = copy.deepcopy(score).to(dtype), Slope(H).to(dtype) if with_bias else None

            def call(q, k, v, score=cast_score, bias=cast_bias, mask=mask):
                if backend == "auto":
                    return attend(q, k, v, score=score, mask=mask, bias=bias)
                with use(backend):
                    return attend(q, k, v, score=score, mask=mask, bias=bias)

            actual = outputs_and_gradients(call, [x.to(dtype) for x in tensors], cast_score, cast_bias, grad.to(dtype))
            try:
                assert_all_close(actual, expected, TOLERANCE[dtype])
            except AssertionError as error:
                raise AssertionError(f"{score_name}, {mask_name}: {error}") from error
