"""The compiled choice of tokens against `best_tokens`."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from regard.decode import DecodeConfig
from regard.decode.protocol import SpecialTokens
from regard.decode.rules import Constraints, best_tokens
from regard.kernels.cpu import decode_choice as kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocabulary", [7, 128, 1000])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("min_len", [0, 4])
@pytest.mark.parametrize("has_shortlist", [False, True])
def test_best_tokens(vocabulary, count, min_len, has_shortlist):
    B, K = 5, 3
    torch.manual_seed(0)
    y, bias = torch.randn(B * K, vocabulary) * 5, torch.randn(vocabulary)
    config = DecodeConfig(min_len=min_len, max_len=9, unknown=False)
    constraints = Constraints(B, 2, config, SpecialTokens(), CPU)
    constraints.set_slots(range(B), [9, 9, 9, 2, 9], [[], [5, 6], [], [], []])
    refused = np.zeros((0, 0), np.bool_)
    if has_shortlist:  # all tokens are in the list of the last slot; blocks of the other slots are empty
        lists = [[*range(7), *range(7 + 150 * b, min(vocabulary, 107 + 200 * b))] for b in range(B - 1)]
        constraints.set_token_lists(range(B), [*map(np.array, lists), np.arange(vocabulary)], vocabulary)
        refused = constraints.shortlist.refused.numpy()
    step = torch.tensor([1, 1, 5, 2, 0])
    done = torch.tensor([False, False, False, False, True])
    positions, forced, ban_eos = np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.bool_)
    kernels.start_step(
        *(step.numpy(), done.numpy(), np.array([0, 3, 0, 0, 0]), constraints.limit.numpy()),
        *(constraints.prefix.numpy(), 3, min_len, positions, forced, ban_eos),
    )
    assert positions.tolist() == [1, 4, 5, 2, -1]
    assert_close(torch.from_numpy(forced), constraints.forced_tokens(step))
    top, ids = np.zeros((B * K, count), np.float32), np.zeros((B * K, count), np.int64)
    statistics = np.empty((B * K, 3), np.float32)
    kernels.start_rows(top, ids, statistics)
    for first in range(0, vocabulary, 300):  # in parts
        part = slice(first, first + 300)
        scale = np.ones(vocabulary, np.float32)[part]
        kernels.best_tokens_rows(
            *(y[:, part].contiguous().numpy(), np.ones(B * K, np.float32), scale, bias[part].numpy(), first, positions),
            *(K, refused, np.array(constraints.banned), 3, forced, ban_eos, top, ids, statistics),
        )
    kernels.finish_rows(forced, K, top, ids, statistics)
    expected, expected_ids = best_tokens((y + bias).view(B, K, -1), count, constraints, step)
    rows = 4 * K  # the last slot is done
    assert_close(torch.from_numpy(top[:rows]), expected.flatten(0, 1)[:rows])
    is_finite = torch.isfinite(expected.flatten(0, 1)[:rows])
    assert_close(torch.from_numpy(ids[:rows])[is_finite], expected_ids.flatten(0, 1)[:rows][is_finite])
    assert not top[rows:].any()
