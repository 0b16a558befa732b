import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.data.batching.batch_sampler import Planner
from regard.errors import RegardError
from regard.layers.packed import pack


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(30, 90), st.integers(3, 30), st.booleans())
def test_a_plan_fits_its_shape(lengths, budget, max_len, constant_shapes):
    """Whatever the lengths, those that were expected or others: `pack` refuses what does not fit."""
    assume(min(lengths) <= max_len)
    planner = Planner(max_len / 2, budget=budget, max_len=max_len, constant_shapes=constant_shapes)
    plan = planner.plan(np.random.default_rng(0), np.array(lengths))
    assert sorted(row for rows in plan for row in rows) == [i for i, one in enumerate(lengths) if one <= max_len]
    packed = [pack([[1] * lengths[i] for i in rows], **planner.shape(max(lengths[i] for i in rows))) for rows in plan]
    assert all(one.offsets.total <= budget for one in packed)
    assert all(one.max_len <= max_len for one in packed)  # learned positions end there, and the filling has some too
    if constant_shapes:
        assert len({(one.offsets.total, len(one)) for one in packed}) <= 1
        assert {one.max_len for one in packed} <= {16, 32, max_len}


def test_one_side_is_both():
    planner = Planner(5.0, budget=32, max_len=16)
    lengths = np.random.default_rng(1).integers(1, 16, 200)
    one, both = (planner.plan(np.random.default_rng(0), *sides) for sides in ((lengths,), (lengths, lengths)))
    assert one == both
    assert len(one) > 30


def test_a_sentence_may_not_be_longer_than_a_batch():
    with pytest.raises(RegardError, match=r"A sentence may have 64 tokens, but a batch only 32\. Raise"):
        Planner(5.0, budget=32, max_len=64)


def test_batches_of_short_sentences_are_full_too():
    """Constant shapes have room for many short sentences: only a pool's last batch may be far from full."""
    lengths = np.random.default_rng(0).lognormal(3.2, 0.55, 20_000).round().clip(2, 128).astype(int)
    planner = Planner(float(lengths.mean()), budget=8192, max_len=128, constant_shapes=True)
    filled = [lengths[rows].sum() / 8192 for rows in planner.plan(np.random.default_rng(1), lengths)]
    assert min(lengths) < 6
    assert sum(share < 0.9 for share in filled) <= 3  # of the pool's two ends: its shortest and its last
    assert np.mean(filled) > 0.97


@pytest.mark.parametrize("lengths", [[9], [9, 12, 30]])
def test_an_epoch_without_a_batch_is_an_error(lengths):
    """Otherwise training would plan one epoch after another, forever."""
    planner = Planner(5.0, budget=32, max_len=8)
    with pytest.raises(RegardError, match=f"no batch: all {len(lengths)} sequences are longer than max_len .8 tokens"):
        planner.plan(np.random.default_rng(0), np.array(lengths))
    assert planner.plan(np.random.default_rng(0), np.array([*lengths, 8])) == [[len(lengths)]]
    assert planner.plan(np.random.default_rng(0), np.array([], int)) == []
