"""Attention pooling: a query that is not part of the sequence selects one of its tokens."""

import torch
from torch import nn

from regard.attention import Offsets, attend, padding, weights


def test_query_selects_the_matching_key_of_each_sequence():
    keys, values = torch.eye(4)[None].repeat(2, 1, 1), torch.arange(8.0).view(2, 4, 1)
    query = 50 * torch.eye(4)[2].view(1, 1, 4).expand(2, 1, 4)  # equal to the third key
    out = attend(query, keys, values, mask=padding(torch.tensor([4, 2])))
    torch.testing.assert_close(out[0], values[0, 2:3])
    # The matching key of the second sequence is padding: the weights of the others are uniform.
    torch.testing.assert_close(out[1], values[1, :2].mean(0, keepdim=True))


def test_learned_query_over_packed_sequences_finds_the_marked_token():
    torch.manual_seed(0)
    query, offsets = (
        nn.Parameter(torch.randn(1, 1, 8)),
        Offsets.from_starts(torch.tensor([0, 5, 7, 16], dtype=torch.int32)),
    )
    query_offsets = Offsets.from_starts(torch.arange(4, dtype=torch.int32))
    tokens = torch.randn(16, 1, 8)
    marked = torch.tensor([1, 6, 12])
    tokens[:, 0, 0] = 0.0
    tokens[marked, 0, 0] = 4.0
    optimizer = torch.optim.Adam([query], lr=0.1)
    for _ in range(100):
        out = attend(query.expand(3, 1, 8), tokens, tokens, q_offsets=query_offsets, k_offsets=offsets)
        loss = (out - tokens[marked]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    positions = weights(query.expand(3, 1, 8), tokens, q_offsets=query_offsets, k_offsets=offsets)[:, 0, 0].argmax(-1)
    assert positions.tolist() == [1, 1, 5]
