"""Results of a benchmark as a table, as JSON, and as a plot."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.bench.measurement import Ceilings, Measurement
from regard.errors import RegardError
from regard.files import write_atomically

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class BenchReport:
    """The measurements of one benchmark, and the machine on which they were made.

    >>> regard = Measurement("dot", "Regard", True, 64, seconds=0.001)
    >>> peer = Measurement("dot", "SDPA", length=64, seconds=0.002)
    >>> print(BenchReport("attention", Ceilings(1e12, 1e10), [regard, peer], ("FlexAttention",)))  # doctest: +ELLIPSIS
    attention: ...
    | dot | 64 | **Regard** | 1.000 ms | 2.00 |...
    not installed: FlexAttention
    """

    benchmark: str
    ceilings: Ceilings
    rows: Sequence[Measurement]
    not_installed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.benchmark}: {self.ceilings.machine}"
        yield f"ceilings: {', '.join(self._ceilings())}"
        yield ""
        yield "| case | length | implementation | time | speed vs. best peer | memory | rate | of the ceiling | |"
        yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |"
        for row in self.rows:
            name = f"**{row.implementation}**" if row.is_regard else row.implementation
            best = self._best_peer(row)
            cells = (
                row.case,
                "" if row.length is None else str(row.length),
                name,
                format_seconds(row.seconds),
                f"{best / row.seconds:.2f}" if best and row.seconds else "",
                format_bytes(row.memory),
                "" if row.rate is None else f"{format_si(row.rate)}{row.unit}".replace("  ", " "),
                "" if row.share is None else f"{row.share:.1%}",
                row.note,
            )
            yield f"| {' | '.join(cells)} |"
        if self.not_installed:
            yield ""
            yield f"not installed: {', '.join(self.not_installed)}"

    def _ceilings(self) -> Iterator[str]:
        yield f"matrix product {format_si(self.ceilings.flops)}FLOP/s"
        yield f"memory copy {format_si(self.ceilings.bytes)}B/s (read and written)"
        if self.ceilings.tanhs:
            yield f"tanh {format_si(self.ceilings.tanhs)}/s (some concat kernels avoid it)"

    def _best_peer(self, row: Measurement) -> float | None:
        peers = [
            other.seconds
            for other in self.rows
            if (other.case, other.length) == (row.case, row.length) and not other.is_regard and other.seconds
        ]
        return min(peers, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON-serializable dictionary."""
        return {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d"),
            "ceilings": dataclasses.asdict(self.ceilings),
            "not_installed": list(self.not_installed),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        path = Path(path)
        if path.suffix != ".json":
            raise RegardError(f"{path}: measurements are saved as JSON.", "Choose a file name that ends in .json.")
        write_atomically(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def plot(self, path: str | Path) -> None:
        """Plot time and memory over the length, or times as bars if there is only one length."""
        from regard.bench.bench_plots import plot_report

        plot_report(self, Path(path))


def format_si(number: float) -> str:
    """Format a number with an SI prefix.

    >>> format_si(4.68e14), format_si(21.0)
    ('468 T', '21.0 ')
    """
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} " if number < 10 or number >= 100 else f"{number:.1f} "


def format_seconds(seconds: float | None) -> str:
    """Format a duration in s, ms or µs."""
    if seconds is None:
        return "–"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def format_bytes(count: int | None) -> str:
    """Format a number of bytes in GiB, MiB or KiB."""
    if count is None:
        return ""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
