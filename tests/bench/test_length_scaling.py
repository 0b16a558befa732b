"""Benchmark of growing lengths: limits of time and memory."""

import pytest
import torch

from regard.attention import SCORES
from regard.bench import AttentionShape, Measurement, bench_growth
from regard.bench.length_scaling import Limits
from regard.bench.measurement import Unsupported

TINY = AttentionShape(tokens=1, heads=1, width=8, hidden=4)
UNLIMITED = Limits(memory=1 << 40, seconds=1e6)


def test_every_score_is_measured_at_every_length():
    report = bench_growth("cpu", [8, 4], shape=TINY, limits=UNLIMITED, compiled=False)
    assert list(dict.fromkeys(row.case for row in report.rows)) == list(SCORES)
    assert [row.length for row in report.rows[:4]] == [4, 4, 8, 8]
    assert all(row.seconds for row in report.rows)


def test_implementation_stops_at_the_time_limit():
    limits = Limits(memory=1 << 40, seconds=0.0)
    rows = bench_growth("cpu", [4, 8, 16], ["dot"], shape=TINY, limits=limits, compiled=False).rows
    assert [(row.length, row.seconds is None) for row in rows] == [(4, False), (4, False), (8, True), (8, True)]
    assert rows[-1].note.startswith("stopped: a call would take ")


def test_memory_is_checked_before_allocation():
    limits = Limits(memory=1 << 30, seconds=1.0)
    limits.check(None, 128)
    limits.check(Measurement("concat", "formula", length=64, seconds=0.001, memory=200 << 20), 128)
    with pytest.raises(Unsupported, match=r"out of memory: would need 1\.2 GiB"):
        limits.check(Measurement("concat", "formula", length=64, seconds=0.001, memory=300 << 20), 128)
    with pytest.raises(Unsupported, match=r"would take 2\.000 s"):
        limits.check(Measurement("concat", "formula", length=64, seconds=0.5, memory=1), 128)
    assert Limits.for_device(torch.device("cpu")).memory <= 4 << 30
