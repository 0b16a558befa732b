"""A free-standing query: a question that belongs to no sequence, and reads out of one what answers it."""

import torch
from torch import nn

from regard.attention import Offsets, attend, padding, weights


def test_a_question_picks_the_token_that_answers_it_in_each_sequence():
    keys, values = torch.eye(4)[None].repeat(2, 1, 1), torch.arange(8.0).view(2, 4, 1)
    question = 50 * torch.eye(4)[2].view(1, 1, 4).expand(2, 1, 4)  # looks for what has a 1 in third place
    out = attend(question, keys, values, mask=padding(torch.tensor([4, 2])))
    torch.testing.assert_close(out[0], values[0, 2:3])
    torch.testing.assert_close(
        out[1], values[1, :2].mean(0, keepdim=True)
    )  # the answer is beyond its end: no favourite


def test_a_learned_question_over_packed_sequences_learns_to_find_the_marked_token():
    torch.manual_seed(0)
    question, offsets = nn.Parameter(torch.randn(1, 1, 8)), Offsets.of(torch.tensor([0, 5, 7, 16], dtype=torch.int32))
    ask = Offsets.of(torch.arange(4, dtype=torch.int32))
    tokens = torch.randn(16, 1, 8)
    marked = torch.tensor([1, 6, 12])
    tokens[:, 0, 0] = 0.0
    tokens[marked, 0, 0] = 4.0
    optimizer = torch.optim.Adam([question], lr=0.1)
    for _ in range(100):
        out = attend(question.expand(3, 1, 8), tokens, tokens, q_offsets=ask, k_offsets=offsets)
        loss = (out - tokens[marked]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = weights(question.expand(3, 1, 8), tokens, q_offsets=ask, k_offsets=offsets)[:, 0, 0].argmax(-1)
    assert found.tolist() == [1, 1, 5]  # within its own sequence
