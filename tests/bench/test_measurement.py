"""How things are measured: turns, medians, failures as rows, ceilings, memory."""

import json

import pytest
import torch

from regard.bench import Ceilings, Report, Row, measurement
from regard.bench.measurement import Cannot, Entrant, Work, compare, free_memory, measure_ceilings, peak_memory
from regard.errors import RegardError

CPU = torch.device("cpu")
CEILINGS = Ceilings(flops=1e9, bytes=1e9, machine="a machine")


def test_entrants_take_turns(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(measurement, "_seconds", lambda call, times, device: (seen.append(call()), 1.0)[1])
    entrants = [Entrant(name, lambda name=name: lambda: name) for name in "abc"]
    compare("case", entrants, Work(), CEILINGS, CPU, rounds=4)
    assert seen == [*"abc", *"cba", *"bca", *"acb"]


def test_what_cannot_run_is_a_row_that_says_so():
    def absent():
        raise Cannot("not installed")

    def large():
        def call():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 EiB.")

        return call

    def broken():
        raise NotImplementedError("no such kernel\nand more")

    entrants = [Entrant("a", absent), Entrant("b", large), Entrant("c", broken), Entrant("d", lambda: lambda: None)]
    rows = compare("case", entrants, Work(), CEILINGS, CPU, rounds=1)
    assert [row.note for row in rows] == ["not installed", "out of memory", "NotImplementedError: no such kernel", ""]
    assert [row.seconds is None for row in rows] == [True, True, True, False]


def test_rates_and_shares_follow_from_the_work():
    (row,) = compare("case", [Entrant("a", lambda: lambda: None)], Work(flops=5.0, bytes=10.0), CEILINGS, CPU, rounds=1)
    assert row.rate == pytest.approx(5.0 / row.seconds)
    assert row.share == pytest.approx(10.0 / 1e9 / row.seconds)  # ten bytes take longer than five operations


def test_memory_is_that_of_the_call():
    size = 64 << 20
    taken = peak_memory(lambda: torch.ones(size // 4).sum(), CPU)
    if taken is None:
        pytest.skip("this system does not tell")
    assert 0.98 * size < taken < 1.2 * size
    assert peak_memory(lambda: None, CPU) < 1 << 20
    assert free_memory(CPU) > size


def test_ceilings_are_measured():
    found = measure_ceilings(CPU, torch.float32)
    assert found.flops > 1e6
    assert found.bytes > 1e6
    assert found.tanhs > 1e5
    assert "float32" in found.machine


ROWS = [
    Row("dot", "Regard", True, 64, 0.001, 3 << 20, 2e9, "FLOP/s", 0.5),
    Row("dot", "SDPA", False, 64, 0.002),
    Row("dot", "Flex", False, 64, note="not installed"),
    Row("dot", "Regard", True, 128, 0.004, 6 << 20),
]


def test_the_table_says_it_all():
    told = str(Report("attention", CEILINGS, ROWS, ("x-transformers",)))
    assert "| dot | 64 | **Regard** | 1.000 ms | 2.00 | 3.0 MiB | 2 GFLOP/s | 50.0% |  |" in told
    assert "| dot | 64 | Flex | – |  |  |  |  | not installed |" in told
    assert told.startswith("attention: a machine\nceilings: matrix product 1 GFLOP/s, memory copy 1 GB/s")
    assert told.endswith("not installed: x-transformers")


def test_rows_come_back_from_json(tmp_path):
    Report("attention", CEILINGS, ROWS).save(tmp_path / "rows.json")
    told = json.loads((tmp_path / "rows.json").read_text())
    assert [Row(**row) for row in told["rows"]] == ROWS
    assert told["ceilings"]["flops"] == 1e9
    with pytest.raises(RegardError, match="JSON"):
        Report("attention", CEILINGS, ROWS).save(tmp_path / "rows.csv")


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]], ids=["lines", "bars"])
def test_plots(tmp_path, rows):
    Report("attention", CEILINGS, rows).plot(tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "Regard" in drawn or "<svg" in drawn
    with pytest.raises(RegardError, match="png"):
        Report("attention", CEILINGS, rows).plot(tmp_path / "plot.bmp")


def test_nothing_to_draw(tmp_path):
    with pytest.raises(RegardError, match="nothing to draw"):
        Report("attention", CEILINGS, ROWS[2:3]).plot(tmp_path / "plot.png")
