import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.data.batching.batch_sampler import BatchSampler
from regard.errors import RegardError
from regard.layers.packed import pack


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(30, 90), st.integers(3, 30), st.booleans())
def test_batches_fit_their_shape(lengths, budget, max_len, constant_shapes):
    """Also for lengths that do not match the mean length: `pack` raises an error if a batch does not fit."""
    assume(min(lengths) <= max_len)
    sampler = BatchSampler(max_len / 2, budget=budget, max_len=max_len, constant_shapes=constant_shapes)
    batches = sampler.sample(np.random.default_rng(0), np.array(lengths))
    assert sorted(row for rows in batches for row in rows) == [i for i, one in enumerate(lengths) if one <= max_len]
    packed = [
        pack([[1] * lengths[i] for i in rows], **sampler.pack_options(np.array(lengths)[rows])) for rows in batches
    ]
    assert all(one.offsets.total <= budget for one in packed)
    assert all(one.max_len <= max_len for one in packed)  # learned positions end there, for padding too
    if constant_shapes:
        assert len({(one.offsets.total, len(one)) for one in packed}) <= 1
        assert {one.max_len for one in packed} <= {16, 32, max_len}


def test_single_sequences_are_batched_like_equal_pairs():
    sampler = BatchSampler(5.0, budget=32, max_len=16)
    lengths = np.random.default_rng(1).integers(1, 16, 200)
    one, both = (list(sampler.sample(np.random.default_rng(0), *sides)) for sides in ((lengths,), (lengths, lengths)))
    assert one == both
    assert len(one) > 30


def test_max_len_above_the_budget_is_an_error():
    with pytest.raises(RegardError, match=r"The maximum length is 64 tokens, but a batch has only 32\. Raise"):
        BatchSampler(5.0, budget=32, max_len=64)


def test_batches_of_short_sequences_are_full():
    """Constant shapes have slots for many short sequences: only the last batch of a pool may be far from full."""
    lengths = np.random.default_rng(0).lognormal(3.2, 0.55, 20_000).round().clip(2, 128).astype(int)
    sampler = BatchSampler(float(lengths.mean()), budget=8192, max_len=128, constant_shapes=True)
    filled = [lengths[rows].sum() / 8192 for rows in sampler.sample(np.random.default_rng(1), lengths)]
    assert min(lengths) < 6
    assert sum(share < 0.9 for share in filled) <= 3  # at both ends of a pool: its shortest and its last
    assert np.mean(filled) > 0.97


@pytest.mark.parametrize("lengths", [[9], [9, 12, 30]])
def test_epoch_without_a_batch_is_an_error(lengths):
    """Otherwise training would loop over empty epochs forever."""
    sampler = BatchSampler(5.0, budget=32, max_len=8)
    with pytest.raises(RegardError, match=f"All {len(lengths)} sequences are longer than max_len .8 tokens"):
        sampler.sample(np.random.default_rng(0), np.array(lengths))
    assert list(sampler.sample(np.random.default_rng(0), np.array([*lengths, 8]))) == [[len(lengths)]]
    assert not len(sampler.sample(np.random.default_rng(0), np.array([], int)))
