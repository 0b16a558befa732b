"""Packed batches of sequences."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.layers.packed import pack

sequences = st.lists(st.lists(st.integers(1, 99), max_size=9), max_size=8)


@given(sequences, st.booleans())
def test_padded_returns_the_sequences(rows, as_arrays):
    batch = pack([np.array(row, np.int32) for row in rows] if as_arrays else rows)
    ids, lengths = batch.padded(fill=7)
    assert ids.shape == (len(rows), max(map(len, rows), default=0))
    assert lengths.tolist() == [len(row) for row in rows]
    for row, length, expected in zip(ids.tolist(), lengths.tolist(), rows):
        assert row[:length] == expected
        assert set(row[length:]) <= {7}
    assert batch.positions.tolist() == [position for row in rows for position in range(len(row))]
    assert (batch.ids.dtype, batch.positions.dtype, batch.offsets.starts.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )


@given(sequences, st.integers(0, 60), st.integers(0, 5), st.integers(9, 20))
def test_padding_forms_separate_sequences(rows, padding, empty, max_len):
    real = sum(map(len, rows))
    fillers = -(-padding // max_len)
    batch = pack(rows, total=real + padding, count=len(rows) + fillers + empty, max_len=max_len, fill=3)
    lengths = batch.offsets.lengths.tolist()
    assert (len(batch), batch.max_len, batch.offsets.total) == (len(rows) + fillers + empty, max_len, real + padding)
    assert lengths[: len(rows)] == [len(row) for row in rows]
    assert sum(lengths[len(rows) : len(rows) + fillers]) == padding
    assert max(lengths, default=0) <= max_len
    assert lengths[len(rows) + fillers :] == [0] * empty
    assert batch.ids[real:].tolist() == [3] * padding
    assert batch.offsets.starts[-1] == len(batch.ids) == len(batch.positions) == real + padding
    ids, _ = batch.padded()
    assert ids.shape == (len(batch), max_len)


def test_longest_sequence_is_the_default_max_len():
    batch = pack([[1, 2], [3]], total=8)
    assert batch.offsets.lengths.tolist() == [2, 1, 2, 2, 1]
    assert pack([], total=4).offsets.lengths.tolist() == [4]
    assert len(pack([])) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total": 2}, "the sequences have 3 tokens; total is 2"),
        ({"max_len": 1}, "a sequence has 2 tokens; max_len is 1"),
        ({"count": 1}, "2 sequences including padding; count is 1"),
        ({"count": 2, "total": 4}, "3 sequences"),
    ],
)
def test_too_small_bounds_raise(options, message):
    with pytest.raises(ValueError, match=message):
        pack([[1, 2], [3]], **options)


def test_to_keeps_all_fields():
    batch = pack([[5, 6, 7], [8]], total=6, count=4)
    moved = batch.to("cpu", non_blocking=True)
    assert torch.equal(moved.ids, batch.ids)
    assert torch.equal(moved.positions, batch.positions)
    assert torch.equal(moved.offsets.starts, batch.offsets.starts)
    assert (moved.offsets.total, moved.max_len, len(moved)) == (6, 3, 4)
    assert batch.to("meta").offsets.starts.device.type == "meta"


def test_packing_is_fast():
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 999, rng.integers(5, 30)).tolist() for _ in range(400)]
    best = float("inf")
    for _ in range(10):
        start = time.process_time()
        pack(rows, total=16384, count=1024, max_len=64)
        best = min(best, time.process_time() - start)
    assert best < 5e-3, f"{best * 1e3:.2f} ms"  # about 0.5 ms of one core
