"""What was measured as a table, as JSON, and as a picture."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.bench.measurement import Ceilings, Row
from regard.errors import RegardError
from regard.files import write_whole

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Report:
    """The rows of one benchmark, and the machine that they were measured on.

    >>> rows = [Row("dot", "Regard", True, 64, seconds=0.001), Row("dot", "SDPA", length=64, seconds=0.002)]
    >>> print(Report("attention", Ceilings(1e12, 1e10), rows, ("FlexAttention",)))  # doctest: +ELLIPSIS
    attention: ...
    | dot | 64 | **Regard** | 1.000 ms | 2.00 |...
    not installed: FlexAttention
    """

    what: str
    ceilings: Ceilings
    rows: Sequence[Row]
    not_installed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.what}: {self.ceilings.machine}"
        yield f"ceilings: {', '.join(self._ceilings())}"
        yield ""
        yield "| case | length | entrant | time | speed beside the best peer | memory | rate | of the ceiling | |"
        yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |"
        for row in self.rows:
            name = f"**{row.entrant}**" if row.ours else row.entrant
            best = self._best_peer(row)
            cells = (
                row.case,
                "" if row.length is None else str(row.length),
                name,
                in_seconds(row.seconds),
                f"{best / row.seconds:.2f}" if best and row.seconds else "",
                in_bytes(row.memory),
                "" if row.rate is None else f"{scaled(row.rate)}{row.unit}".replace("  ", " "),
                "" if row.share is None else f"{row.share:.1%}",
                row.note,
            )
            yield f"| {' | '.join(cells)} |"
        if self.not_installed:
            yield ""
            yield f"not installed: {', '.join(self.not_installed)}"

    def _ceilings(self) -> Iterator[str]:
        yield f"matrix product {scaled(self.ceilings.flops)}FLOP/s"
        yield f"memory copy {scaled(self.ceilings.bytes)}B/s (read and written)"
        if self.ceilings.tanhs:
            yield f"tanh {scaled(self.ceilings.tanhs)}/s (concat can do without)"

    def _best_peer(self, row: Row) -> float | None:
        peers = [
            other.seconds
            for other in self.rows
            if (other.case, other.length) == (row.case, row.length) and not other.ours and other.seconds
        ]
        return min(peers, default=None)

    def table(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "what": self.what,
            "date": time.strftime("%Y-%m-%d"),
            "ceilings": dataclasses.asdict(self.ceilings),
            "not_installed": list(self.not_installed),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        path = Path(path)
        if path.suffix != ".json":
            raise RegardError(f"{path}: rows are written as JSON.", "Choose a name that ends in .json.")
        write_whole(path, (json.dumps(self.table(), indent=1) + "\n").encode())

    def plot(self, path: str | Path) -> None:
        """Draws time and memory: against the length where there are several, as bars where there is one."""
        from regard.bench.plots import draw

        draw(self, Path(path))


def scaled(number: float) -> str:
    """A number with the prefix that suits it.

    >>> scaled(4.68e14), scaled(21.0)
    ('468 T', '21.0 ')
    """
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} " if number < 10 or number >= 100 else f"{number:.1f} "


def in_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def in_bytes(number: int | None) -> str:
    if number is None:
        return ""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1024:.0f} KiB"
