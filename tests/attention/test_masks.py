"""Masks: evaluation in blocks, combination, and decomposition into parts."""

import pytest
import torch

from regard.attention import causal, local, padding, window
from regard.attention.masks import MaskParts
from regard.errors import RegardError
from tests.attention.helpers import masks

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
