"""Masks: evaluation in blocks, combination, and decomposition into parts."""

import jaxtyping
import pytest
import torch

from regard.attention import Concat, Mask, ScaledDot, attend, causal, local, padding, use, weights, window
from regard.attention.masks import MaskParts
from regard.errors import RegardError
from tests.attention.helpers import masks, random

LENGTHS = torch.tensor([4, 0, 2])


def full_matrix(mask, T=4, S=6):
    return mask.block(torch.arange(T) + S - T, torch.arange(S)).expand(3, 1, T, S)


def test_last_query_is_aligned_with_the_last_key():
    assert full_matrix(causal())[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert full_matrix(window(2))[0, 0].int().tolist() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert full_matrix(local(1))[0, 0].int().tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]


def test_padding_masks_only_keys():
    assert full_matrix(padding(LENGTHS))[:, 0].sum(-1).tolist() == [[4] * 4, [0] * 4, [2] * 4]


def test_masks_combine_with_operators():
    a, b = full_matrix(causal()), full_matrix(padding(LENGTHS))
    assert torch.equal(full_matrix(causal() & padding(LENGTHS)), a & b)
    assert torch.equal(full_matrix(causal() | padding(LENGTHS)), a | b)
    assert torch.equal(full_matrix(~causal()), ~a)


@pytest.mark.parametrize("name", masks(LENGTHS))
def test_blocks_and_batches_are_parts_of_the_full_matrix(name):
    mask = masks(LENGTHS)[name]
    if mask is None:
        return
    block = mask.block(torch.arange(1, 3) + 2, torch.arange(2, 5)).expand(3, 1, 2, 3)
    assert torch.equal(block, full_matrix(mask)[:, :, 1:3, 2:5])
    indices = torch.tensor([2, 0])
    selected = mask.select_sequences(indices).block(torch.arange(4) + 2, torch.arange(6)).expand(2, 1, 4, 6)
    assert torch.equal(selected, full_matrix(mask)[indices])


@pytest.mark.parametrize("name", masks(LENGTHS))
def test_decomposed_mask_equals_the_original(name):
    mask = masks(LENGTHS)[name]
    parts = MaskParts.from_mask(mask)
    if mask is None:
        assert parts.mask is None
        return
    assert torch.equal(full_matrix(parts.mask), full_matrix(mask))
    assert parts.is_relative == mask.is_relative == (name != "padding")


def test_decomposition_finds_causal_window_distance_and_lengths():
    parts = MaskParts.from_mask(
        causal() & (padding(LENGTHS) & window(5) & local(4)) & padding(LENGTHS + 1) & window(3) & ~window(1) & local(2)
    )
    assert parts.causal
    assert parts.window == 3
    assert parts.distance == 2
    assert torch.equal(parts.lengths, LENGTHS)
    parts = MaskParts.from_mask(~padding(LENGTHS) | padding(LENGTHS))
    assert not parts.is_relative


def test_empty_window_is_an_error():
    with pytest.raises(RegardError, match="window must be at least 1"):
        window(0)
    with pytest.raises(RegardError, match="distance must be at least 0"):
        local(-1)


class Custom(Mask):
    """A mask as a user writes one: only `block`."""

    def __init__(self, allowed):
        self.allowed = allowed

    def block(self, p, s):
        return self.allowed[..., p, :][..., s]


@pytest.mark.parametrize("score", [ScaledDot(), Concat(4, 4, 3)], ids=["scaled_dot", "concat"])
@pytest.mark.parametrize("kind", ["custom", "tensor"])
def test_custom_masks_and_tensors_at_any_size(score, kind):
    """600 positions are several blocks; the mask differs among the three sequences."""
    q, k, v = (random(3, 2, 600, 4, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    allowed = random(3, 1, 600, 600) > 0.5
    allowed[0, 0, 5] = False
    expected = weights(q, k, score=score).masked_fill(~allowed, 0)
    expected = (expected / expected.sum(-1, keepdim=True).clamp(min=1e-30)) @ v
    mask = Custom(allowed) if kind == "custom" else allowed
    out = attend(q, k, v, score=score, mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(q, k, score=score, mask=mask) @ v, expected, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_custom_masks_combine_and_apply_to_packed_sequences():
    allowed = random(3, 1, 9, 9) > 0.0
    mask = ~(~Custom(allowed) | ~causal())
    indices = torch.tensor([2, 0])
    selected = mask.select_sequences(indices).select_sequences(slice(1, 2))
    assert torch.equal(selected.block(torch.arange(9), torch.arange(9)), (allowed & causal_matrix(9))[:1])
    x, starts = random(14, 2, 4), torch.tensor([0, 9, 10, 14])
    options = dict(mask=mask, q_offsets=starts, k_offsets=starts)
    with use("reference"):
        expected = attend(x, x, x, **options)
    torch.testing.assert_close(attend(x, x, x, **options), expected)


def causal_matrix(n):
    return torch.ones(n, n).tril().bool()


def test_tensors_broadcast_to_the_weights():
    q, k = random(2, 3, 4), random(2, 5, 4, seed=1)
    allowed = random(2, 3, 5) > 0
    expected = weights(q, k, mask=Custom(allowed[:, None][:, :, [0, 0, 0, 1, 2]]))  # query 0 is at position 2
    assert torch.equal(weights(q, k, mask=allowed), expected)
    assert torch.equal(weights(q[:, None], k[:, None], mask=allowed[:, None])[:, 0], expected)
    for shape in ((3, 5), (1, 5), (2, 1, 5), (1, 3, 5)):
        part = torch.ones(shape, dtype=torch.bool)
        part[..., 2:] = False
        assert (weights(q, k, mask=part)[..., 2:] == 0).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 5), r"must be boolean \(got a tensor of torch.float32\).*is a bias"),
        (torch.ones(5, 3) > 0, r"shape \(5, 3\), the weights have shape \(2, 3, 5\)"),
        (torch.ones(5) > 0, r"shape \(5,\), the weights"),
        ("causal", r"an expression such as causal\(\) .*got str.*subclass Mask"),
        (Mask(), r"The mask Mask has no rule. Define its method block\(p, s\)."),
    ],
    ids=["float", "shape", "axes", "text", "without a rule"],
)
def test_invalid_masks_are_errors(monkeypatch, mask, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # test our message, not the shape checker's
    with pytest.raises(RegardError, match=message):
        attend(random(2, 3, 4), random(2, 5, 4), random(2, 5, 4), mask=mask)


@pytest.mark.parametrize("score", [ScaledDot(), Concat(4, 4, 3)], ids=["scaled_dot", "concat"])
@pytest.mark.parametrize("combine", [lambda mask: mask, lambda mask: causal() & ~mask], ids=["alone", "combined"])
@pytest.mark.parametrize("n", [3, 70])
def test_blocks_of_another_shape_or_dtype_are_errors(monkeypatch, score, combine, n):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    x = random(2, n, 4, dtype=torch.float32)
    for block in (lambda p, s: p != s, lambda p, s: (s - p[:, None]).float(), lambda p, s: p[:, None] > 0):
        mask = combine(type("Own", (Mask,), {"block": lambda self, p, s, block=block: block(p, s)})())
        for call in (attend, lambda q, k, v, **options: weights(q, k, **options)):
            with pytest.raises(RegardError, match=rf"Own\.block returned torch\.\w+ of shape .* for {n} queries"):
                call(x, x, x, score=score, mask=mask)


def test_tensors_do_not_combine_with_expressions_or_packed_sequences():
    allowed = torch.ones(3, 3) > 0
    for combine in (lambda: causal() & allowed, lambda: allowed & causal(), lambda: allowed | causal()):
        with pytest.raises(RegardError, match=r"got Tensor.*alone, as mask="):
            combine()
    x, starts = random(3, 1, 4), torch.tensor([0, 3])
    with pytest.raises(RegardError, match="no meaning for packed"):
        attend(x, x, x, mask=allowed, q_offsets=starts, k_offsets=starts)
