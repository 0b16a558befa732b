"""Masks: what they say block by block, and how they are taken apart."""

import pytest
import torch

from regard.attention import causal, padding, window
from regard.attention.masks import Form
from regard.errors import RegardError
from tests.attention.helpers import masks

LENGTHS = torch.tensor([4, 0, 2])


def whole(mask, T=4, S=6):
    return mask.block(torch.arange(T) + S - T, torch.arange(S)).expand(3, 1, T, S)


def test_the_last_query_stands_at_the_last_key():
    assert whole(causal())[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert whole(window(2))[0, 0].int().tolist() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_padding_masks_keys_alone():
    assert whole(padding(LENGTHS))[:, 0].sum(-1).tolist() == [[4] * 4, [0] * 4, [2] * 4]


def test_combinations():
    a, b = whole(causal()), whole(padding(LENGTHS))
    assert torch.equal(whole(causal() & padding(LENGTHS)), a & b)
    assert torch.equal(whole(causal() | padding(LENGTHS)), a | b)
    assert torch.equal(whole(~causal()), ~a)


@pytest.mark.parametrize("name", masks(LENGTHS))
def test_blocks_and_batches_are_parts_of_the_whole(name):
    mask = masks(LENGTHS)[name]
    if mask is None:
        return
    block = mask.block(torch.arange(1, 3) + 2, torch.arange(2, 5)).expand(3, 1, 2, 3)
    assert torch.equal(block, whole(mask)[:, :, 1:3, 2:5])
    chosen = torch.tensor([2, 0])
    few = mask.of_batch(chosen).block(torch.arange(4) + 2, torch.arange(6)).expand(2, 1, 4, 6)
    assert torch.equal(few, whole(mask)[chosen])


@pytest.mark.parametrize("name", masks(LENGTHS))
def test_taken_apart_and_put_together(name):
    mask = masks(LENGTHS)[name]
    form = Form.of(mask)
    if mask is None:
        assert form.mask is None
        return
    assert torch.equal(whole(form.mask), whole(mask))
    assert form.relative == mask.relative == (name != "padding")


def test_what_kernels_know_is_found():
    form = Form.of(causal() & (padding(LENGTHS) & window(5)) & padding(LENGTHS + 1) & window(3) & ~window(1))
    assert form.causal
    assert form.window == 3
    assert torch.equal(form.lengths, LENGTHS)
    assert not Form.of(~padding(LENGTHS) | padding(LENGTHS)).relative


def test_a_window_on_nothing():
    with pytest.raises(RegardError, match="lets nobody look"):
        window(0)
