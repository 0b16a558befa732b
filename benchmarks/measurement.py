"""Shared helpers: time and memory of implementations, the peak rates of the machine, and the table of results."""

import ctypes
import dataclasses
import gc
import importlib.util
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
PACKAGES = {"transformers": "transformers", "x-transformers": "x_transformers", "CTranslate2": "ctranslate2"}
DTYPES = {"cpu": torch.float32, "mps": torch.float32, "cuda": torch.bfloat16}
ROUNDS = 5
MIN_TIMED_SECONDS = 0.02
"""minimum duration of one timing; faster functions are called repeatedly"""

MATRIX_SIZE = {"cpu": 1024, "mps": 2048, "cuda": 8192}
"""size of the square matrices whose product measures the peak FLOP/s"""


@dataclass(frozen=True)
class Measurement:
    """The result of one implementation in one case. If `seconds` is None, `note` holds the reason."""

    case: str
    implementation: str
    is_regard: bool = False
    length: int | None = None
    seconds: float | None = None
    memory: int | None = None
    """peak memory in bytes, minus the memory in use before the call"""
    rate: float | None = None
    """work per second, in `unit`"""
    unit: str = ""
    share: float | None = None
    """fraction of the speed at the ceiling of the machine (roofline)"""
    note: str = ""


class Work(NamedTuple):
    """Minimum work of a call, independent of the implementation: operations, bytes, and the amount for its rate."""

    flops: float = 0.0
    bytes: float = 0.0
    tanhs: float = 0.0
    amount: float | None = None
    """amount of work in `unit` × seconds; default: `flops`"""
    unit: str = "FLOP/s"


@dataclass(frozen=True)
class Roofline:
    """Peak rates of the machine: of a large matrix product, of a large copy (read and write), and of tanh."""

    flops: float
    bytes: float
    tanhs: float | None = None
    machine: str = ""

    def min_seconds(self, work: Work) -> float:
        """Lower bound on the time of this work.

        >>> Roofline(flops=100, bytes=10).min_seconds(Work(flops=200, bytes=50))
        5.0
        """
        return max(work.flops / self.flops, work.bytes / self.bytes, work.tanhs / self.tanhs if self.tanhs else 0.0)


class Implementation(NamedTuple):
    """An implementation to measure: `prepare` sets it up and returns the function to time.

    `prepare` raises `Unsupported` if the implementation cannot run the case.
    """

    name: str
    prepare: Callable[[], Callable[[], Any]]
    is_regard: bool = False


class Unsupported(Exception):
    """An implementation cannot run a case: not installed, not supported, too large."""


def compare(
    case: str,
    implementations: Sequence[Implementation],
    work: Work,
    roofline: Roofline,
    device: torch.device,
    rounds: int = ROUNDS,
    length: int | None = None,
) -> list[Measurement]:
    """Time the implementations in alternation, so that drift of the machine affects all equally; medians over rounds.

    The order changes from round to round, so that no implementation always follows the same other one.
    """
    calls: dict[str, tuple[Callable[[], Any], int, int | None]] = {}
    rows: dict[str, Measurement] = {}
    for implementation in implementations:
        try:
            call = implementation.prepare()
            call()  # warm-up: compilation and caches
            start = time.perf_counter()
            memory = peak_memory(call, device)
            seconds = time.perf_counter() - start
            repeats = max(1, min(1000, round(MIN_TIMED_SECONDS / max(seconds, 1e-7))))
            calls[implementation.name] = call, repeats, memory
        except Exception as error:  # failures of any kind are rows of the table
            note = _describe_failure(error)
            rows[implementation.name] = Measurement(
                case, implementation.name, implementation.is_regard, length, note=note
            )
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    timings: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(rounds):
        first = round_index // 2 % max(1, len(calls))
        order = [*calls][first:] + [*calls][:first]
        for name in order[:: -1 if round_index % 2 else 1]:
            call, repeats, _ = calls[name]
            timings[name].append(_time_calls(call, repeats, device) / repeats)
    for implementation in implementations:
        if implementation.name not in calls:
            continue
        seconds = statistics.median(timings[implementation.name])
        min_seconds = roofline.min_seconds(work)
        amount = work.flops if work.amount is None else work.amount
        rows[implementation.name] = Measurement(
            case,
            implementation.name,
            implementation.is_regard,
            length,
            seconds,
            calls[implementation.name][2],
            amount / seconds if amount else None,
            work.unit,
            min_seconds / seconds if min_seconds else None,
        )
    return [rows[implementation.name] for implementation in implementations]


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure the rates of a large matrix product, a large copy, and tanh."""
    size = MATRIX_SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    product = _best_seconds(lambda: torch.mm(a, a, out=out), device)
    # Much larger than any cache.
    source = torch.empty(64 * size * size // a.element_size(), dtype=torch.float32, device=device)
    source.fill_(1.0)
    target = torch.empty_like(source)
    copy = _best_seconds(lambda: target.copy_(source), device)
    return Roofline(
        2 * size**3 / product, 2 * source.nbytes / copy, _tanh_rate(device), machine=describe_machine(device, dtype)
    )


def _tanh_rate(device: torch.device) -> float | None:
    """tanh per second: on a CPU measured in its cache; on a GPU computed from its special function units."""
    if device.type == "cpu":
        x = torch.randn(1 << 14)
        return x.numel() * torch.get_num_threads() / _best_seconds(x.tanh, device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        clock = getattr(properties, "clock_rate", None)  # kHz; available from torch 2.8 on
        # 16 results per clock and multiprocessor on all NVIDIA GPUs since Volta.
        return 16 * properties.multi_processor_count * clock * 1e3 if clock else None
    return None


def _best_seconds(call: Callable[[], Any], device: torch.device) -> float:
    for _ in range(3):
        call()
    repeats = max(1, round(MIN_TIMED_SECONDS / max(_time_calls(call, 1, device), 1e-7)))
    return min(_time_calls(call, repeats, device) / repeats for _ in range(15))


def _time_calls(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Peak memory of a call in bytes, minus the memory in use before; None if the system does not report it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    status, clear_refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if device.type != "cpu" or not clear_refs.exists():
        return None
    # Return freed memory to the system: reusing it would hide allocations of the call.
    ctypes.CDLL(None).malloc_trim(0)
    clear_refs.write_text("5")  # resets the peak
    before = _read_kibibytes(status, "VmRSS")
    call()
    return max(0, _read_kibibytes(status, "VmHWM") - before) * 1024


def _read_kibibytes(status: Path, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def free_memory(device: torch.device) -> int:
    """Available memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    return int(match[1]) * 1024 if match else 4 << 30


def describe_machine(device: torch.device, dtype: torch.dtype) -> str:
    """Name of the processor, dtype and torch version."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor_name()}, {_thread_count()}"
    return f"{name}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"


def processor_name() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^(model name|Model)\s*: (.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return match[2].strip() if match else platform.processor() or platform.machine()


def _thread_count() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def _describe_failure(error: Exception) -> str:
    """Short reason why an implementation did not run."""
    if isinstance(error, Unsupported):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:100]


def is_installed(peer: str) -> bool:
    """Whether the package of a peer library is installed."""
    return importlib.util.find_spec(PACKAGES[peer]) is not None


@dataclass(frozen=True)
class Report:
    """The measurements of one benchmark, and the machine on which they were made."""

    benchmark: str
    roofline: Roofline
    rows: Sequence[Measurement]
    not_installed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.benchmark}: {self.roofline.machine}"
        yield f"roofline: {', '.join(self._peak_rates())}"
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

    def _peak_rates(self) -> Iterator[str]:
        yield f"matrix product {format_si(self.roofline.flops)}FLOP/s"
        yield f"memory copy {format_si(self.roofline.bytes)}B/s (read and written)"
        if self.roofline.tanhs:
            yield f"tanh {format_si(self.roofline.tanhs)}/s (some concat kernels avoid it)"

    def _best_peer(self, row: Measurement) -> float | None:
        peers = [
            other.seconds
            for other in self.rows
            if (other.case, other.length) == (row.case, row.length) and not other.is_regard and other.seconds
        ]
        return min(peers, default=None)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        content = {"benchmark": self.benchmark, "date": time.strftime("%Y-%m-%d")} | dataclasses.asdict(self)
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def format_si(number: float) -> str:
    """Format a number with an SI prefix."""
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
