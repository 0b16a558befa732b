"""`regard bench growth`: what attention costs as sequences grow, to where each way to compute it runs out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.attention import SCORES, attend
from regard.bench.attention_speed import DTYPES, Case, Shape, known, known_lengths
from regard.bench.bench_report import Report, in_bytes, in_seconds
from regard.bench.measurement import Cannot, Ceilings, Entrant, Row, compare, free_memory, measure_ceilings
from regard.bench.peers import Attention, compiled_formula, formula
from regard.pipelines import Device, find_device

LENGTHS = {
    "cpu": (128, 256, 512, 1024, 2048),
    "mps": (512, 1024, 2048, 4096),
    "cuda": tuple(2**n for n in range(9, 17)),
}
HEADS = {"cpu": 1, "mps": 4, "cuda": 8}


@dataclass(frozen=True)
class Limits:
    """How far anybody goes: so many bytes, so many seconds a call."""

    memory: int
    seconds: float

    @staticmethod
    def of(device: torch.device) -> "Limits":
        """All of a GPU's memory; of a CPU's, which others need too, half of what is free and no more than 4 GiB."""
        free = free_memory(device)
        return Limits(free, 2.0) if device.type == "cuda" else Limits(min(4 << 30, free // 2), 2.0)

    def check(self, row: Row | None, length: int) -> None:
        """Says what a call of this length would need, going by a shorter one: at worst all grows with the square."""
        if row is None or row.seconds is None or row.length is None:
            return
        more = (length / row.length) ** 2
        if row.seconds * more > self.seconds:
            raise Cannot(f"stopped: a call would take {in_seconds(row.seconds * more)}")
        if row.memory is not None and row.memory > 32 << 20 and row.memory * more > self.memory:
            raise Cannot(f"ran out: would need {in_bytes(round(row.memory * more))}")


def bench_growth(
    device: Device = "auto",
    lengths: Sequence[int] = (),
    scores: Sequence[str] = (),
    *,
    shape: Shape | None = None,
    limits: Limits | None = None,
    compiled: bool = True,
    rounds: int = 3,
) -> Report:
    """Time and peak memory of forward and backward against the length: the formula, the formula compiled, and ours.

    An entrant leaves when it runs out of memory, or when the next call would pass the limits, which is checked before
    anything is allocated. On a CPU the formula is compiled for scaled dot and concat alone: it takes seconds each.

    >>> report = bench_growth("cpu", [4, 8], ["dot"], shape=Shape(8, 1, 8), compiled=False)
    >>> [(row.entrant, row.length) for row in report.rows]
    [('Regard', 4), ('formula, eager', 4), ('Regard', 8), ('formula, eager', 8)]
    """
    where = find_device(device)
    scores = known(scores or tuple(SCORES), tuple(SCORES), "score")
    lengths = sorted(known_lengths(lengths or LENGTHS[where.type]))
    shape = shape or Shape(tokens=1, heads=HEADS[where.type])  # one sequence, however long
    ceilings = measure_ceilings(where, DTYPES[where.type])
    limits = limits or Limits.of(where)
    rows: list[Row] = []
    for name in scores:
        join = compiled and (where.type == "cuda" or name in ("scaled_dot", "concat"))
        rows += _grow(name, lengths, shape, where, ceilings, limits, join, rounds)
    return Report("growth", ceilings, rows)


def _grow(
    name: str,
    lengths: Sequence[int],
    shape: Shape,
    device: torch.device,
    ceilings: Ceilings,
    limits: Limits,
    compiled: bool,
    rounds: int,
) -> list[Row]:
    rows: list[Row] = []
    last: dict[str, Row] = {}
    gone: set[str] = set()
    score = Case(name, "none", max(lengths), True, shape, device, DTYPES[device.type]).make_score()
    ways: dict[str, Attention] = {
        "Regard": lambda q, k, v: attend(q, k, v, score=score),
        "formula, eager": formula(score, None),
    }
    if compiled:
        ways["formula, compiled"] = compiled_formula(score, None, dynamic=True)
    for length in lengths:
        case = Case(name, "none", length, True, shape, device, DTYPES[device.type])
        q, k, v = case.inputs()

        def ready(entrant: str, case: Case = case, inputs: tuple = (q, k, v)):
            limits.check(last.get(entrant), case.length)
            return case.step(ways[entrant], score, *inputs)

        entrants = [
            Entrant(way, lambda way=way, ready=ready: ready(way), way == "Regard") for way in ways if way not in gone
        ]
        for row in compare(name, entrants, case.work(), ceilings, device, rounds, length):
            rows.append(row)
            last[row.entrant] = row
            if row.seconds is None:
                gone.add(row.entrant)
    return rows
