"""The CUDA kernel for exact weights against plain torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from regard.attention import Cosine, Dot, Offsets, ScaledDot, attend, causal, padding, window
from regard.attention.backends.call import Call
from regard.attention.exact_weights import _kernel_supports, compute_weights
from regard.attention.masks import MaskParts
from regard.kernels.triton.exact_weights import exact_weights
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.attention.helpers import Slope, random

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
LENGTHS = torch.tensor([150, 0])
MASKS = {
    "none": None,
    "causal": causal(),
    "window": window(5),
    "lengths": padding(LENGTHS),
    "all": causal() & window(140) & padding(LENGTHS),
}


def run_both(call, queries=None):
    """The weights of all heads, computed by the kernel and without it."""
    parts, rows = call.mask_parts, None if queries is None else torch.tensor(queries)
    q, k, scale = call.score.transform(call.q if rows is None else call.q[:, :, rows], call.k)
    actual = exact_weights(
        q.to(DEVICE),
        k.to(DEVICE),
        scale,
        causal=parts.causal,
        window=parts.window,
        lengths=None if parts.lengths is None else parts.lengths.to(DEVICE),
        rows=None if rows is None else rows.to(DEVICE),
        shift=call.k.shape[2] - call.q.shape[2],
    )
    return actual.cpu(), compute_weights(call, queries=queries)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_equal_plain_torch(mask):
    """With several tiles of keys and of queries, and grouped heads; float32 to 1e-6."""
    q, k = random(2, 4, 37, 24, dtype=torch.float32), random(2, 2, 161, 24, seed=1, dtype=torch.float32)
    actual, expected = run_both(Call(q, k, k, ScaledDot(), MaskParts.from_mask(MASKS[mask])))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert bool((actual[1] == 0).all()) == ("lengths" in mask or mask == "all")


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_more_queries_than_keys_and_selected_rows(mask):
    q, k = random(1, 2, 60, 16, dtype=torch.float32), random(1, 2, 20, 16, seed=1, dtype=torch.float32)
    actual, expected = run_both(Call(q, k, k, Dot(), MaskParts.from_mask(MASKS[mask])), [59, 3, 41, 40, 39, 0, 3])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_float16_inputs_are_exact():
    q, k = (random(1, 2, 33, 64, seed=seed, dtype=torch.float32).half() for seed in (0, 1))
    actual, expected = run_both(Call(q, k, k, ScaledDot(), MaskParts.from_mask(causal())))
    exact = (q.double() @ k.double().mT / 8).masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=1e-6)


def test_rows_beyond_a_packed_sequence_are_zero():
    offsets = Offsets(torch.tensor([0, 40, 40, 47]), total=47, max_len=40)
    x = random(47, 2, 16, dtype=torch.float32)
    expected = compute_weights(Call(x, x, x, ScaledDot(), MaskParts.from_mask(causal()), None, offsets, offsets))
    padded, lengths = x[offsets.rows].transpose(1, 2).to(DEVICE), offsets.lengths.to(DEVICE)
    actual = exact_weights(padded, padded, 0.25, causal=True, lengths=lengths, q_lengths=lengths)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_supported_calls_on_a_gpu():
    q = random(1, 2, 9, 16, dtype=torch.float32).cuda()
    for score, mask, bias, supported in (
        (ScaledDot(), causal(), None, True),
        (Cosine(), window(3), None, True),
        (ScaledDot(), ~causal(), None, False),
        (ScaledDot(), None, Slope(2).cuda(), False),
    ):
        call = Call(q, q, q, score, MaskParts.from_mask(mask), bias)
        assert _kernel_supports(call, *score.transform(q, q)[:2], call.mask_parts) == supported
        out = attend(q, q, q, score=score, mask=mask, bias=bias)
        torch.testing.assert_close(compute_weights(call) @ q, out, rtol=1e-4, atol=1e-4)
    q_with_grad = q.clone().requires_grad_()
    assert not _kernel_supports(Call(q_with_grad, q, q, ScaledDot(), MaskParts()), q_with_grad, q, MaskParts())
    compute_weights(Call(q_with_grad, q, q, ScaledDot(), MaskParts()))[..., 0].sum().backward()
    assert q_with_grad.grad.abs().sum() > 0


def test_cpu_tensors_are_not_supported():
    q = random(1, 2, 9, 16, dtype=torch.float32)
    assert not _kernel_supports(Call(q, q, q, ScaledDot(), MaskParts()), q, q, MaskParts())
