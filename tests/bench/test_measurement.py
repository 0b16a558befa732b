"""Measurement of time and memory, and reports."""

import json

import pytest
import torch

from regard.bench import BenchReport, Ceilings, Measurement, measurement
from regard.bench.measurement import (
    Implementation,
    Unsupported,
    Work,
    compare,
    free_memory,
    measure_ceilings,
    peak_memory,
)
from regard.errors import RegardError

CPU = torch.device("cpu")
CEILINGS = Ceilings(flops=1e9, bytes=1e9, machine="a machine")


def test_implementations_alternate(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(measurement, "_time_calls", lambda call, repeats, device: (order.append(call()), 1.0)[1])
    implementations = [Implementation(name, lambda name=name: lambda: name) for name in "abc"]
    compare("case", implementations, Work(), CEILINGS, CPU, rounds=4)
    assert order == [*"abc", *"cba", *"bca", *"acb"]


def test_failures_are_measurements_with_a_note():
    def absent():
        raise Unsupported("not installed")

    def large():
        def call():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 EiB.")

        return call

    def broken():
        raise NotImplementedError("no such kernel\nand more")

    implementations = [
        Implementation("a", absent),
        Implementation("b", large),
        Implementation("c", broken),
        Implementation("d", lambda: lambda: None),
    ]
    rows = compare("case", implementations, Work(), CEILINGS, CPU, rounds=1)
    assert [row.note for row in rows] == ["not installed", "out of memory", "NotImplementedError: no such kernel", ""]
    assert [row.seconds is None for row in rows] == [True, True, True, False]


def test_rate_and_share_follow_from_the_work():
    (row,) = compare(
        "case", [Implementation("a", lambda: lambda: None)], Work(flops=5.0, bytes=10.0), CEILINGS, CPU, rounds=1
    )
    assert row.rate == pytest.approx(5.0 / row.seconds)
    assert row.share == pytest.approx(10.0 / 1e9 / row.seconds)  # ten bytes take longer than five operations


def test_peak_memory_of_a_call():
    size = 64 << 20
    memory = peak_memory(lambda: torch.ones(size // 4).sum(), CPU)
    if memory is None:
        pytest.skip("this system does not report peak memory")
    assert 0.98 * size < memory < 1.2 * size
    assert peak_memory(lambda: None, CPU) < 1 << 20
    assert free_memory(CPU) > size


def test_ceilings_are_measured():
    ceilings = measure_ceilings(CPU, torch.float32)
    assert ceilings.flops > 1e6
    assert ceilings.bytes > 1e6
    assert ceilings.tanhs > 1e5
    assert "float32" in ceilings.machine


ROWS = [
    Measurement("dot", "Regard", True, 64, 0.001, 3 << 20, 2e9, "FLOP/s", 0.5),
    Measurement("dot", "SDPA", False, 64, 0.002),
    Measurement("dot", "Flex", False, 64, note="not installed"),
    Measurement("dot", "Regard", True, 128, 0.004, 6 << 20),
]


def test_report_as_table():
    table = str(BenchReport("attention", CEILINGS, ROWS, ("x-transformers",)))
    assert "| dot | 64 | **Regard** | 1.000 ms | 2.00 | 3.0 MiB | 2 GFLOP/s | 50.0% |  |" in table
    assert "| dot | 64 | Flex | – |  |  |  |  | not installed |" in table
    assert table.startswith("attention: a machine\nceilings: matrix product 1 GFLOP/s, memory copy 1 GB/s")
    assert table.endswith("not installed: x-transformers")


def test_report_as_json(tmp_path):
    BenchReport("attention", CEILINGS, ROWS).save(tmp_path / "rows.json")
    data = json.loads((tmp_path / "rows.json").read_text())
    assert [Measurement(**row) for row in data["rows"]] == ROWS
    assert data["ceilings"]["flops"] == 1e9
    with pytest.raises(RegardError, match="JSON"):
        BenchReport("attention", CEILINGS, ROWS).save(tmp_path / "rows.csv")


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]], ids=["lines", "bars"])
def test_report_as_plot(tmp_path, rows):
    BenchReport("attention", CEILINGS, rows).plot(tmp_path / "plot.svg")
    plot = (tmp_path / "plot.svg").read_text()
    assert "Regard" in plot or "<svg" in plot
    with pytest.raises(RegardError, match="png"):
        BenchReport("attention", CEILINGS, rows).plot(tmp_path / "plot.bmp")


def test_plot_without_measurements_raises(tmp_path):
    with pytest.raises(RegardError, match="no measurements to plot"):
        BenchReport("attention", CEILINGS, ROWS[2:3]).plot(tmp_path / "plot.png")
