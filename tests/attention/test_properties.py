"""Properties of attention that hold for every input, tested with hypothesis."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.attention import Offsets, attend, causal, padding, weights
from tests.attention.helpers import MASK_NAMES, SCORE_NAMES, masks, random, scores


@st.composite
def problems(draw):
    B, T, S = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 7))
    G, group, D = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 6))
    lengths = torch.tensor(draw(st.lists(st.integers(0, S), min_size=B, max_size=B)))
    seed = draw(st.integers(0, 1000))
    torch.manual_seed(seed)
    score = scores(D, D, S, G * group)[draw(st.sampled_from(SCORE_NAMES))].double()
    mask = masks(lengths)[draw(st.sampled_from(MASK_NAMES))]
    q, k, v = (random(B, h, n, D, seed=seed + i) for i, (h, n) in enumerate([(G * group, T), (G, S), (G, S)]))
    return q, k, v, score, mask


@settings(max_examples=60, deadline=None)
@given(problems())
def test_rows_of_weights_sum_to_one_or_zero(problem):
    q, k, v, score, mask = problem
    T, S = q.shape[2], k.shape[2]
    matrix = weights(q, k, score=score, mask=mask)
    allowed = torch.ones(1, 1, 1, S, dtype=torch.bool)
    if mask is not None:
        allowed = mask.block(torch.arange(T) + S - T, torch.arange(S))
    allowed = allowed.expand(len(q), q.shape[1], T, S)
    assert (matrix[~allowed] == 0).all()
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1), allowed.any(-1).double())
    repeated = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    torch.testing.assert_close(attend(q, k, v, score=score, mask=mask), matrix @ repeated)


@settings(max_examples=40, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_output_does_not_depend_on_the_order_of_keys(problem, generator):
    q, k, v, score, _ = problem
    if "Location" in repr(score):
        return
    order = list(range(k.shape[2]))
    generator.shuffle(order)
    torch.testing.assert_close(attend(q, k[:, :, order], v[:, :, order], score=score), attend(q, k, v, score=score))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_grouped_heads_equal_repeated_heads(problem):
    q, k, v, score, mask = problem
    k_all, v_all = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    torch.testing.assert_close(attend(q, k, v, score=score, mask=mask), attend(q, k_all, v_all, score=score, mask=mask))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from(SCORE_NAMES), st.booleans())
def test_packed_padded_and_single_sequences_agree(lengths, name, is_causal):
    torch.manual_seed(0)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    offsets = Offsets(starts, total=sum(lengths), max_len=max(1, *lengths))
    score = scores(4, 4, offsets.max_len, 2)[name].double()
    mask = causal() if is_causal else None
    q, k, v = (random(offsets.total, 2, 4, seed=i) for i in range(3))
    packed = attend(q, k, v, score=score, mask=mask, q_offsets=offsets, k_offsets=offsets)
    padded_inputs = []
    for x in (q, k, v):
        padded = torch.zeros(len(lengths), offsets.max_len, 2, 4, dtype=x.dtype)
        padded[offsets.valid] = x
        padded_inputs.append(padded.transpose(1, 2))
    key_padding = padding(torch.tensor(lengths))
    padded = attend(*padded_inputs, score=score, mask=key_padding if mask is None else mask & key_padding)
    torch.testing.assert_close(packed, padded.transpose(1, 2)[offsets.valid])
    for start, end in zip(starts.tolist(), starts[1:].tolist()):
        sequence = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        torch.testing.assert_close(packed[start:end], attend(*sequence, score=score, mask=mask)[0].transpose(0, 1))
