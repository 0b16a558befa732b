"""The kernel of exact weights beside the definition: on a GPU, or without one in Triton's interpreter."""

import pytest
import torch

from regard.attention import Cosine, Dot, Offsets, ScaledDot, attend, causal, padding, triton_here, window
from regard.attention.exact import in_tiles, weights
from regard.attention.kernels import Call
from regard.attention.masks import Form
from tests.attention.helpers import Slope, random

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"
LENGTHS = torch.tensor([150, 0])
MASKS = {
    "none": None,
    "causal": causal(),
    "window": window(5),
    "lengths": padding(LENGTHS),
    "all": causal() & window(140) & padding(LENGTHS),
}


def in_the_kernel(call, queries=None):
    """The weights of all heads as the kernel makes them, and as they are made without it."""
    from regard.attention import exact_triton

    rows = None if queries is None else torch.tensor(queries)
    q, k, scale = call.score.fold(call.q if rows is None else call.q[:, :, rows], call.k)
    lengths = call.form.lengths
    form = Form(call.form.causal, call.form.window, None if lengths is None else lengths.to(DEVICE))
    shift = call.k.shape[2] - call.q.shape[2]
    places = None if rows is None else rows.to(DEVICE)
    found = exact_triton.weights(q.to(DEVICE), k.to(DEVICE), scale, form, places, shift, None)
    return found.cpu(), weights(call, queries=queries)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask):
    """More keys than a tile has, more queries than a program, heads that share keys; float32 to 1e-6."""
    q, k = random(2, 4, 37, 24, dtype=torch.float32), random(2, 2, 161, 24, seed=1, dtype=torch.float32)
    found, expected = in_the_kernel(Call(q, k, k, ScaledDot(), Form.of(MASKS[mask])))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert bool((found[1] == 0).all()) == ("lengths" in mask or mask == "all")


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_more_queries_than_keys_and_rows_in_any_order(mask):
    q, k = random(1, 2, 60, 16, dtype=torch.float32), random(1, 2, 20, 16, seed=1, dtype=torch.float32)
    found, expected = in_the_kernel(Call(q, k, k, Dot(), Form.of(MASKS[mask])), [59, 3, 41, 40, 39, 0, 3])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_sixteen_bits_are_no_less_exact():
    q, k = (random(1, 2, 33, 64, seed=seed, dtype=torch.float32).half() for seed in (0, 1))
    found, expected = in_the_kernel(Call(q, k, k, ScaledDot(), Form.of(causal())))
    exact = (q.double() @ k.double().mT / 8).masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=1e-6)


def test_packed_rows_beyond_a_sequence_are_zero():
    from regard.attention import exact_triton

    offsets = Offsets(torch.tensor([0, 40, 40, 47]), total=47, max_len=40)
    x = random(47, 2, 16, dtype=torch.float32)
    expected = weights(Call(x, x, x, ScaledDot(), Form.of(causal()), None, offsets, offsets))
    wide, lengths = x[offsets.rows].transpose(1, 2).to(DEVICE), offsets.lengths.to(DEVICE)
    form = Form(causal=True, lengths=lengths)
    found = exact_triton.weights(wide, wide, 0.25, form, None, 0, lengths)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_the_kernel_takes_on_a_gpu():
    q = random(1, 2, 9, 16, dtype=torch.float32).cuda()
    for score, mask, bias, taken in (
        (ScaledDot(), causal(), None, True),
        (Cosine(), window(3), None, True),
        (ScaledDot(), ~causal(), None, False),
        (ScaledDot(), None, Slope(2).cuda(), False),
    ):
        call = Call(q, q, q, score, Form.of(mask), bias)
        assert in_tiles(call, *score.fold(q, q)[:2], call.form) == taken
        out = attend(q, q, q, score=score, mask=mask, bias=bias)
        torch.testing.assert_close(weights(call) @ q, out, rtol=1e-4, atol=1e-4)
    asking = q.clone().requires_grad_()
    assert not in_tiles(Call(asking, q, q, ScaledDot(), Form()), asking, q, Form())
    weights(Call(asking, q, q, ScaledDot(), Form()))[..., 0].sum().backward()
    assert asking.grad.abs().sum() > 0


def test_without_a_gpu_it_is_not_taken():
    q = random(1, 2, 9, 16, dtype=torch.float32)
    assert not in_tiles(Call(q, q, q, ScaledDot(), Form()), q, q, Form())
