"""Who leaves when sequences grow, and what is said of it."""

import pytest
import torch

from regard.attention import SCORES
from regard.bench import Row, Shape, bench_growth
from regard.bench.length_scaling import Limits
from regard.bench.measurement import Cannot

TINY = Shape(tokens=1, heads=1, width=8, hidden=4)
ROOMY = Limits(memory=1 << 40, seconds=1e6)


def test_every_score_grows():
    report = bench_growth("cpu", [8, 4], shape=TINY, limits=ROOMY, compiled=False)
    assert list(dict.fromkeys(row.case for row in report.rows)) == list(SCORES)
    assert [row.length for row in report.rows[:4]] == [4, 4, 8, 8]
    assert all(row.seconds for row in report.rows)


def test_who_runs_out_is_gone():
    limits = Limits(memory=1 << 40, seconds=0.0)
    rows = bench_growth("cpu", [4, 8, 16], ["dot"], shape=TINY, limits=limits, compiled=False).rows
    assert [(row.length, row.seconds is None) for row in rows] == [(4, False), (4, False), (8, True), (8, True)]
    assert rows[-1].note.startswith("stopped: a call would take ")


def test_memory_is_checked_before_it_is_taken():
    limits = Limits(memory=1 << 30, seconds=1.0)
    limits.check(None, 128)
    limits.check(Row("concat", "formula", length=64, seconds=0.001, memory=200 << 20), 128)
    with pytest.raises(Cannot, match=r"ran out: would need 1\.2 GiB"):
        limits.check(Row("concat", "formula", length=64, seconds=0.001, memory=300 << 20), 128)
    with pytest.raises(Cannot, match=r"would take 2\.000 s"):
        limits.check(Row("concat", "formula", length=64, seconds=0.5, memory=1), 128)
    assert Limits.of(torch.device("cpu")).memory <= 4 << 30
