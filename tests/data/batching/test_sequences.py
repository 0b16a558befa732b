import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from regard.data.batching.sequences import Sequences, gather_slices

sentences = st.lists(st.lists(st.integers(4, 99), max_size=6), max_size=9)


@given(sentences, st.sampled_from([None, 2]), st.sampled_from([None, 3]))
def test_rows_with_special_tokens(rows, begin, end):
    extended = Sequences.from_lists(rows).add_special_tokens(begin, end)
    expected = [[2] * (begin is not None) + row + [3] * (end is not None) for row in rows]
    assert [extended[i].tolist() for i in range(len(extended))] == expected
    assert extended.lengths.tolist() == [len(row) for row in expected]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10))))
def test_gather_slices(slices):
    ids = np.arange(30)
    starts, lengths = np.array(slices, np.int64).reshape(-1, 2).T
    expected = [value for start, length in slices for value in ids[start : start + length]]
    assert gather_slices(ids, starts, lengths).tolist() == expected
