"""`regard bench growth`: time and memory of attention as sequences grow, up to the limit of each implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from regard.attention import SCORES, attend
from regard.bench.attention_speed import DTYPES, AttentionCase, AttentionShape, check_lengths, check_names
from regard.bench.bench_report import BenchReport, format_bytes, format_seconds
from regard.bench.measurement import (
    Ceilings,
    Implementation,
    Measurement,
    Unsupported,
    compare,
    free_memory,
    measure_ceilings,
)
from regard.bench.peers import Attention, compiled_formula, formula
from regard.devices import Device, find_device

LENGTHS = {
    "cpu": (128, 256, 512, 1024, 2048),
    "mps": (512, 1024, 2048, 4096),
    "cuda": tuple(2**n for n in range(9, 17)),
}
HEADS = {"cpu": 1, "mps": 4, "cuda": 8}


@dataclass(frozen=True)
class Limits:
    """Limits of one call: memory in bytes, and seconds."""

    memory: int
    seconds: float

    @staticmethod
    def for_device(device: torch.device) -> "Limits":
        """All free memory of a GPU; on a CPU half of the free memory, at most 4 GiB."""
        free = free_memory(device)
        return Limits(free, 2.0) if device.type == "cuda" else Limits(min(4 << 30, free // 2), 2.0)

    def check(self, previous: Measurement | None, length: int) -> None:
        """Raise if a call of this length would exceed the limits, extrapolated quadratically from a shorter one."""
        if previous is None or previous.seconds is None or previous.length is None:
            return
        factor = (length / previous.length) ** 2
        if previous.seconds * factor > self.seconds:
            raise Unsupported(f"stopped: a call would take {format_seconds(previous.seconds * factor)}")
        if previous.memory is not None and previous.memory > 32 << 20 and previous.memory * factor > self.memory:
            raise Unsupported(f"out of memory: would need {format_bytes(round(previous.memory * factor))}")


def bench_growth(
    device: Device = "auto",
    lengths: Sequence[int] = (),
    scores: Sequence[str] = (),
    *,
    shape: AttentionShape | None = None,
    limits: Limits | None = None,
    compiled: bool = True,
    rounds: int = 3,
) -> BenchReport:
    """Measure time and peak memory of forward and backward over the length: Regard, and the formula (eager, compiled).

    An implementation stops when it runs out of memory, or when the next call would exceed the limits, which is checked
    before anything is allocated. On a CPU the formula is compiled for scaled dot and concat only (seconds each).

    >>> report = bench_growth("cpu", [4, 8], ["dot"], shape=AttentionShape(8, 1, 8), compiled=False)
    >>> [(row.implementation, row.length) for row in report.rows]
    [('Regard', 4), ('formula, eager', 4), ('Regard', 8), ('formula, eager', 8)]
    """
    target = find_device(device)
    scores = check_names(scores or tuple(SCORES), tuple(SCORES), "score")
    lengths = sorted(check_lengths(lengths or LENGTHS[target.type]))
    shape = shape or AttentionShape(tokens=1, heads=HEADS[target.type])  # one sequence at any length
    ceilings = measure_ceilings(target, DTYPES[target.type])
    limits = limits or Limits.for_device(target)
    rows: list[Measurement] = []
    for name in scores:
        include_compiled = compiled and (target.type == "cuda" or name in ("scaled_dot", "concat"))
        rows += _measure_score(name, lengths, shape, target, ceilings, limits, include_compiled, rounds)
    return BenchReport("growth", ceilings, rows)


def _measure_score(
    name: str,
    lengths: Sequence[int],
    shape: AttentionShape,
    device: torch.device,
    ceilings: Ceilings,
    limits: Limits,
    compiled: bool,
    rounds: int,
) -> list[Measurement]:
    rows: list[Measurement] = []
    last: dict[str, Measurement] = {}
    stopped: set[str] = set()
    score = AttentionCase(name, "none", max(lengths), True, shape, device, DTYPES[device.type]).make_score()
    attentions: dict[str, Attention] = {
        "Regard": lambda q, k, v: attend(q, k, v, score=score),
        "formula, eager": formula(score, None),
    }
    if compiled:
        attentions["formula, compiled"] = compiled_formula(score, None, dynamic=True)
    for length in lengths:
        case = AttentionCase(name, "none", length, True, shape, device, DTYPES[device.type])
        q, k, v = case.inputs()

        def prepare(implementation: str, case: AttentionCase = case, inputs: tuple = (q, k, v)):
            limits.check(last.get(implementation), case.length)
            return case.step(attentions[implementation], score, *inputs)

        implementations = [
            Implementation(label, partial(prepare, label), label == "Regard")
            for label in attentions
            if label not in stopped
        ]
        for row in compare(name, implementations, case.work(), ceilings, device, rounds, length):
            rows.append(row)
            last[row.implementation] = row
            if row.seconds is None:
                stopped.add(row.implementation)
    return rows
